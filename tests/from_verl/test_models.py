"""Models are known by their names or those of relatives, and what is not trained here is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mcore_rl.from_verl.models import model_facts, refused


def test_models_are_known_by_name_or_by_relatives() -> None:
    known = model_facts("Qwen/Qwen2-7B-Instruct")
    assert (known.num_layers, known.is_mixture, known.checkpoint) == (28, False, "qwen2-7b-instruct")
    relative = model_facts("/models/Qwen3-30B-A3B-Base")
    assert (relative.num_layers, relative.is_mixture, relative.checkpoint) == (48, True, "")
    assert model_facts("<path_to_dsv3_config>").num_layers is None
    seeing = model_facts("/m/Qwen3-VL-30B-A3B-Instruct")
    like = model_facts("/m/Qwen3-VL-4B-Instruct")  # its language model is known
    assert (like.num_layers, like.is_mixture, like.checkpoint, like.tower) == (36, False, "", "qwen3_vl")
    assert (seeing.num_layers, seeing.is_mixture, seeing.checkpoint, seeing.tower) == (
        48,
        True,
        "qwen3-vl-30b-a3b-instruct",
        "qwen3_vl_moe",
    )


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
    ("path", "sees", "tower"),
    [
        ("Qwen/Qwen2.5-VL-7B-Instruct", True, "qwen2_5_vl"), ("/m/qwen2_5_vl_3b", True, "qwen2_5_vl"),
        ("/m/Qwen3-VL-4B-Instruct", True, "qwen3_vl"), ("openbmb/MiniCPM-o-2_6", True, ""),
        ("zai-org/GLM-4.1V-9B-Thinking", True, ""), ("Qwen/Qwen2-VL-7B", True, ""), ("Qwen/Qwen3.5-27B", None, ""),
        ("Qwen/Qwen2-7B-Instruct", False, ""), ("my-model", None, None), ("", None, None),
        ("OpenGVLab/InternVL3-8B", True, ""), ("moonshotai/Kimi-VL-A3B-Instruct", True, ""),
        ("TIGER-Lab/VL-Rethinker-7B", True, None), ("/ckpt/geo3k_vlm_sft", True, None),
        ("/cache/models--Qwen--Qwen2.5-VL-7B-Instruct/snapshots/0a1b2c", True, "qwen2_5_vl"),
        ("/cache/models--my--model/snapshots/vl", None, None),
        ("/ckpt/Qwen2.5-VL-7B-Instruct/global_step_100/actor/huggingface", True, "qwen2_5_vl"),
        ("/ckpt/geo3k_vlm_sft/global_step_1/huggingface", True, None),
        ("/ckpt/Qwen3-8B/global_step_100/actor/huggingface", False, ""),
        ("/teams/vlm/Qwen3-8B", False, ""), ("/m/kimi-k2-instruct", False, ""), ("/m/gemma-3-1b-it", False, ""),
    ],
)  # fmt: skip
def test_what_a_path_says_of_pictures(path: str, sees: bool | None, tower: str | None) -> None:
    facts = model_facts(path)
    assert (facts.sees, facts.tower) == (sees, tower)


@pytest.mark.parametrize(
    ("architecture", "tower"),
    [("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl"), ("Qwen2ForCausalLM", "")],
)
def test_a_folder_goes_before_its_name(tmp_path: Path, architecture: str, tower: str) -> None:
    """config.json decides, whatever somebody called the folder."""
    size = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 512}
    size |= {"num_key_value_heads": 2, "intermediate_size": 128, "tie_word_embeddings": False}
    kind = tower or "qwen2"
    folder = tmp_path / "my-vlm"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture], "model_type": kind} | size))
    facts = model_facts(str(folder))
    assert (facts.num_layers, facts.sees, facts.tower) == (2, bool(tower), tower)
