"""Engines for the tests of single modules: one world, any layout over it, tiny models with seeded weights."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from mcore_rl.config.engine import Device, EngineConfig, LayerSpec, OptimizerConfig, Precision
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.parallel import parse_layout
from mcore_rl.config.role import Head
from mcore_rl.ground.types import TrainBatch
from mcore_rl.parallel.device import Platform, detect, device_of
from mcore_rl.parallel.groups import ProcessGroups, destroy_groups, init_groups
from mcore_rl.parallel.launch import Rank
from mcore_rl.parallel.layout import Layout
from mcore_rl.training.engine import Engine
from mcore_rl.weights.adapter_table import AdapterTable

CPU = detect(Device.cpu)


@contextmanager
def world(rank: Rank) -> Iterator[None]:
    """The default process group of the ranks that ``run_ranks`` started; layouts follow one another inside."""
    torch.set_num_threads(1)
    rank.init_process_group(CPU, timeout_s=120.0)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def groups_of(layout: str = "") -> Iterator[ProcessGroups]:
    """Megatron's groups for a layout, as a user writes it, over the world."""
    shape = Layout.of(parse_layout(layout), dist.get_world_size())
    groups = init_groups(shape, CPU, device_of(CPU, dist.get_rank()), seed=1)
    try:
        yield groups
    finally:
        destroy_groups()


def config(**changes: object) -> EngineConfig:
    """Float32 on the CPU, packed into 64 tokens, a rate that shows in the weights at once."""
    settings = dict(
        device=Device.cpu,
        precision=Precision.float32,
        layer_spec=LayerSpec.local,
        microbatch_tokens=64,
        optim=OptimizerConfig(lr=1e-2, eps=1e-5, weight_decay=0.1, clip_grad=0.5),
    )
    return EngineConfig(**(settings | changes))  # type: ignore[arg-type]


def seed_weights(models: Sequence[torch.nn.Module]) -> None:
    """Weights that depend on a parameter's name alone, large enough that a mistake shows; the same on all replicas."""
    for chunk in models:
        for name, parameter in chunk.named_parameters():
            if ".lora." in name:
                continue  # adapters keep the values that they start with
            random = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            noise = 0.1 * torch.randn(parameter.shape, generator=random)
            parameter.copy_(noise + 1 if parameter.dim() == 1 and not name.endswith("bias") else noise)


def build(
    groups: ProcessGroups,
    model: ModelConfig,
    settings: EngineConfig | None = None,
    *,
    layout: str = "",
    role: str = "actor",
    head: Head = Head.lm,
    trainable: bool = True,
    load: Callable[[Sequence[torch.nn.Module]], None] = seed_weights,
    platform: Platform = CPU,
    adapters: AdapterTable | None = None,
) -> Engine:
    """An engine over ``groups``, which were made for ``layout``."""
    engine = Engine(
        role, model, parse_layout(layout), settings or config(), groups, platform, head=head, trainable=trainable,
        adapters=adapters,
    )  # fmt: skip
    engine.load_weights(load)
    return engine


def share_of(batch: TrainBatch, groups: ProcessGroups) -> TrainBatch:
    """The sequences of this rank's data-parallel coordinate."""
    return batch.select(range(groups.coords.dp, len(batch.lengths_S), groups.layout.dp))


def weights_of(engine: Engine) -> dict[str, torch.Tensor]:
    """A copy of this rank's weights, by name; with several model chunks, by chunk and name."""
    return {
        f"{stage}.{name}": parameter.detach().clone()
        for stage, chunk in enumerate(engine.models)
        for name, parameter in chunk.named_parameters()
    }


def state_of(engine: Engine) -> list[torch.Tensor]:
    """A copy of this rank's main weights and Adam moments."""
    assert engine.optimizer is not None
    return [tensor.detach().clone() for tensor in engine.optimizer.state_tensors()]


def same_bits(ours: object, theirs: object) -> bool:
    """Whether two nests of dicts, sequences and tensors agree bit for bit (where NaN equals NaN)."""
    if isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor):
        both = (ours.contiguous().flatten(), theirs.contiguous().flatten())
        return (
            ours.shape == theirs.shape
            and ours.dtype == theirs.dtype
            and torch.equal(*(x.view(torch.uint8) for x in both))
        )
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(same_bits(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, (list, tuple)) and isinstance(theirs, (list, tuple)):
        return len(ours) == len(theirs) and all(map(same_bits, ours, theirs))
    return ours == theirs
