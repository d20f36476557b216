"""Holds a training table against the statement at the published sizes, by numbers of rows and columns alone.

The numbers of a matrix's elements are those of its rows plus those of its columns, and slices, joins and transposes
keep that form.  So a statement (``statements.py``) runs on a matrix of any size at the cost of its two edges.  A rule
that is right at reduced size (``placement.py``), and not where a size exceeds a bound, is found here.

vLLM's side has no statement: that every shard has the same shares of its tensors, wide and narrow, is compared, and a
narrow model is loaded by vLLM itself (``prove.py``).

One layer and one expert stand for all: a rule knows neither, and which are on a rank is compared with Megatron's
modules at full size (``verify.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from mcore_rl.config.model import ModelConfig
from mcore_rl.config.rollout import RolloutLayout
from mcore_rl.families.family import Family
from mcore_rl.families.rules import Rule, ShardRanges
from mcore_rl.families.stacks import stacked_parts
from mcore_rl.families.text_part import text_config, text_part_of
from mcore_rl.ground.arrays import Int64Array
from mcore_rl.proofs.hf_model import HfShapes
from mcore_rl.proofs.placement import first_ranks, misplaced
from mcore_rl.proofs.statements import Holder, Statement, stated
from mcore_rl.proofs.tracer import NumberedCheckpoint, index, subject_of, whole_with
from mcore_rl.weights.rollout_table import RolloutTable
from mcore_rl.weights.table import LocalTensor, Table

PADDING = -(2**62)  # of a row of zeros


class NumberGrid:
    """An array of which element ``[..., j]`` is ``rows[...] + columns[j]``.  columns: None, of an array of ``rows``.

    It has those of numpy's functions that statements use; another raises TypeError.
    """

    def __init__(self, rows: Int64Array, columns: Int64Array | None = None) -> None:
        rows = np.asarray(rows, dtype=np.int64)
        if columns is not None and rows.ndim == 0:
            rows = rows + columns
            columns = None
        elif columns is not None and columns[0]:  # one array has one form
            rows = rows + columns[0]
            columns = columns - columns[0]
        self.rows = rows
        self.columns = columns

    @property
    def shape(self) -> tuple[int, ...]:
        """As numpy's."""
        return self.rows.shape if self.columns is None else (*self.rows.shape, len(self.columns))

    def __len__(self) -> int:
        return self.shape[0]

    def same(self, other: NumberGrid) -> bool:
        """Whether shapes and all elements are equal."""
        if self.shape != other.shape or not np.array_equal(self.rows, other.rows):
            return False
        return self.columns is None or (other.columns is not None and np.array_equal(self.columns, other.columns))

    def reshape(self, *shape: int) -> NumberGrid:
        """As numpy's, of a ``shape`` with the same columns."""
        if self.columns is None:
            return NumberGrid(self.rows.reshape(shape))
        if shape[-1] != len(self.columns):
            raise TypeError(f"columns of {self.shape} are cut by {shape}")
        return NumberGrid(self.rows.reshape(shape[:-1]), self.columns)

    def __getitem__(self, key: Any) -> NumberGrid:
        keys = list(key) if isinstance(key, tuple) else [key]
        if Ellipsis in keys:
            place = keys.index(Ellipsis)
            keys[place : place + 1] = [slice(None)] * (len(self.shape) - len(keys) + 1)
        if self.columns is None or len(keys) < len(self.shape):
            return NumberGrid(self.rows[tuple(keys)], self.columns)
        if not isinstance(keys[-1], slice):
            raise TypeError("one column of a matrix")
        return NumberGrid(self.rows[tuple(keys[:-1])], self.columns[keys[-1]])

    @property
    def T(self) -> NumberGrid:
        """As numpy's, of a matrix or a vector."""
        if self.rows.ndim != 1:
            raise TypeError(f"{self.shape} is no matrix")
        return self if self.columns is None else NumberGrid(self.columns, self.rows)

    def swapaxes(self, first: int, second: int) -> NumberGrid:
        """As numpy's, of a matrix."""
        return self.T

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        known: dict[Any, Callable[..., Any]] = {np.split: _split, np.concatenate: joined}
        return known[function](*args, **kwargs) if function in known else NotImplemented


