"""The mutation score of the tables of adapters: how many tables that are one rule away from a right one are named.

Where an adapter's elements are follows from where its weight's are, and that is said by the oracles of the weights,
which share nothing with the tables.  The columns of a weight's rows of one Hugging Face layer are the columns of A that
the rank has, and those rows the rows of B: ``(B A)[i, j]`` is added to ``W[i, j]``.  Of vLLM's memory for adapters,
vLLM's own loading of a PEFT directory says it (``rollout/vllm/oracle.py``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import numpy as np

from mcore_rl.config.lora import LoraConfig
from mcore_rl.config.parallel import ParallelConfig, parse_layout
from mcore_rl.config.rollout import RolloutLayout, parse_rollout_layout
from mcore_rl.families.registry import model_of
from mcore_rl.ground.arrays import Int64Array
from mcore_rl.ground.errors import WeightMapError
from mcore_rl.proofs.hf_model import hf_shapes
from mcore_rl.proofs.mutation import (
    FamilyScore,
    OracleCase,
    rollout_layouts,
    score_of,
    training_case,
    training_layouts,
    variants,
)
from mcore_rl.proofs.placement import (
    ABSENT,
    VLLM_HEAD_DIM,
    Megatron,
    ParameterPlacement,
    Stored,
    rollout_word,
    training_word,
)
from mcore_rl.proofs.statements import STATEMENTS
from mcore_rl.proofs.tracer import NumberedCheckpoint, reduced_config
from mcore_rl.weights.adapter_table import PEFT, AdapterTable, adapter_name
from mcore_rl.weights.rollout_adapters import RolloutAdapterTable
from mcore_rl.weights.rollout_table import RolloutTable
from mcore_rl.weights.table import Table

RANK = 2
NOT_STORED = ("checkpoint", "stored_parts")  # no adapter is in a Megatron checkpoint
LORA = LoraConfig(rank=RANK, alpha=float(RANK))  # a scale of 1: numbers stay what they are
_LINEAR = re.compile(r"decoder\.layers\.\d+\..*(?:linear_\w+|in_proj|out_proj)\.weight$")
# (config.json, shapes of PEFT's tensors, layout, ends of the names of vLLM's layers) -> where vLLM puts them, by rank.
VllmAdapters = Callable[
    [Mapping[str, Any], Mapping[str, tuple[int, ...]], RolloutLayout, tuple[str, ...]], Mapping[int, ParameterPlacement]
]


@dataclass(frozen=True)
class _Source:
    """The part of a parameter that is of one Hugging Face layer.  rows, columns: of the layer's, in local order."""

    module: str
    rows: Int64Array
    columns: Int64Array


def adapter_case(case: OracleCase, parallel: ParallelConfig, world_size: int) -> OracleCase:
    """The case of the adapters of all linear layers, from ``case`` of the weights that they are of, in this layout."""
    linear = _linears(case)
    checkpoint = NumberedCheckpoint(
        {name: shape for module in linear for name, shape in _peft(module, _shape_of(f"{module}.weight", case))}
    )
    order = _orders(case)
    right = {rank: dict(_adapters(placed, case, checkpoint, order)) for rank, placed in case.right.items()}
    base = Table(case.family, case.model, parallel, world_size)
    adapters = AdapterTable(base, LORA)
    read = partial(training_word, like=base, checkpoint=checkpoint)
    return replace(case, family=adapters.family, checkpoint=checkpoint, right=right, read=read)


def _shape_of(name: str, case: OracleCase) -> tuple[int, int]:
    """The shape of a linear layer's weight, which may lie in a stack of experts."""
    outputs, inputs = case.checkpoint.shapes.get(name) or case.checkpoint.read(name).shape
    return outputs, inputs


def _peft(module: str, shape: tuple[int, ...]) -> list[tuple[str, tuple[int, int]]]:
    """Names and shapes of A and B of a layer with a weight of ``shape``."""
    outputs, inputs = shape
    return [(adapter_name(module, "A"), (RANK, inputs)), (adapter_name(module, "B"), (outputs, RANK))]


