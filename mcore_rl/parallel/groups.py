"""Megatron's process groups for a layout, and a record of those that we use ourselves.

``init_groups`` passes the layout to ``megatron.core.parallel_state``, which keeps the groups for all Megatron modules
of this process; we keep the same objects in ``ProcessGroups`` and never ask the global state again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from torch import Tensor

from mcore_rl.parallel.cpu import make_megatron_run_on_cpu
from mcore_rl.parallel.device import Platform
from mcore_rl.parallel.layout import Coords, Layout


@dataclass(frozen=True)
class ProcessGroups:
    """Process groups of this rank.

    dp_cp: the ranks that hold the same dense weights.  experts: the ranks that share one set of experts, by ep and etp.
    etp: the ranks that hold shards of the same experts.
    moe_tokens: the tensor and context peers that split the tokens of one sequence at the router.
    """

    layout: Layout
    rank: int
    coords: Coords
    device: torch.device
    tp: dist.ProcessGroup
    pp: dist.ProcessGroup
    cp: dist.ProcessGroup
    dp: dist.ProcessGroup
    dp_cp: dist.ProcessGroup
    experts: dist.ProcessGroup
    etp: dist.ProcessGroup
    moe_tokens: dist.ProcessGroup

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank holds the last pipeline stage, which computes log-probs, values and losses."""
        return self.coords.pp == self.layout.pp - 1


def init_groups(layout: Layout, platform: Platform, device: torch.device, seed: int) -> ProcessGroups:
    """Create Megatron's groups over the default process group, and seed its random-state tracker.

    Collective over the world.  To call it again with another layout, call ``destroy_groups`` first.
    """
    if not platform.is_accelerator:
        make_megatron_run_on_cpu()
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        create_gloo_process_groups=False,
    )
    seed_random_state(seed)
    rank = dist.get_rank()
    return ProcessGroups(
        layout=layout,
        rank=rank,
        coords=layout.coords(rank),
        device=device,
        tp=mpu.get_tensor_model_parallel_group(),
        pp=mpu.get_pipeline_model_parallel_group(),
        cp=mpu.get_context_parallel_group(),
        dp=mpu.get_data_parallel_group(),
        dp_cp=mpu.get_data_parallel_group(with_context_parallel=True),
        experts=mpu.get_expert_tensor_and_model_parallel_group(),
        etp=mpu.get_expert_tensor_parallel_group(),
        moe_tokens=mpu.get_tensor_and_context_parallel_group(),
    )


def destroy_groups() -> None:
    """Forget Megatron's groups so that another layout can follow in the same processes."""
    mpu.destroy_model_parallel()


class _SumOverGroup(torch.autograd.Function):
    """Sum over a group in which each member uses the result in its own loss; the true loss is the sum of these."""

    @staticmethod
    def forward(ctx, x, group):  # type: ignore[no-untyped-def]
        ctx.group = group
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


def sum_over(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Differentiable sum of ``x`` over ``group``; the gradient is summed too, as every member's loss depends on it."""
    return x if group.size() == 1 else _SumOverGroup.apply(x, group)


def seed_random_state(seed: int) -> None:
    """Seed the host's generator, which initialises routers, and Megatron's tracker, which adds this rank's place."""
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def random_state() -> dict[str, Any]:
    """The states of the host's generator and of Megatron's tracker, which has one per kind of parallel region."""
    return {"host": torch.get_rng_state(), "tracker": dict(get_cuda_rng_tracker().get_states())}


def restore_random_state(kept: dict[str, Any]) -> None:
    """Restore the state that ``random_state`` returned."""
    torch.set_rng_state(kept["host"])
    get_cuda_rng_tracker().set_states(kept["tracker"])
