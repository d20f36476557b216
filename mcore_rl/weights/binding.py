"""Pairs the tensors of this rank's modules with their rows in the family's table.

Nothing is read, moved or guessed: names are compared through ``Table.canonical``, and one without a partner is an
error.

Invariant: every parameter and persistent buffer that holds a weight of the base model is bound once, and every tensor
that the table gives this rank is bound once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_rl.ground.errors import WeightMapError
from mcore_rl.weights.table import LocalTensor, Table


@dataclass(frozen=True, slots=True)
class Bound:
    """One pair.  local: the table's row.  tensor: the parameter or buffer itself, on any device (also meta)."""

    local: LocalTensor
    tensor: Tensor


def bind(chunks: Sequence[torch.nn.Module], table: Table, rank: int) -> list[Bound]:
    """Pair everything in the model ``chunks`` of ``rank`` with the table, in the table's order.

    chunks: unwrapped, in the order of virtual stages, real or on the meta device.  Raises WeightMapError as
    ``bind_states`` does.
    """
    return bind_states([chunk.state_dict(keep_vars=True) for chunk in chunks], table, rank)


def bind_states(states: Sequence[Mapping[str, Tensor]], table: Table, rank: int) -> list[Bound]:
    """``bind`` for the state dicts of the chunks.

    Raises WeightMapError with every violation: a key without a rule, two keys with one canonical name, a rule without a
    tensor, a wrong shape.
    """
    expected = {(local.chunk, local.name): local for local in table.tensors(rank)}
    modules: dict[tuple[int, str], Tensor] = {}
    problems = []
    for chunk, state in enumerate(states):
        for key, tensor in state.items():
            name = table.canonical(key)
            if name is None:
                continue
            if (chunk, name) in modules:
                problems.append(f"chunk {chunk}: {key} is one of two that mean {name}. One weight has one module")
            modules[chunk, name] = tensor
    problems += _unmatched(table, expected, modules)
    for place, local in expected.items():
        if place in modules and tuple(modules[place].shape) != table.shape(local):
            sizes = f"expected shape {table.shape(local)} and found {tuple(modules[place].shape)}"
            remedy = "Build the modules and the table from one ModelConfig and one layout"
            problems.append(f"chunk {place[0]}: {place[1]}: {sizes}. {remedy}")
    if problems:
        raise WeightMapError(f"{table.family.name}, rank {rank} ({table.layout.coords(rank)})", problems)
    return [Bound(local, modules[place]) for place, local in expected.items()]


def _unmatched(
    table: Table, expected: Mapping[tuple[int, str], LocalTensor], modules: Mapping[tuple[int, str], Tensor]
) -> Iterator[str]:
    for chunk, name in modules.keys() - expected.keys():
        shape = tuple(modules[chunk, name].shape)
        remedy = f"Write a rule for it in families/{table.family.name}.py, or build the modules that the rules mean"
        yield f"chunk {chunk}: {name} of shape {shape} is in the modules and no rule speaks of it. {remedy}"
    for chunk, name in expected.keys() - modules.keys():
        remedy = f"Build the modules with it, or mend families/{table.family.name}.py"
        yield f"chunk {chunk}: {name} is in the table and not in the modules. {remedy}"
