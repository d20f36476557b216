"""Files of a run's ranks made by hand, of any layout, without an engine: what reading them is held against.

A local tensor is made of the Hugging Face tensors by the table, and cut over its data-parallel ranks at places that
respect no row.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from mcore_rl.checkpoints.hf_sidecar_files import copy_sidecar_files
from mcore_rl.checkpoints.manifest import write_manifest
from mcore_rl.checkpoints.rank_state import (
    MAIN,
    SIDECAR_FILES,
    WEIGHT,
    RankState,
    StateShard,
    pieces_of_range,
    state_file,
)
from mcore_rl.checkpoints.state_writer import StateWriter
from mcore_rl.config.parallel import parse_layout
from mcore_rl.families.registry import FAMILIES
from mcore_rl.weights.table import Table
from mcore_rl.weights.views import view_of
from tests.support import checkpoints
from tests.support.engines import CPU


def write_ranks(
    directory: Path, family: str, whole: Mapping[str, Tensor], layout: str, world_size: int, dtype: str = "float32"
) -> None:
    """Main weights ``whole`` of the tests' model of ``family``."""
    table = Table(FAMILIES[family], checkpoints.MODELS[family], parse_layout(layout), world_size)
    write_shards(directory, table, whole, dtype)


def write_shards(directory: Path, table: Table, whole: Mapping[str, Tensor], dtype: str = "float32") -> None:
    """Main weights ``whole``; what the table gives a dtype of its own is untrained."""
    directory.mkdir(parents=True)
    for rank in range(table.layout.world_size):
        coords, shards, tensors = table.layout.coords(rank), [], {}
        for number, local in enumerate(table.tensors(rank)):
            shape, name = table.shape(local), f"{local.chunk}/{local.name}"
            tensor = torch.zeros(shape)
            for piece in table.pieces(local):
                view_of(tensor, piece.local_region).copy_(view_of(whole[piece.hf], piece.hf_region))
            if local.rule.dtype is not None:
                begin, end, kind = 0, tensor.numel(), WEIGHT
            else:
                kind, copies = MAIN, _copies(table, rank, per_expert=local.rule.per_expert)
                size = tensor.numel()
                begin, end = (min(size, at * size // len(copies) + number % 3 * bool(at % len(copies)))
                              for at in (copies.index(rank), copies.index(rank) + 1))  # fmt: skip
                if begin >= end:
                    continue
            pieces = pieces_of_range(table.pieces(local), shape, begin, end)
            shards.append(StateShard(name, shape, begin, end, pieces, (kind,)))
            tensors[f"{kind}/{name}"] = tensor.view(-1)[begin:end].clone()
        assert coords is not None
        state = RankState(
            role="actor", rank=rank, world_size=table.layout.world_size, layout=str(table.layout),
            head=table.head, dtype=dtype, num_steps=1, num_skipped=0, adam_step=None, shards=tuple(shards),
        )  # fmt: skip
        writer = StateWriter(CPU)
        writer.begin(state_file(directory, rank), tensors, state.metadata(), behind=False)
        written = writer.outcome()
        assert written is not None and written.problem is None


def _copies(table: Table, rank: int, *, per_expert: bool) -> list[int]:
    """The ranks among which the optimizer cuts what ``rank`` holds."""
    here = table.layout.coords(rank)
    copies = []
    for other in range(table.layout.world_size):
        at = table.layout.coords(other)
        same = (
            (at.pp, at.ep, at.etp) == (here.pp, here.ep, here.etp)
            if per_expert
            else (at.pp, at.tp) == (here.pp, here.tp)
        )
        if same:
            copies.append(other)
    return copies


def write_run(directory: Path, family: str, hf: Path, layout: str, world_size: int, dtype: str = "float32") -> None:
    """A checkpoint ``step_N`` of the weights in ``hf``, whole."""
    write_ranks(directory / "actor", family, checkpoints.tensors(hf), layout, world_size, dtype)
    (directory / "actor" / SIDECAR_FILES).mkdir()
    copy_sidecar_files(hf, directory / "actor" / SIDECAR_FILES, getattr(torch, dtype))
    write_manifest(directory, {})
