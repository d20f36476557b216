"""Models are known by their names or those of relatives, and what is not trained here is told."""

from __future__ import annotations

import pytest

from mcore_rl.errors import ConfigError
from mcore_rl.from_verl.models import model_facts, refuse_images, refused
from mcore_rl.from_verl.programs import Launch
from mcore_rl.from_verl.written import of_launch


def test_models_are_known_by_name_or_by_relatives() -> None:
    known = model_facts("Qwen/Qwen2-7B-Instruct")
    assert (known.num_layers, known.is_mixture, known.checkpoint) == (28, False, "qwen2-7b-instruct")
    relative = model_facts("/models/Qwen3-30B-A3B-Base")
    assert (relative.num_layers, relative.is_mixture, relative.checkpoint) == (48, True, "")
    assert model_facts("<path_to_dsv3_config>").num_layers is None


@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        ("Qwen3.5-27B", ""), ("qwen3_5-35b-a3b", ""), ("Seed-OSS-36B-Base", ""),
        ("MiMo-7B-RL", "MiMo"), ("DeepSeek-V4-Flash", "DeepseekV4"), ("gemma-2b-it", "Gemma"), ("OLMo-2-7B", "Olmo2"),
        ("Qwen3-30B-A3B", ""), ("Qwen3-Next-80B-A3B", ""), ("gemma-2-27b-it", ""), ("Llama-3.1-70B", ""),
        ("DeepSeek-V3-0324", ""), ("Moonlight-16B-A3B", ""), ("my-model", ""), ("", ""), ("Qwen2.5-7B", ""),
    ],
)  # fmt: skip
def test_what_a_name_says(name: str, architecture: str) -> None:
    assert refused(name.lower()).partition("For")[0] == architecture
    assert bool(model_facts(f"/models/{name}").refused) is bool(architecture)


@pytest.mark.parametrize(
    "words",
    [
        ["data.image_key=images"], ["data.video_key=videos"], ["actor_rollout_ref.model.path=Qwen/Qwen2.5-VL-7B"],
        ["actor_rollout_ref.model.path=/m/Qwen3-VL-30B-A3B-Instruct"],
        ["actor_rollout_ref.model.path=openbmb/MiniCPM-o-2_6"],
        ["actor_rollout_ref.model.path=zai-org/GLM-4.1V-9B-Thinking"],
    ],
)  # fmt: skip
def test_images_are_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError, match="asks for images"):
        refuse_images(of_launch(Launch("verl.trainer.main_ppo", words)))


@pytest.mark.parametrize("word", ["data.image_key=null", "actor_rollout_ref.model.path=Qwen/Qwen3-8B", "a=1"])
def test_text_is_not(word: str) -> None:
    refuse_images(of_launch(Launch("verl.trainer.main_ppo", [word])))