def _split(grid: NumberGrid, sections: Any, axis: int = 0) -> list[NumberGrid]:
    axis %= len(grid.shape)
    if axis < grid.rows.ndim:
        return [NumberGrid(part, grid.columns) for part in np.split(grid.rows, sections, axis=axis)]
    assert grid.columns is not None
    return [NumberGrid(grid.rows, part) for part in np.split(grid.columns, sections)]


def joined(grids: Sequence[NumberGrid | Int64Array], axis: int = 0) -> NumberGrid:
    """As ``np.concatenate``.  An array of numpy's is padding."""
    first = next(grid for grid in grids if isinstance(grid, NumberGrid))
    each = [grid if isinstance(grid, NumberGrid) else _padding(grid.shape, first.columns) for grid in grids]
    axis %= len(first.shape)
    if axis < first.rows.ndim:
        held = [grid.columns for grid in each if len(grid)]
        if any(
            columns is not first.columns and not np.array_equal(columns, first.columns)  # type: ignore[arg-type]
            for columns in held
        ):
            raise TypeError("rows of matrices with other columns")
        return NumberGrid(np.concatenate([grid.rows for grid in each], axis=axis), first.columns)
    if any(not np.array_equal(grid.rows, first.rows) for grid in each):
        raise TypeError("columns of matrices with other rows")
    return NumberGrid(first.rows, np.concatenate([grid.columns for grid in each if grid.columns is not None]))


def _padding(shape: tuple[int, ...], columns: Int64Array | None) -> NumberGrid:
    return NumberGrid(np.full(shape if columns is None else shape[:-1], PADDING, dtype=np.int64), columns)


class NumberedFiles(Mapping[str, NumberGrid]):
    """The tensors of ``shapes``, whose elements are distinct integers, one after another."""

    def __init__(self, shapes: HfShapes) -> None:
        self.checkpoint = NumberedCheckpoint(shapes)
        self._read = lru_cache(maxsize=256)(self._read_one)

    def __getitem__(self, name: str) -> NumberGrid:
        return self._read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.checkpoint.shapes)

    def __len__(self) -> int:
        return len(self.checkpoint.shapes)

    def _read_one(self, name: str) -> NumberGrid:
        shape = self.checkpoint.shapes[name]
        start = self.checkpoint.start_of(name)
        if len(shape) == 1:
            return NumberGrid(start + np.arange(shape[0]))
        rows = start + np.arange(prod(shape[:-1])).reshape(shape[:-1]) * shape[-1]
        return NumberGrid(rows, np.arange(shape[-1]))


def full_size_failures(
    table: Table, statement: Statement, config: Mapping[str, Any], shapes: HfShapes
) -> tuple[int, list[str]]:
    """(numbers of shards that were compared, a message for each that ``table`` cuts otherwise than ``statement``).

    config: the content of config.json.  shapes: of the tensors of transformers' model.
    """
    files = NumberedFiles(shapes)
    parts = stacked_parts(table.family.stacks, table.model)
    text = text_config(config)
    kv_heads = text.get("num_key_value_heads") or text["num_attention_heads"]
    failures = []
    shards = _shards(table)
    for rank, local in shards:
        at = table.layout.coords(rank)
        holder = Holder(
            at.tp,
            table.parallel.tp,
            at.etp,
            table.parallel.etp,
            kv_heads,
            "lm_head.weight" not in files,
            linear_key_heads=config.get("linear_num_key_heads", 0),
        )
        name = f"rank {rank}: {local.name}"
        try:
            right: Any = stated(statement, files, local.name, local.layer, local.expert, holder)  # type: ignore[arg-type]
            said = _said(table, local, files, parts)
        except Exception as error:  # noqa: BLE001  a wrong rule may raise anything
            failures.append(f"{name}: it cannot be compared: {type(error).__name__}: {error}")
            continue
        if said.shape != right.shape:
            failures.append(f"{name}: its rule makes shape {said.shape}, and its statement {right.shape}")
        elif not said.same(right):
            failures.append(f"{name}: {_difference(said, right, files.checkpoint)}")
    return len(shards), failures


def _shards(table: Table) -> list[tuple[int, LocalTensor]]:
    """(rank, tensor): the first and the last tensor of each shard of each rule."""
    shards: dict[tuple[int, int, int], list[tuple[int, LocalTensor]]] = {}
    for rank in first_ranks(table.layout):
        for local in table.tensors(rank):
            key = (id(local.rule), local.num_shards, local.index)
            shards[key] = [*shards.get(key, [])[:1], (rank, local)]
    return [each for both in shards.values() for each in both]