def _name(chunk_and_name: str) -> str:
    return chunk_and_name.partition(" ")[2].partition(" ")[2]


def _linears(case: OracleCase) -> list[str]:
    """The Hugging Face layers of linear weights, in the order of the checkpoint."""
    modules = {
        each.module
        for placed in case.right.values()
        for name, stored in placed.items()
        if _LINEAR.fullmatch(_name(name))
        for each in _sources(stored.numbers, case.checkpoint)
    }
    names = (name.removesuffix(".weight") for name in case.checkpoint)
    stacked = sorted(modules - {name.removesuffix(".weight") for name in case.checkpoint})
    return [*(name for name in names if name in modules), *stacked]


def _sources(numbers: Int64Array, checkpoint: NumberedCheckpoint) -> Iterator[_Source]:
    """The Hugging Face layers whose weights' elements ``numbers`` are, in the order of its rows."""
    modules: dict[str, list[tuple[int, Int64Array]]] = {}
    for row in numbers:
        name, at, columns = _place(row, checkpoint)
        modules.setdefault(name, []).append((at, columns))
    for module, rows in modules.items():
        columns = rows[0][1]
        assert all(np.array_equal(columns, each) for _, each in rows), f"{module}: its rows have other columns"
        yield _Source(module, np.array([at for at, _ in rows]), columns)


def _place(row: Int64Array, checkpoint: NumberedCheckpoint) -> tuple[str, int, Int64Array]:
    """(layer, row, columns) of a row of one weight, which may lie in a stack of experts."""
    for name, shape in checkpoint.shapes.items():
        first = int(row[0]) - checkpoint.start_of(name)
        if 0 <= first < prod(shape):
            if len(shape) == 3:
                return _place_in_stack(row, checkpoint, name)
            assert len(shape) == 2, f"{name} is no weight of a linear layer by itself"
            at, columns = np.divmod(row - checkpoint.start_of(name), shape[1])
            assert len(set(at.tolist())) == 1, f"{name}: a local row has elements of several of its rows"
            return name.removesuffix(".weight"), int(at[0]), columns
    raise WeightMapError("the oracle of the adapters", [f"element {row[0]} is of no tensor"])


def _place_in_stack(row: Int64Array, checkpoint: NumberedCheckpoint, stored: str) -> tuple[str, int, Int64Array]:
    for name in (name for name, part in checkpoint.parts.items() if part.stored == stored):
        for at, numbers in enumerate(checkpoint.read(name)):
            columns = np.searchsorted(numbers, row)
            if columns.max() < len(numbers) and np.array_equal(numbers[columns], row):
                return name.removesuffix(".weight"), at, columns
    raise WeightMapError("the oracle of the adapters", [f"{stored}: element {row[0]} is of no matrix of an expert"])


def _orders(case: OracleCase) -> dict[str, int]:
    """The place of each Hugging Face layer among those that are fused with it, over the ranks that hold its parts."""
    fused: dict[str, list[str]] = {}
    for _, placed in sorted(case.right.items()):
        for name, stored in placed.items():
            if _LINEAR.fullmatch(_name(name)):
                facts = (re.sub(r"layers\.\d+", "", _name(name)), stored.facts["layer"], stored.facts["expert"])
                key = re.sub(r"local_experts\.\d+", "", str(facts))
                names = fused.setdefault(key, [])
                names += [each.module for each in _sources(stored.numbers, case.checkpoint) if each.module not in names]
    return {module: number for names in fused.values() for number, module in enumerate(names)}


