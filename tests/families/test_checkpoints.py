"""The yamls of ``model_configs/``: complete, found by name, and with layouts that the models allow."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_rl.config.rollout import rollout_violations
from mcore_rl.families.checkpoints import HARDWARE, find_checkpoint, known_checkpoints, published_config
from mcore_rl.families.registry import FAMILIES, model_of
from mcore_rl.families.towers import PICTURES
from mcore_rl.ground.errors import ConfigError
from mcore_rl.parallel.layout import layout_violations
from tests.support.published import FACTS, MODEL_CONFIGS

KNOWN = known_checkpoints(MODEL_CONFIGS)


def test_yamls_and_facts_are_of_the_same_checkpoints() -> None:
    assert sorted(checkpoint.hf_id for checkpoint in KNOWN.values()) == sorted(FACTS)
    families = {checkpoint.family for checkpoint in KNOWN.values() if checkpoint.presets}
    assert families - set(PICTURES) == set(FAMILIES) and families & set(PICTURES) == {"qwen2_5_vl", "qwen3_vl_moe"}


@pytest.mark.parametrize("name", KNOWN)
def test_presets_can_be_built(name: str) -> None:
    checkpoint = KNOWN[name]
    family, model = model_of(published_config(checkpoint, MODEL_CONFIGS), pictures=checkpoint.family in PICTURES)
    assert family.name == checkpoint.family
    assert name == checkpoint.hf_id.rpartition("/")[2].lower()
    assert set(checkpoint.presets) == (set() if name.startswith("tiny-") else set(HARDWARE))
    for hardware, preset in checkpoint.presets.items():
        assert layout_violations(model, preset.training, preset.num_gpus) == [], hardware
        assert rollout_violations(model, preset.rollout) == [], hardware
        assert preset.rollout.world_size == preset.num_gpus, hardware


@pytest.mark.parametrize(
    ("wanted", "name"),
    [
        ("mixtral-8x22b", "mixtral-8x22b-instruct-v0.1"),
        ("Qwen/Qwen3-4B", "qwen3-4b"),
        ("Qwen3-4B", "qwen3-4b"),
        ("qwen2.5-7b", "qwen2.5-7b-instruct"),
        ("qwen3-3", None),
        ("mixtral", None),
        ("llama-4", None),
    ],
)
def test_a_checkpoint_is_found_by_name_beginning_or_id(wanted: str, name: str | None) -> None:
    if name is not None:
        assert find_checkpoint(wanted, MODEL_CONFIGS).name == name
        return
    with pytest.raises(ConfigError, match="Write one of") as raised:
        find_checkpoint(wanted, MODEL_CONFIGS)
    near = {"qwen3-3": "qwen3-30b-a3b", "mixtral": "mixtral-8x7b-instruct-v0.1", "llama-4": "tiny-llama"}[wanted]
    assert near in raised.value.violations[0].remedy


GOOD = "hf_id: a/b\nfamily: llama\npresets:\n  h100_80gb: {num_gpus: 8, training: 'tp=2', rollout: 'tp=8'}\n"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("a: [", "is no yaml"),
        ("hf_id: a/b\n", "Write hf_id, family, presets"),
        (GOOD + "more: 1\n", "has other keys"),
        (GOOD.replace("llama", "bert"), "is in the folder llama"),
        (GOOD.replace("h100_80gb", "a100"), "no such hardware"),
        (GOOD.replace("num_gpus: 8", "num_gpus: x"), "is no int"),
        (GOOD.replace("num_gpus: 8, ", ""), "Write num_gpus, training, rollout"),
        (GOOD.replace("'tp=2'", "'tpp=2'"), "no such axis"),
        (GOOD.replace("'tp=8'", "'pp=8'"), "no such axis"),
        (GOOD.replace("'tp=2'", "'tp=2', pipeline_layers: all"), "is no list of integers"),
    ],
)
def test_a_yaml_that_is_wrong_is_refused_with_its_name(text: str, complaint: str, tmp_path: Path) -> None:
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama/good.yaml").write_text(GOOD)
    assert list(known_checkpoints(tmp_path)) == ["good"]
    (tmp_path / "llama/bad.yaml").write_text(text)
    with pytest.raises(ConfigError, match=complaint) as raised:
        known_checkpoints(tmp_path)
    assert all(violation.key.startswith("llama/bad.yaml") for violation in raised.value.violations)


def test_facts_that_are_missing_are_said_to_be() -> None:
    checkpoint = KNOWN["qwen3-4b"]
    published = published_config(checkpoint, MODEL_CONFIGS)
    assert published["hidden_size"] == 2560
    unknown = type(checkpoint)(name="x", hf_id="a/b", family="llama", presets={})
    with pytest.raises(ConfigError, match="has no entry"):
        published_config(unknown, MODEL_CONFIGS)
