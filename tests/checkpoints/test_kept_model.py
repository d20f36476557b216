"""A checkpoint beside another configuration: the oracle is the one field that was changed."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.checkpoints.convert import HF, open_megatron, to_hf, to_megatron
from mcore_rl.checkpoints.kept_model import demand_kept_model
from mcore_rl.families.registry import model_of
from mcore_rl.ground.errors import CheckpointError
from tests.support import checkpoints, picture_models
from tests.support.published import TINY

CHANGES: list[tuple[str, dict[str, Any], list[str]]] = [
    ("llama", {"rope_theta": 10000.0}, ["rotary_base: 500000.0 in its own hf/config.json, 10000.0 in the one given"]),
    ("llama", {"rms_norm_eps": 1e-3}, ["norm_epsilon: 1e-05 in its own hf/config.json, 0.001 in the one given"]),
    ("llama", {"rope_scaling": None}, ["rope.type", "rope.factor", "rope.original_max_position_embeddings"]),
    ("llama", {"tie_word_embeddings": True}, ["tie_output: false in its own hf/config.json, true in the one given"]),
    ("mistral", {"sliding_window": None}, ["sliding_window: 24 in its own", "sliding_layers: [0, 1] in its own"]),
    ("mixtral", {"num_experts_per_tok": 3}, ["moe.top_k: 2 in its own hf/config.json, 3 in the one given"]),
    ("qwen3_moe", {"norm_topk_prob": False}, ["moe.norm_topk_prob: true in its own"]),
    ("gemma2", {"query_pre_attn_scalar": 64}, ["softmax_scale: "]),
    (
        "gemma2",
        {"attn_logit_softcapping": None},
        ["attention_soft_cap: 5.0 in its own hf/config.json, null in the one"],
    ),
    ("deepseek_v3", {"routed_scaling_factor": 1.0}, ["moe.routed_scaling_factor: 2.5 in its own"]),
]


def keep(facts: dict[str, Any], directory: Path) -> Path:
    (directory / HF).mkdir()
    (directory / HF / "config.json").write_text(json.dumps(facts))
    return directory / HF


@pytest.mark.parametrize(("name", "changed", "named"), CHANGES)
def test_every_field_that_is_not_the_checkpoints_is_named(
    name: str, changed: dict[str, Any], named: list[str], tmp_path: Path
) -> None:
    kept, facts = keep(TINY[name], tmp_path), TINY[name]
    demand_kept_model(tmp_path, kept, model_of(facts)[1])
    with pytest.raises(CheckpointError) as caught:
        demand_kept_model(tmp_path, kept, model_of(facts | changed)[1])
    lines = caught.value.problems
    assert len(lines) == len(named) and all(line.startswith(start) for line, start in zip(lines, named, strict=True)), (
        lines
    )
    assert "Give the config.json that it was trained with" in lines[-1]


def test_how_long_sequences_may_be_is_no_other_model(tmp_path: Path) -> None:
    kept = keep(TINY["mixtral"], tmp_path)
    demand_kept_model(tmp_path, kept, model_of(TINY["mixtral"] | {"max_position_embeddings": 1024})[1])


def test_a_critic_keeps_its_language_model(tmp_path: Path) -> None:
    kept = keep(TINY["qwen2"] | {"architectures": ["Qwen2ForSequenceClassification"], "num_labels": 1}, tmp_path)
    demand_kept_model(tmp_path, kept, model_of(TINY["qwen2"])[1])
    with pytest.raises(CheckpointError, match="norm_epsilon"):
        demand_kept_model(tmp_path, kept, model_of(TINY["qwen2"] | {"rms_norm_eps": 1e-5})[1])


def test_a_checkpoint_of_another_tool_says_nothing(tmp_path: Path) -> None:
    demand_kept_model(tmp_path, tmp_path / HF, model_of(TINY["llama"])[1])


def test_no_megatron_checkpoint_opens_beside_another_configuration(tmp_path: Path) -> None:
    checkpoints.write("llama", tmp_path / "model")
    to_megatron(tmp_path / "model", tmp_path / "megatron", report=lambda *_: None)
    shutil.copytree(tmp_path / "model", tmp_path / "other")
    open_megatron(tmp_path / "megatron", tmp_path / "other").close()
    checkpoints.edit_config(tmp_path / "other", rms_norm_eps=0.5)
    problem = r"norm_epsilon: 1e-05 in its own hf/config.json, 0.5 in the one given"
    with pytest.raises(CheckpointError, match=problem):
        open_megatron(tmp_path / "megatron", tmp_path / "other")
    with pytest.raises(CheckpointError, match=problem):
        to_hf(tmp_path / "megatron", tmp_path / "again", config=tmp_path / "other", report=lambda *_: None)
    assert not (tmp_path / "again").exists()


def test_a_model_that_sees_pictures_is_compared_with_its_tower(tmp_path: Path) -> None:
    config = picture_models.config("qwen3_vl")
    kept, model = keep(config, tmp_path), model_of(config, pictures=True)[1]
    demand_kept_model(tmp_path, kept, model)
    assert model.vision is not None
    other = replace(model, vision=replace(model.vision, window_size=56))
    with pytest.raises(CheckpointError, match=r"vision\.window_size: null in its own"):
        demand_kept_model(tmp_path, kept, other)
