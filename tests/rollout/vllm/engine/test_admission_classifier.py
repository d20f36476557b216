"""Which checkpoints are reward models: what is no such thing is refused with its key, and all of it at once."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from mcore_rl.config.engine import Device
from mcore_rl.ground.errors import ConfigError
from mcore_rl.parallel.device import detect
from mcore_rl.rollout.vllm.engine.admission import admit
from tests.support import reward_models, rollouts
from tests.support.checkpoints import edit_config

CPU = detect(Device.cpu)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sound")
    reward_models.write(directory)
    return directory


@pytest.fixture
def edited(sound: Path, tmp_path: Path) -> Path:
    shutil.copytree(sound, tmp_path, dirs_exist_ok=True)
    return tmp_path


def refusal(directory: Path, **changes: object) -> str:
    with pytest.raises(ConfigError) as error:
        admit(directory, reward_models.config(directory, **changes), CPU)
    return str(error.value)


def change_head(directory: Path, **tensors: object) -> None:
    """None takes a tensor away."""
    path = directory / "model.safetensors"
    held: dict[str, Any] = load_file(path) | {name.replace("_", "."): each for name, each in tensors.items()}
    save_file({name: each for name, each in held.items() if each is not None}, path, metadata={"format": "pt"})


def test_a_classifier_of_one_label_is_a_reward_model(sound: Path) -> None:
    assert admit(sound, reward_models.config(sound, tp=2), CPU).vocab_size == rollouts.VOCAB


@pytest.mark.parametrize("family", ["qwen2", "mixtral", "qwen3_moe"])
def test_so_are_those_of_other_families(family: str, tmp_path: Path) -> None:
    reward_models.write(tmp_path, family)
    assert admit(tmp_path, reward_models.config(tmp_path), CPU).num_layers == 2


def test_a_head_of_two_layers_is_qwen2_s_own(tmp_path: Path) -> None:
    reward_models.TwoLayerReward(tmp_path)
    assert admit(tmp_path, reward_models.config(tmp_path), CPU).num_layers == 2
    change_head(tmp_path, score_0_bias=None)
    assert "the head of a Qwen2ForRewardModel of one label is score.0.weight [128, 128]" in refusal(tmp_path)


def test_a_language_model_is_none(tmp_path: Path) -> None:
    rollouts.write("llama", tmp_path)
    said = refusal(tmp_path)
    assert (
        "reward_model.model.path: config.json: architectures=['LlamaForCausalLM']: is a language model, without" in said
    )
    assert "Name a checkpoint of one of LlamaForSequenceClassification" in said and "Qwen2ForRewardModel" in said


@pytest.mark.parametrize("names", [["BertForSequenceClassification"], None, [], "LlamaForSequenceClassification"])
def test_an_architecture_that_is_not_known(edited: Path, names: object) -> None:
    edit_config(edited, architectures=names)
    assert "architectures" in refusal(edited) and "is no reward model known here" in refusal(edited)


def test_several_labels_are_no_reward(tmp_path: Path) -> None:
    reward_models.write(tmp_path, labels=3)
    said = refusal(tmp_path)
    assert "num_labels=3: is the number of the classifier's labels, and a reward is one number" in said
    assert "is score.weight [1, 128], and the files have score.weight [3, 128]" in said


def test_labels_that_nobody_counted_are_two(edited: Path) -> None:
    edit_config(edited, id2label=None)
    assert "config.json: num_labels=2" in refusal(edited)
    edit_config(edited, num_labels=1)
    assert admit(edited, reward_models.config(edited), CPU)


def test_a_head_that_is_missing_or_has_a_bias(edited: Path) -> None:
    weight = load_file(edited / "model.safetensors")["score.weight"]
    change_head(edited, score_bias=weight[0, :1].clone())
    assert "the files have score.bias [1], score.weight [1, 128]" in refusal(edited)  # transformers would ignore it
    change_head(edited, score_bias=None, score_weight=None)
    assert "and the files have none. Name the checkpoint of a trained reward model" in refusal(edited)


def test_no_directory_no_configuration_no_weights(edited: Path) -> None:
    assert "config.json: cannot be read" in refusal(edited / "nowhere")
    (edited / "model.safetensors").unlink()
    assert f"reward_model.model.path={edited}: " in refusal(edited)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (dict(max_length=513), "reward_model.max_length=513: exceeds the 512 tokens that the reward model reads"),
        (dict(tp=3), "reward_model.tp=3: does not divide model.num_attention_heads=4. Write a reward_model.tp"),
        (dict(kv_cache_memory_bytes=4096), "reward_model.kv_cache_memory_bytes=4096: does not hold one conversation"),
        (dict(gpu_memory_utilization=1e-6), "reward_model.gpu_memory_utilization=1e-06: is 0.0 GiB of"),
        (dict(max_num_seqs=0), "reward_model.max_num_seqs=0: must be positive"),
    ],
)
def test_sizes_that_cannot_be(sound: Path, changes: dict[str, Any], said: str) -> None:
    message = refusal(sound, **changes)
    assert said in message and "rollout." not in message


def test_experts_are_not_spread_on_a_cpu(tmp_path: Path) -> None:
    reward_models.write(tmp_path, "mixtral")
    assert "reward_model.ep=2: vLLM's CPU kernel of the experts cannot spread them" in refusal(tmp_path, tp=2, ep=2)


def test_everything_is_said_at_once(edited: Path) -> None:
    edit_config(edited, num_labels=2, id2label=None, hidden_act="relu")
    change_head(edited, score_weight=None)
    said = refusal(edited, max_num_seqs=0)
    for words in ("max_num_seqs=0", "num_labels=2", "hidden_act"):
        assert words in said, said
