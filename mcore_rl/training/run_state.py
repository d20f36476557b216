"""Saves and loads an engine's state for bitwise resume: weights, main weights, moments, counters, random state.

Every rank writes its own part (``checkpoints/rank_state.py``) and reads what its layout needs from the files of all
ranks.  In the layout that wrote them, everything is restored bit for bit, random state included.  In another layout,
every weight and moment is restored bit for bit, and the random state follows from the seed and the step.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore_rl.checkpoints.rank_state import (
    MAIN,
    MOMENTS,
    RANDOM,
    SNAPSHOT,
    WEIGHT,
    RankState,
    StateShard,
    StoredState,
    pieces_of_range,
    state_file,
)
from mcore_rl.checkpoints.safetensors import read_whole
from mcore_rl.checkpoints.state_writer import StateWriter
from mcore_rl.ground.errors import CheckpointError
from mcore_rl.parallel.groups import random_state, restore_random_state, seed_random_state
from mcore_rl.training.engine import Engine
from mcore_rl.training.offload import OffloadPart
from mcore_rl.weights.binding import Bound, bind
from mcore_rl.weights.table import Piece, Table
from mcore_rl.weights.tensor_slice import offset_of, row_major_strides

HOST = "host"  # the random state outside of Megatron's tracker
Wanted = tuple[str, Piece]  # (kind, part of a Hugging Face tensor)


@dataclass(frozen=True)
class _Range:
    """Elements ``begin`` to ``end``, row-major, of a trained tensor: the part that this rank's optimizer holds.

    main: its main weights.  state: of the inner optimizer, all its tensors.
    """

    bound: Bound
    begin: int
    end: int
    main: Tensor
    state: dict[Tensor, dict[str, Any]]


@torch.no_grad()
def begin_save(
    engine: Engine,
    table: Table,
    directory: Path,
    writer: StateWriter,
    *,
    behind: bool,
    beside: Callable[[], None] = lambda: None,
) -> None:
    """Let ``writer`` write this rank's file into ``directory``; ``writer.outcome()`` then tells how it went.

    table: of the engine's model and layout.  behind, beside: see ``StateWriter.begin``.  Offloaded weights and
    optimizer state are read from host memory.
    """
    state, tensors = _state_of(engine, table)
    contents = dict[str, Tensor]()
    unchanging = set[str]()
    for name, host in zip(tensors, engine.memory.away(tensors.values()), strict=True):
        contents[name] = tensors[name] if host is None else host.tensor
        if host is not None and host.unchanging:
            unchanging.add(name)
    path = state_file(directory, state.rank)
    metadata = state.metadata()
    writer.begin(path, contents, metadata, behind=behind, unchanging=unchanging, beside=beside)


def num_state_bytes(engine: Engine, table: Table) -> int:
    """Bytes that a save of this rank takes on the disk, without the header."""
    return sum(tensor.nbytes for tensor in _state_of(engine, table)[1].values())


@torch.no_grad()
def load_run_state(engine: Engine, table: Table, directory: Path) -> bool:
    """Load the engine's state from the files of all ranks in ``directory``.

    Returns whether the same layout wrote them, so that the run goes on bit for bit.  Raises CheckpointError, before
    anything is changed: a file that is missing or damaged, another role, parts that this model needs and no file holds.
    """
    engine.memory.require(OffloadPart.weights, OffloadPart.optimizer)
    rank = engine.groups.rank
    layout = engine.groups.layout
    with StoredState.open(directory, prefer=rank) as stored:
        first = stored.ranks[0]
        if (first.role, first.head) != (engine.role, engine.head):
            raise CheckpointError(str(directory), [f"holds the {first.role}; give the directory of the {engine.role}"])
        bound = bind(engine.models, table, rank)
        ranges = _ranges(engine, bound)
        wanted = [*_wanted_weights(bound, table, stored), *_wanted_main(ranges, table, stored.adam_step)]
        for name in engine.snapshots.moving():
            wanted += [(SNAPSHOT + name, piece) for each in bound for piece in table.pieces(each.local)]
        problems = list(stored.mismatches({name: info.shape for name, info in table.hf_tensors.items()}))
        problems += [problem for kind, piece in wanted if (problem := stored.missing(kind, piece.hf, piece.hf_region))]
        if problems:
            raise CheckpointError(str(directory), problems)
        for each in bound:
            _fill(stored, _weight_kind(stored, each), table, each, 0, each.tensor.detach().view(-1))
        for name in engine.snapshots.moving():
            kept = engine.snapshots.tensors(name)
            for each in bound:
                _fill(stored, SNAPSHOT + name, table, each, 0, kept[id(each.tensor)].view(-1))
            engine.snapshots.loaded(name)
        _start_adam(engine, stored.adam_step)
        for held in ranges:
            for kind, row in _rows(held, stored.adam_step):
                _fill(stored, kind, table, held.bound, held.begin, row)
        engine.num_skipped = first.num_skipped
        if engine.optimizer is not None:
            engine.optimizer.num_steps = first.num_steps
        same = (first.layout, first.world_size) == (str(layout), layout.world_size)
        if same:
            restore_random_state(_stored_random_state(stored))
        else:
            seed_random_state(zlib.crc32(f"{engine.config.seed}/{first.num_steps}".encode()))
    return same


def _state_of(engine: Engine, table: Table) -> tuple[RankState, dict[str, Tensor]]:
    """(the description of this rank's state, its tensors by their names in the file)."""
    assert engine.snapshots.swapped_in is None, "the weights in place are those of a snapshot"
    groups = engine.groups
    optimizer = engine.optimizer
    adam_step = _adam_step(engine)
    bound = bind(engine.models, table, groups.rank)
    shards = list[StateShard]()
    tensors = dict[str, Tensor]()

    def keep(each: Bound, begin: int, rows: dict[str, Tensor]) -> None:
        shape = table.shape(each.local)
        end = begin + next(iter(rows.values())).numel()
        pieces = pieces_of_range(table.pieces(each.local), shape, begin, end)
        name = f"{each.local.chunk}/{each.local.name}"
        shards.append(StateShard(name, shape, begin, end, pieces, tuple(rows)))
        tensors.update({f"{kind}/{name}": row for kind, row in rows.items()})

    frozen = {SNAPSHOT + name: engine.snapshots.tensors(name) for name in engine.snapshots.moving()}
    for held in _ranges(engine, bound):
        of_frozen = {kind: kept[id(held.bound.tensor)].view(-1)[held.begin : held.end] for kind, kept in frozen.items()}
        keep(held.bound, held.begin, dict(_rows(held, adam_step)) | of_frozen)
    for each in bound:
        if not _is_trained(engine, each.tensor):
            of_frozen = {kind: kept[id(each.tensor)].view(-1) for kind, kept in frozen.items()}
            keep(each, 0, {WEIGHT: each.tensor.detach().view(-1)} | of_frozen)
    random = random_state()
    tensors |= {f"{RANDOM}/{HOST}": random["host"]}
    tensors |= {f"{RANDOM}/{name}": state for name, state in random["tracker"].items()}
    state = RankState(
        role=engine.role,
        rank=groups.rank,
        world_size=groups.layout.world_size,
        layout=str(groups.layout),
        head=engine.head,
        dtype=str(engine.dtype).removeprefix("torch."),
        num_steps=0 if optimizer is None else optimizer.num_steps,
        num_skipped=engine.num_skipped,
        adam_step=adam_step,
        shards=tuple(shards),
    )
    return state, tensors


def _stored_random_state(stored: StoredState) -> dict[str, Any]:
    states = {
        name.removeprefix(f"{RANDOM}/"): read_whole(info)
        for name, info in stored.tensors[0].items()
        if name.startswith(f"{RANDOM}/")
    }
    return {"host": states.pop(HOST), "tracker": states}


def _is_trained(engine: Engine, tensor: Tensor) -> bool:
    return engine.optimizer is not None and tensor.requires_grad


def _ranges(engine: Engine, bound: Sequence[Bound]) -> list[_Range]:
    """The ranges of trained tensors that this rank's optimizer holds; other data ranks hold the rest."""
    if engine.optimizer is None:
        return []
    bound_of = {id(each.tensor): each for each in bound}
    ranges = list[_Range]()
    for part in engine.optimizer.megatron.chained_optimizers:
        if part.is_stub_optimizer:  # this rank has no tensors of its kind
            continue
        for parameter, (group, index) in part.model_param_group_index_map.items():
            place = part._get_model_param_range_map(parameter)["param"]
            main = part.optimizer.param_groups[group]["params"][index]
            assert main.is_contiguous() and main.numel() == place.end - place.start
            ranges.append(_Range(bound_of[id(parameter)], place.start, place.end, main, part.optimizer.state))
    return ranges


def _rows(held: _Range, adam_step: int | None) -> Iterator[tuple[str, Tensor]]:
    """(kind, elements) of the main weights of ``held`` and, after Adam's first step, its moments."""
    yield MAIN, held.main.detach()
    if adam_step is not None:
        yield from ((moment, held.state[held.main][moment]) for moment in MOMENTS)


def _weight_kind(stored: StoredState, bound: Bound) -> str:
    """The stored kind to read live weights from: main weights, which are cast, or weights that are not trained."""
    return MAIN if stored.holds(MAIN, bound.local.hf_names[0]) else WEIGHT


def _wanted_weights(bound: Sequence[Bound], table: Table, stored: StoredState) -> Iterator[Wanted]:
    for each in bound:
        yield from ((_weight_kind(stored, each), piece) for piece in table.pieces(each.local))


def _wanted_main(ranges: Sequence[_Range], table: Table, adam_step: int | None) -> Iterator[Wanted]:
    kinds = (MAIN,) if adam_step is None else (MAIN, *MOMENTS)
    for each in ranges:
        local = each.bound.local
        for piece in pieces_of_range(table.pieces(local), table.shape(local), each.begin, each.end):
            yield from ((kind, piece) for kind in kinds)


def _fill(stored: StoredState, kind: str, table: Table, bound: Bound, begin: int, row: Tensor) -> None:
    """Read ``row``, the elements of a local tensor from ``begin`` on, from ``stored``; padding becomes zero."""
    shape = table.shape(bound.local)
    strides = row_major_strides(shape)
    pieces = pieces_of_range(table.pieces(bound.local), shape, begin, begin + row.numel())
    if sum(piece.hf_region.num_elements for piece in pieces) < row.numel():
        row.zero_()
    for piece in pieces:
        place = row.storage_offset() + offset_of(piece.local_start, strides) - begin
        stored.read_into(kind, piece.hf, piece.hf_region, row.as_strided(piece.shape, strides, place))


def _adam_step(engine: Engine) -> int | None:
    """Adam's step count, the same for all tensors that this rank trains; None before the first step."""
    if engine.optimizer is None:
        return None
    steps = set()
    for part in engine.optimizer.megatron.chained_optimizers:
        if not part.is_stub_optimizer:
            for group in part.optimizer.param_groups:  # torch counts for each tensor, the fused ones for a group
                steps |= {int(part.optimizer.state[main].get("step", group.get("step", 0))) for main in group["params"]}
    assert len(steps) <= 1, f"the optimizer counts differently for different weights: {steps}"
    return max(steps, default=0) or None


def _start_adam(engine: Engine, step: int | None) -> None:
    """Create the moments, for ``_fill``, and set Adam's count; remove both if ``step`` is None."""
    if engine.optimizer is None:
        return
    for part in engine.optimizer.megatron.chained_optimizers:
        inner = part.optimizer
        for group in inner.param_groups if not part.is_stub_optimizer else ():
            counts_by_tensor = isinstance(inner, torch.optim.AdamW)
            if not counts_by_tensor:
                group["step"] = step or 0
            for main in group["params"]:
                if step is None:
                    inner.state.pop(main, None)
                    continue
                state = inner.state[main]
                for moment in MOMENTS:
                    state.setdefault(moment, torch.zeros_like(main))
                if counts_by_tensor:  # a fused one counts beside the moments
                    state["step"] = torch.tensor(float(step), device=main.device if group["fused"] else None)
