"""Modules and table meet name by name and shape by shape; everything that does not meet is said at once."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mcore_rl.ground.errors import WeightMapError
from mcore_rl.weights.binding import bind_states
from mcore_rl.weights.table import Table
from tests.support import checkpoints

State = dict[str, Tensor]
LAYOUT = "tp=2,pp=2,vpp=2"
QKV = "decoder.layers.0.self_attention.linear_qkv.weight"


def _states(table: Table, rank: int) -> list[State]:
    """What the chunks of ``rank`` would say, as empty tensors."""
    states: list[State] = [{} for _ in range(table.parallel.vpp)]
    for local in table.tensors(rank):
        states[local.chunk][local.name] = torch.empty(table.shape(local), device="meta")
    return states


@pytest.mark.parametrize("name", checkpoints.MODELS)
def test_each_tensor_meets_its_own_entry(name: str) -> None:
    table = checkpoints.table(name, LAYOUT)
    for rank in range(table.layout.world_size):
        states = _states(table, rank)
        for state in states:  # nothing of these is a weight of the base model
            state["decoder.layers.0.mlp._extra_state"] = None  # type: ignore[assignment]
            state["decoder.layers.0.mlp.linear_fc1.adapter.lora_A.weight"] = torch.empty(1, 1)
        bound = bind_states(states, table, rank)
        assert [each.local for each in bound] == table.tensors(rank)
        assert all(each.tensor is states[each.local.chunk][each.local.name] for each in bound)


def test_other_spellings_meet_too() -> None:
    table = checkpoints.table("mixtral")
    (state,) = _states(table, 0)
    fused = {
        "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight": "decoder.layers.0.input_layernorm.weight",
        "decoder.layers.1.mlp.experts.linear_fc2.weight3": (
            "decoder.layers.1.mlp.experts.local_experts.3.linear_fc2.weight"
        ),
    }
    for theirs, ours in fused.items():
        state[theirs] = state.pop(ours)
    by_name = {each.local.name: each.tensor for each in bind_states([state], table, 0)}
    assert all(by_name[ours] is state[theirs] for theirs, ours in fused.items())


def _drop(state: State) -> None:
    del state[QKV]


def _add(state: State) -> None:
    state["decoder.layers.0.mlp.linear_fc1.bias"] = torch.empty(3)


def _reshape(state: State) -> None:
    state[QKV] = torch.empty(1, *state[QKV].shape[1:])


def _double(state: State) -> None:
    name = "decoder.layers.0.input_layernorm.weight"
    state["decoder.layers.0.self_attention.linear_qkv.layer_norm_weight"] = state[name]


MISTAKES: dict[str, tuple[Callable[[State], None], tuple[str, ...]]] = {
    "missing": (_drop, (QKV, "not in the modules")),
    "unknown": (_add, ("linear_fc1.bias", "no rule", "families/llama.py")),
    "shape": (_reshape, (QKV, "expected shape (64, 48)", "found (1, 48)")),
    "double": (_double, ("linear_qkv.layer_norm_weight", "one of two that mean", "input_layernorm.weight")),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_one_mistake_is_one_problem(mistake: str) -> None:
    table = checkpoints.table("llama", LAYOUT)
    states = _states(table, rank=3)
    change, words = MISTAKES[mistake]
    change(states[1])
    with pytest.raises(WeightMapError) as refused:
        bind_states(states, table, rank=3)
    (problem,) = refused.value.problems
    assert all(word in problem for word in ("chunk 1", *words))
    assert "llama, rank 3 (dp0 pp1 tp1" in str(refused.value)


def test_all_mistakes_are_said_at_once_and_cross_process_borders() -> None:
    table = checkpoints.table("llama", LAYOUT)
    states = _states(table, rank=0)
    _drop(states[0])
    _add(states[0])
    _reshape(states[1])
    _double(states[1])
    with pytest.raises(WeightMapError) as refused:
        bind_states(states, table, rank=0)
    assert len(refused.value.problems) == 4
    again = pickle.loads(pickle.dumps(refused.value))
    assert type(again) is WeightMapError and again.problems == refused.value.problems
