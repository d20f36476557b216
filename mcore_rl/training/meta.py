"""The real Megatron modules of any rank of any layout, on the meta device: shapes at full model size, without memory.

One process plays one rank after the other: torch's fake process group reports the world's size and the rank, and its
collectives do nothing.  ``build_chunks`` builds the modules, as for the engine, so what ``proofs/verify.py`` proves of
their names and shapes holds for training.

Megatron keeps its groups in globals, and on a machine without an accelerator it is patched to run on the CPU, so use
this only in processes that do not train: tools and tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch.testing._internal.distributed.fake_pg import FakeStore

from mcore_rl.config.engine import Device, EngineConfig, LayerSpec
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.model_violations import model_violations
from mcore_rl.config.parallel import ParallelConfig
from mcore_rl.config.role import Head
from mcore_rl.ground.errors import refuse_if_any
from mcore_rl.parallel.device import detect
from mcore_rl.parallel.groups import destroy_groups, init_groups
from mcore_rl.parallel.layout import Layout, layout_violations
from mcore_rl.proofs.placement import MegatronRank, MegatronTensor
from mcore_rl.training.model import build_chunks, transformer_config
from mcore_rl.training.vision import block_numbers

Shapes = dict[str, tuple[int, ...]]  # by the keys of a chunk's state dict

META = torch.device("meta")


@contextmanager
def meta_chunks(
    model: ModelConfig,
    parallel: ParallelConfig,
    world_size: int,
    rank: int,
    *,
    head: Head = Head.lm,
    device: torch.device = META,
) -> Iterator[list[GPTModel]]:
    """The model chunks of ``rank``, with local layers and parameters on the meta device, or on ``device``, not set.

    Within the context Megatron's groups are those of ``rank``.  Raises ConfigError if the layout does not fit.
    """
    refuse_if_any([*model_violations(model), *layout_violations(model, parallel, world_size)])
    assert not dist.is_initialized(), "this process is a rank of a world already"
    layout = Layout.of(parallel, world_size)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        groups = init_groups(layout, detect(Device.cpu), device, seed=0)
        config = transformer_config(model, parallel, EngineConfig(), LayerSpec.local)
        config.use_cpu_initialization = True
        config.perform_initialization = False
        with device:
            yield build_chunks(model, config, parallel, LayerSpec.local, groups, head=head)
    finally:
        destroy_groups()
        dist.destroy_process_group()


def meta_shapes(
    model: ModelConfig, parallel: ParallelConfig, world_size: int, rank: int, *, head: Head = Head.lm
) -> list[Shapes]:
    """Parameters and persistent buffers of ``rank``, chunk by chunk.  Takes 20 to 40 ms.

    Raises ConfigError if the layout does not fit.
    """
    with meta_chunks(model, parallel, world_size, rank, head=head) as chunks:
        return [
            {key: tuple(value.shape) for key, value in chunk.state_dict(keep_vars=True).items() if value is not None}
            for chunk in chunks
        ]


def meta_rank(
    model: ModelConfig, parallel: ParallelConfig, world_size: int, rank: int, *, head: Head = Head.lm
) -> MegatronRank:
    """What Megatron's modules of ``rank`` say of themselves, for a proof of the table.  Takes 50 to 100 ms.

    Layers and experts are those that ``sharded_state_dict`` names, which Megatron's checkpoints are written and read
    by.  Raises ConfigError if the layout does not fit.
    """
    with meta_chunks(model, parallel, world_size, rank, head=head) as chunks:
        return MegatronRank(
            chunks=[_tensors(chunk) for chunk in chunks],
            tp=mpu.get_tensor_model_parallel_rank(),
            num_tp=mpu.get_tensor_model_parallel_world_size(),
            etp=mpu.get_expert_tensor_parallel_rank(),
            num_etp=mpu.get_expert_tensor_parallel_world_size(),
        )


def _tensors(chunk: GPTModel) -> dict[str, MegatronTensor]:
    layers = {
        name: module.layer_number - 1 for name, module in chunk.named_modules() if isinstance(module, TransformerLayer)
    }
    if hasattr(chunk, "vision"):
        layers |= {f"vision.{name}": number for name, number in block_numbers(chunk.vision).items()}
    experts = {
        f"{name}.experts.local_experts.{local}": expert
        for name, module in chunk.named_modules()
        if isinstance(module, MoELayer)
        for local, expert in enumerate(module.local_expert_indices)
    }
    stored = chunk.sharded_state_dict(metadata={"non_homogeneous_layers": True})
    tensors = {}
    for key, value in chunk.state_dict(keep_vars=True).items():
        if value is None:
            continue
        fixed = None if value.dtype == chunk.config.params_dtype else str(value.dtype).removeprefix("torch.")
        tensors[key] = MegatronTensor(
            shape=tuple(value.shape),
            dtype=fixed,
            layer=_owner(key, layers),
            expert=_owner(key, experts),
            stored=_stored(stored[key]),
        )
    return tensors


def _stored(described: ShardedTensor | ShardedTensorFactory) -> tuple[tuple[str, int], ...]:
    """(key, rows here) of each tensor that Megatron saves for a parameter; gate and up are both rows of one."""
    rows: dict[str, int] = {}
    for shard in [described] if isinstance(described, ShardedTensor) else described.build():
        rows[shard.key] = rows.get(shard.key, 0) + shard.local_shape[0]
    return tuple(rows.items())


def _owner(key: str, numbers: dict[str, int]) -> int | None:
    """The number of the module in ``numbers`` that ``key`` is inside of; None: of none."""
    ends = (place for place, letter in enumerate(key) if letter == ".")
    return next((numbers[key[:end]] for end in ends if key[:end] in numbers), None)