def _adapters(
    placed: ParameterPlacement, case: OracleCase, checkpoint: NumberedCheckpoint, order: Mapping[str, int]
) -> Iterator[tuple[str, Stored]]:
    """Where A and B of the linear weights of a rank are.  A fused layer has those of all its parts on every rank."""
    for name, stored in placed.items():
        if not _LINEAR.fullmatch(_name(name)):
            continue
        here = {each.module: each for each in _sources(stored.numbers, case.checkpoint)}
        some = next(iter(here.values()))
        facts = {fact: stored.facts[fact] for fact in ("layer", "expert")} | {"dtype": None, ABSENT: False}
        for module in _fused_with(some.module, order, case):
            rows = here[module].rows if module in here else np.array([], dtype=np.int64)
            a, b = (checkpoint.read(adapter_name(module, which)) for which in "AB")
            local = name.removesuffix(".weight")
            yield f"{local}.lora_A.{order[module]}", Stored(a[:, some.columns], facts)
            yield f"{local}.lora_B.{order[module]}", Stored(b[rows], facts)


def _fused_with(module: str, order: Mapping[str, int], case: OracleCase) -> list[str]:
    """``module`` and the layers that Megatron fuses with it: those that share a parameter with it on some rank."""
    together = [module]
    for placed in case.right.values():
        for name, stored in placed.items():
            if _LINEAR.fullmatch(_name(name)):
                names = [each.module for each in _sources(stored.numbers, case.checkpoint)]
                if set(names) & set(together):
                    together += [each for each in names if each not in together]
    return sorted(together, key=order.__getitem__)


def rollout_adapter_case(config: Mapping[str, Any], target: RolloutLayout, vllm: VllmAdapters) -> OracleCase | None:
    """The case of the adapters that vLLM applies; None: it applies none of this family's."""
    small = reduced_config(config, parse_layout("tp=2,pp=2"), target, VLLM_HEAD_DIM)
    family, model = model_of(small)
    if model.mla is not None or model.linear_attention is not None:
        return None
    base = RolloutTable(family, model, target)
    table = RolloutAdapterTable(base, AdapterTable(Table(family, model), LORA))
    weights = hf_shapes(small, family.model_type)
    modules = sorted({name.rpartition(".lora_")[0].removeprefix(PEFT) for name in _held(table)})
    shapes = {name: shape for module in modules for name, shape in _peft(module, weights[f"{module}.weight"])}
    checkpoint = NumberedCheckpoint(shapes)
    right = vllm(small, shapes, target, table.engine_adapters.modules)
    read = partial(rollout_word, like=base, checkpoint=checkpoint)
    return OracleCase("rollout", str(target), small, table.family, model, checkpoint, right, read)


def _held(table: RolloutAdapterTable) -> set[str]:
    return {piece.hf for tensor in table.tensors(0) for _, piece in table.pieces(tensor)} | {
        part.name.format(l=tensor.layer) for tensor in table.tensors(0) for part in tensor.rule.hf
    }


def adapter_cases(config: Mapping[str, Any], megatron: Megatron | None, vllm: VllmAdapters | None) -> list[OracleCase]:
    """All cases of the adapters of the family of ``config``; without Megatron's or vLLM's where that is None."""
    made = list[OracleCase]()
    for variant in variants(config):
        if megatron is not None:
            for layout in training_layouts(variant):
                case = training_case(variant, layout, megatron)
                made.append(adapter_case(case, parse_layout(layout), len(case.right)))
        if vllm is not None:
            held = (
                rollout_adapter_case(variant, parse_rollout_layout(each), vllm) for each in rollout_layouts(variant)
            )
            made += [each for each in held if each is not None]
    return made


def adapter_score(config: Mapping[str, Any], megatron: Megatron | None, vllm: VllmAdapters | None) -> FamilyScore:
    """Judge every mutant of the adapters' tables of the family of ``config``, a small model of it."""
    family, _ = model_of(config)
    if family.name not in STATEMENTS:  # which the score of the weights names
        return FamilyScore(f"{family.name} adapters", (), ())
    return score_of(f"{family.name} adapters", adapter_cases(config, megatron, vllm), NOT_STORED)
