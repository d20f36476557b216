"""Whole-model weights to and from the shards of a rank, through Megatron's own checkpoint description.

``sharded_state_dict`` says for each local tensor which slice of which global tensor it is.  That makes it a reference
for layouts which is independent of any table of ours.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from torch import Tensor

Weights = dict[str, Tensor]


def shards(models: Sequence[torch.nn.Module]) -> Iterator[ShardedTensor]:
    """Every parameter shard of this rank, but for adapters; their ``data`` are views of the live parameters."""
    metadata = {
        "non_homogeneous_layers": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    for model in models:
        state = model.sharded_state_dict(metadata=metadata)
        apply_factories(state)
        yield from (shard for shard in _tensors(state) if ".lora." not in shard.key)


def _tensors(state: object) -> Iterator[ShardedTensor]:
    if isinstance(state, ShardedTensor):
        yield state
    elif isinstance(state, dict):
        for value in state.values():
            yield from _tensors(value)
    elif isinstance(state, (list, tuple)):
        for value in state:
            yield from _tensors(value)


def _where(shard: ShardedTensor, whole: Tensor) -> tuple[slice | int, ...]:
    """The part of the true (unpadded) global tensor that a shard holds; the padded rest of it is cut off."""
    index: list[slice | int] = list(shard.global_offset[: shard.prepend_axis_num])
    first = shard.prepend_axis_num
    for offset, size, limit in zip(shard.global_offset[first:], shard.local_shape, whole.shape[first:], strict=True):
        index.append(slice(min(offset, limit), min(offset + size, limit)))
    return tuple(index)


def _real(shard: ShardedTensor, whole: Tensor) -> tuple[tuple[slice | int, ...], Tensor]:
    where = _where(shard, whole)
    inside = tuple(slice(0, part.stop - part.start) for part in where if isinstance(part, slice))
    return where, shard.data[inside]


def load_full(models: Sequence[torch.nn.Module], weights: Weights) -> None:
    """Copy this rank's slices of ``weights`` into its parameters; padding rows get a value that would show."""
    for shard in shards(models):
        where, target = _real(shard, weights[shard.key])
        shard.data.fill_(7.0)
        target.copy_(weights[shard.key][where])
    parameters = sum(".lora." not in name for model in models for name, _ in model.named_parameters())
    assert parameters <= sum(1 for _ in shards(models)), "a parameter is missing from Megatron's own description"


def gather_full(models: Sequence[torch.nn.Module], like: Weights) -> Weights:
    """The whole weights on every rank, put together from all ranks; replicas must agree bit for bit."""
    mine = []
    for shard in shards(models):
        where, real = _real(shard, like[shard.key])
        mine.append((shard.key, where, real.detach().to("cpu", copy=True)))
    pickled = [b""] * dist.get_world_size()
    dist.all_gather_object(pickled, pickle.dumps(mine))
    everyone: list[list[tuple[str, tuple[slice | int, ...], Tensor]]] = list(map(pickle.loads, pickled))
    whole = {key: torch.full_like(tensor, float("nan")) for key, tensor in like.items()}
    for rank, parts in enumerate(everyone):
        for key, where, part in parts:
            present = whole[key][where]
            replica = ~present.isnan()
            agree = torch.equal(present[replica], part[replica])
            assert agree, f"rank {rank} holds other values of {key} than its replica"
            whole[key][where] = part
    missing = [key for key, tensor in whole.items() if tensor.isnan().any()]
    assert not missing, f"no rank holds all of {missing}"
    return whole
