"""What is stored under which key against weights written out by hand (hf_reference), and what is refused.

That Megatron's own modules load it, and that what they save is read, is held by tests/training/test_checkpoint.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from mcore_rl.checkpoints import megatron_checkpoint
from mcore_rl.checkpoints.convert import to_megatron
from mcore_rl.checkpoints.distcp import DistributedCheckpoint
from mcore_rl.checkpoints.megatron_checkpoint import MegatronCheckpoint
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.parallel import parse_layout
from mcore_rl.families.registry import FAMILIES
from mcore_rl.ground.errors import CheckpointError
from mcore_rl.weights.tensor_slice import TensorSlice
from tests.support import checkpoints, hf_reference

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
Weights = dict[str, Tensor]


def _quiet(stage: str, num_bytes: int, total: int) -> None: ...


def _by_hand(name: str) -> Weights:
    model = checkpoints.MODELS[name]
    return hf_reference.full_weights(hf_reference.build(model), model)


def _save(tmp_path: Path, weights: Weights) -> Path:
    path = tmp_path / "saved"
    dcp.save(dict(weights), checkpoint_id=path, no_dist=True)
    return path


@pytest.mark.parametrize(
    ("name", "layout"), [*((name, "") for name in checkpoints.MODELS), ("mixtral", "tp=2,ep=2"), ("qwen2", "tp=2,pp=2")]
)
def test_every_key_holds_what_megatron_keeps_there(
    name: str, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(megatron_checkpoint, "CHUNK_BYTES", 4000)  # so that rows of chunks end anywhere
    checkpoints.write(name, tmp_path / "hf")
    to_megatron(tmp_path / "hf", tmp_path / "out", parallel=parse_layout(layout), report=_quiet)
    expected = _by_hand(name)
    state = {key: torch.zeros_like(tensor) for key, tensor in expected.items()}
    dcp.load(state, checkpoint_id=tmp_path / "out", no_dist=True)
    assert all(torch.equal(state[key], expected[key]) for key in expected)
    with DistributedCheckpoint.open(tmp_path / "out") as stored:
        assert stored.tensors.keys() == expected.keys()


def test_chunks_are_cut_where_the_layout_cuts(tmp_path: Path) -> None:
    checkpoints.write("mixtral", tmp_path / "hf")
    to_megatron(tmp_path / "hf", tmp_path / "out", parallel=parse_layout("tp=2,etp=2"), report=_quiet)
    with DistributedCheckpoint.open(tmp_path / "out") as stored:
        starts = {
            key: {chunk.region.start for chunk in stored.tensors[key].chunks}
            for key in (
                "embedding.word_embeddings.weight",
                "decoder.layers.0.self_attention.linear_proj.weight",
                "decoder.layers.0.mlp.experts.experts.linear_fc1.weight",
                "decoder.layers.0.mlp.experts.experts.linear_fc2.weight",
            )
        }
    assert list(starts.values()) == [
        {(0, 0), (51, 0)},  # 101 rows, padded to 102
        {(0, 0), (0, 32)},
        {(expert, row, 0) for expert in range(4) for row in (0, 32, 64, 96)},  # half of gate, half of up
        {(expert, 0, column) for expert in range(4) for column in (0, 32)},
    ]


def _rename(weights: Weights, change: Callable[[str], str]) -> Weights:
    return {change(key): tensor for key, tensor in weights.items()}


def _stack_layers(weights: Weights) -> Weights:
    stacked = {key: tensor for key, tensor in weights.items() if ".layers." not in key}
    for key in weights:
        if ".layers.0." in key:
            layers = [weights[key.replace(".0.", f".{layer}.", 1)] for layer in range(4)]
            stacked[key.replace(".0.", ".", 1)] = torch.stack(layers)
    return stacked


def _unstack_experts(weights: Weights, new: str) -> Weights:
    unstacked = {}
    for key, tensor in weights.items():
        match = re.fullmatch(r"(.*)\.experts\.experts\.(linear_fc\d)\.weight", key)
        if match is None:
            unstacked[key] = tensor
        else:
            for expert, part in enumerate(tensor):
                unstacked[new.format(mlp=match.group(1), e=expert, fc=match.group(2))] = part.clone()
    return unstacked


def _pad(weights: Weights) -> Weights:
    rows = {"embedding.word_embeddings.weight", "output_layer.weight"}
    return {
        key: torch.cat([tensor, torch.full((27, tensor.shape[1]), 7.0)]) if key in rows else tensor
        for key, tensor in weights.items()
    }


DIALECTS: dict[str, Callable[[Weights], Weights]] = {
    "as it is": lambda weights: weights,
    "prefix": lambda weights: _rename(weights, lambda key: f"model.module.{key}"),
    "stacked layers": _stack_layers,
    "stacked layers, prefix": lambda weights: _rename(_stack_layers(weights), lambda key: f"model.{key}"),
    "local norms": lambda weights: _rename(
        weights, lambda key: key.replace("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight")
    ),
    "experts apart": lambda weights: _unstack_experts(weights, "{mlp}.experts.experts.{e}.{fc}.weight"),
    "experts of Transformer Engine": lambda weights: _unstack_experts(weights, "{mlp}.experts.{fc}.weight{e}"),
    "padded to 128": _pad,
    "other entries": lambda weights: (
        weights
        | {
            "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc2.weight": torch.ones(2),
            "decoder.layers.0.self_attention.linear_qkv._extra_state": torch.ones(3, dtype=torch.uint8),
        }
    ),
}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_dialect_reads_as_the_same_tensors(dialect: str, tmp_path: Path) -> None:
    checkpoints.write("qwen3_moe", tmp_path / "hf")
    saved = _save(tmp_path, DIALECTS[dialect](_by_hand("qwen3_moe")))
    source = MegatronCheckpoint(
        DistributedCheckpoint.open(saved), FAMILIES["qwen3_moe"], checkpoints.MODELS["qwen3_moe"]
    )
    expected = checkpoints.tensors(tmp_path / "hf")
    assert source.tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        out = torch.empty_like(tensor)
        source.read_into(name, TensorSlice.whole(tensor.shape), out)
        assert torch.equal(out, tensor), name
        part = torch.empty(tuple(max(1, size // 3) for size in tensor.shape))
        start = tuple(size // 2 for size in tensor.shape)
        source.read_into(name, TensorSlice(start, tuple(part.shape)), part)
        there = tuple(slice(begin, begin + size) for begin, size in zip(start, part.shape, strict=True))
        assert torch.equal(part, tensor[there]), name


def _problems(saved: Path, name: str, model: ModelConfig | None = None) -> tuple[str, ...]:
    with pytest.raises(CheckpointError) as refused:
        MegatronCheckpoint(DistributedCheckpoint.open(saved), FAMILIES[name], model or checkpoints.MODELS[name])
    return refused.value.problems


def test_everything_wrong_is_said_at_once(tmp_path: Path) -> None:
    weights = _by_hand("mixtral")
    del weights["decoder.final_layernorm.weight"]
    weights["decoder.layers.1.self_attention.linear_proj.weight"] = torch.zeros(48, 63)
    weights["decoder.layers.2.mlp.experts.experts.linear_fc1.weight"] = torch.zeros(3, 128, 48)
    weights["decoder.layers.3.mlp.router.weight"] = torch.zeros(4, 48, dtype=torch.int8)
    weights["decoder.layers.4.pre_mlp_layernorm.weight"] = torch.zeros(48)
    weights["decoder.layers.0.self_attention.linear_qkv.bias"] = torch.zeros(128)
    weights["decoder.layers.0.self_attention.linear_qkv.adapter.linear_in.weight"] = torch.zeros(2, 48)
    weights["embedding.word_embeddings.weight"] = torch.zeros(100, 48)
    problems = _problems(_save(tmp_path, weights), "mixtral")
    expected = (
        r"expected 4 layers by config\.json and found 5",
        r"decoder\.final_layernorm\.weight is missing",
        r"1\.self_attention\.linear_proj\.weight: expected shape \(48, 64\) by config\.json and found \(48, 63\)",
        r"2\.mlp\.experts.*expected shape \(4, 128, 48\) by config\.json and found \(3, 128, 48\)",
        r"3\.mlp\.router\.weight: expected floating-point numbers and found torch\.int8",
        r"4\.pre_mlp_layernorm\.weight of shape \(48,\) has no place in this mixtral model",
        r"0\.self_attention\.linear_qkv\.bias of shape \(128,\) has no place",
        r"adapter\.linear_in\.weight is part of an adapter\. Merge it",
        r"word_embeddings\.weight: expected shape \(101, 48\).*found \(100, 48\)",
    )
    for pattern in expected:
        assert [problem for problem in problems if re.search(pattern, problem)], f"{pattern} is not among {problems}"
    assert len(problems) == len(expected)


def test_another_vocabulary_is_not_taken_for_padding(tmp_path: Path) -> None:
    weights = _by_hand("llama")
    weights["embedding.word_embeddings.weight"] = torch.zeros(101 + 8192, 48)
    (problem,) = _problems(_save(tmp_path, weights), "llama")
    assert "expected shape (101, 48)" in problem


def test_stacked_layers_must_be_as_many_as_the_model_has(tmp_path: Path) -> None:
    weights = {
        key: tensor[:3] if ".layers." in key else tensor for key, tensor in _stack_layers(_by_hand("llama")).items()
    }
    problems = _problems(_save(tmp_path, weights), "llama")
    assert all("expected shape (4, " in problem and "found (3, " in problem for problem in problems)