def _said(table: Table, local: LocalTensor, files: NumberedFiles, parts: Mapping[str, Any]) -> NumberGrid:
    def read(name: str) -> NumberGrid:
        part = parts.get(name)
        if part is None or name in files.checkpoint.shapes:
            return files[name]
        within: NumberGrid = part.within(files[part.stored][part.expert])
        return within

    shape = table.shape(local)
    dim = local.rule.dim
    held: list[NumberGrid | Int64Array] = [read(piece.hf)[index(piece.hf_region)] for piece in table.pieces(local)]
    missing = shape[dim] - sum(grid.shape[dim] for grid in held)
    if missing and held:
        held.append(np.zeros((*shape[:dim], missing, *shape[dim + 1 :]), dtype=np.int64))
    if not held:
        return _padding(shape, np.arange(shape[-1]) if len(shape) > 1 else None)
    return joined(held, axis=dim)


def _difference(said: NumberGrid, right: NumberGrid, checkpoint: NumberedCheckpoint) -> str:
    ours, theirs = (np.maximum(grid.rows, 0) for grid in (said, right))  # 0 is padding
    return misplaced(ours, theirs, checkpoint, "rows") or "its rule has other columns than its statement"


# ---- vLLM's side ----

WIDTHS = ("moe_intermediate_size", "shared_expert_intermediate_size", "intermediate_size")
NARROW_HEAD = 4


def narrow_config(config: Mapping[str, Any], tp: int) -> dict[str, Any]:
    """``config`` with all its heads, layers and experts, whose MLPs and heads are narrow.

    Latent and linear attention keep their widths: the parts of their fused projections do not shrink alike.
    """
    part = text_part_of(config)
    if part is not None:
        return whole_with(config, part, narrow_config(text_config(config), tp))
    narrow = dict(config) | {name: 2 * tp for name in WIDTHS if config.get(name)}
    if "kv_lora_rank" in config or "linear_num_key_heads" in config:
        return narrow
    if config.get("head_dim") is not None:
        narrow["head_dim"] = NARROW_HEAD
        if "rotary_dim" in config:
            narrow["rotary_dim"] = NARROW_HEAD // 2
    else:
        narrow["hidden_size"] = NARROW_HEAD * config["num_attention_heads"]
    return narrow


def width_failures(family: Family, config: Mapping[str, Any], layout: RolloutLayout) -> tuple[int, list[str]]:
    """(numbers of shards that were compared, a message for each that vLLM's table cuts at other shares when narrow).

    Every range begins and ends at the same share of its Hugging Face tensor, whatever the widths; rows of the
    vocabulary are dealt out evenly, with the padding behind the last.
    """
    (_, model), (_, thin) = subject_of(config), subject_of(narrow_config(config, layout.tp))
    rollout = RolloutTable(family, model, layout)
    count = 0
    failures = []
    for rule in rollout.rules:
        num_shards = rollout.num_shards(rule)
        for number in range(num_shards):
            count += 1
            whole = rule.shard(model, num_shards, number)
            narrow = rule.shard(thin, num_shards, number)
            if rule.hf[0].dims[rule.dim] == "vocab":
                rows = model.vocab_size
                begin = min(rows, number * whole.size)
                right = [(0, begin, min(rows, begin + whole.size))] if begin < rows else []
                if [(each.source, each.begin, each.end) for each in whole.ranges] != right:
                    failures.append(f"{rule.name}: shard {number} of {num_shards} has the rows of another")
            elif _shares(rule, model, whole) != _shares(rule, thin, narrow):
                where = f"shard {number} of {num_shards}"
                failures.append(f"{rule.name}: {where} has other shares of its tensors than in a narrow model")
    return count, failures


def _shares(rule: Rule, model: ModelConfig, shard: ShardRanges) -> list[tuple[int, Fraction, Fraction]]:
    sizes = [shape[rule.dim] for shape in rule.hf_shapes(model)]
    return [
        (each.source, Fraction(each.begin, sizes[each.source]), Fraction(each.end, sizes[each.source]))
        for each in shard.ranges
    ]
