"""Whole adapters to and from the shards of a rank, under PEFT's names."""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Iterable

import torch
import torch.distributed as dist

from mcore_rl.checkpoints.rank_state import pieces_of_range
from mcore_rl.config.lora import LoraConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.parallel import ParallelConfig
from mcore_rl.config.role import Head
from mcore_rl.families.registry import FAMILIES
from mcore_rl.training.engine import Engine
from mcore_rl.training.run_state import _ranges
from mcore_rl.weights.adapter_table import PEFT as PEFT
from mcore_rl.weights.adapter_table import AdapterTable
from mcore_rl.weights.binding import bind
from mcore_rl.weights.table import Piece, Table
from mcore_rl.weights.tensor_slice import offset_of, row_major_strides
from mcore_rl.weights.views import view_of
from tests.support import hf_reference
from tests.support.full_weights import Weights

LORA = LoraConfig(rank=3, alpha=6.0)
SCORE = "score.weight"


def adapter_table(
    model: ModelConfig,
    lora: LoraConfig = LORA,
    parallel: ParallelConfig | None = None,
    world_size: int = 1,
    head: Head = Head.lm,
) -> AdapterTable:
    """The table of ``model``'s adapters, of the family that transformers has for it."""
    family = FAMILIES[hf_reference.build(model).config.model_type]
    return AdapterTable(Table(family, model, parallel, world_size, head=head), lora)


def drawn(table: AdapterTable) -> Weights:
    """Seeded adapters of which neither A nor B is 0, by their names in PEFT's files."""
    weights = {}
    for name, info in table.hf_tensors.items():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        size = 0.1 if name == SCORE else info.shape[1] ** -0.5 if "lora_A" in name else 0.1
        weights[name] = size * torch.randn(info.shape, generator=generator)
    return weights


@torch.no_grad()
def load(models: Iterable[torch.nn.Module], table: AdapterTable, rank: int, weights: Weights) -> None:
    """Copy this rank's parts of ``weights`` into its adapters."""
    for each in bind(list(models), table, rank):
        for piece in table.pieces(each.local):
            view_of(each.tensor, piece.local_region).copy_(view_of(weights[piece.hf], piece.hf_region))


def _gathered(mine: list[tuple[Piece, torch.Tensor]], table: AdapterTable) -> Weights:
    """The whole tensors on every rank; replicas must agree bit for bit."""
    pickled = [b""] * dist.get_world_size()
    dist.all_gather_object(pickled, pickle.dumps(mine))
    whole = {name: torch.full(info.shape, float("nan")) for name, info in table.hf_tensors.items()}
    for rank, parts in enumerate(map(pickle.loads, pickled)):
        for piece, part in parts:
            place = view_of(whole[piece.hf], piece.hf_region)
            present = ~place.isnan()
            assert torch.equal(place[present], part[present]), f"rank {rank} has other values of {piece.hf}"
            place.copy_(part)
    missing = [name for name, tensor in whole.items() if tensor.isnan().any()]
    assert not missing, f"no rank holds all of {missing}"
    return whole


def gather(engine: Engine, table: AdapterTable) -> Weights:
    """The live adapters."""
    mine = [
        (piece, view_of(each.tensor.detach(), piece.local_region).clone())
        for each in bind(engine.models, table, engine.groups.rank)
        for piece in table.pieces(each.local)
    ]
    return _gathered(mine, table)


def gather_gradients(engine: Engine, table: AdapterTable) -> Weights:
    """The gradients of the last step, as the optimizer read them: clipped, each rank its own ranges."""
    mine = []
    for held in _ranges(engine, bind(engine.models, table, engine.groups.rank)):
        local, shape = held.bound.local, table.shape(held.bound.local)
        strides = row_major_strides(shape)
        for piece in pieces_of_range(table.pieces(local), shape, held.begin, held.end):
            assert held.main.grad is not None, f"{local.name} has no gradient"
            place = held.main.grad.storage_offset() + offset_of(piece.local_start, strides) - held.begin
            mine.append((piece, held.main.grad.as_strided(piece.shape, strides, place).clone()))
    return _gathered(mine, table)
