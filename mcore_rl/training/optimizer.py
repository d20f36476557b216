"""AdamW over Megatron's distributed optimizer, with Muon ahead of it; and a step that refuses non-finite gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import (
    MegatronOptimizer,
    clip_grads,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from torch import Tensor

from mcore_rl.config.engine import OptimizerConfig, OptimizerKind, Schedule
from mcore_rl.config.megatron_versions import grads_for_norm
from mcore_rl.training.muon import MARK, Muon, marked_groups


def learning_rate(optim: OptimizerConfig, step: int) -> float:
    """The rate of optimizer step ``step``, counted from 0.

    Warm-up: ``lr * (step + 1) / lr_warmup_steps``, so that the first step already moves.  After it the rate is held,
    or falls from ``lr`` to ``lr * min_lr_ratio`` along a line or half a cosine (arXiv:1608.03983), reached at
    ``total_steps`` and then held.  ``optim`` is complete: ``config.schedule`` has made it so.
    """
    assert not optim.warmup_ratio, "the run says how many steps that is"
    if step < optim.lr_warmup_steps:
        return optim.lr * (step + 1) / optim.lr_warmup_steps
    if optim.lr_schedule is Schedule.constant:
        return optim.lr
    assert optim.total_steps is not None, "the run says how long it is"
    progress = min((step - optim.lr_warmup_steps) / (optim.total_steps - optim.lr_warmup_steps), 1.0)
    fall = progress if optim.lr_schedule is Schedule.linear else (1 - math.cos(math.pi * progress)) / 2
    return optim.lr * (1 - (1 - optim.min_lr_ratio) * fall)


@dataclass(frozen=True)
class Stepped:
    """The outcome of a step.

    grad_norm: global L2 norm before clipping.  finite: whether norm and loss were finite, so that the weights moved.
    """

    grad_norm: float
    finite: bool


class Optimizer:
    """One role's optimizer.  megatron: the distributed optimizer.  num_steps: steps that moved the weights."""

    def __init__(self, config: OptimizerConfig, chunks: list[DistributedDataParallel], dtype: torch.dtype) -> None:
        self.config = config
        self.num_steps = 0
        self._device = next(chunks[0].parameters()).device
        settings = MegatronOptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            min_lr=0.0,
            weight_decay=config.weight_decay,
            adam_beta1=config.betas[0],
            adam_beta2=config.betas[1],
            adam_eps=config.eps,
            clip_grad=config.clip_grad,
            bf16=dtype is torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=True,
        )
        groups = get_standard_config_overrides(settings)
        if config.optimizer is OptimizerKind.muon:
            groups |= marked_groups()
        self.megatron: MegatronOptimizer = get_megatron_optimizer(
            settings, chunks, groups, use_gloo_process_groups=False
        )
        self._muon: Muon | None = None
        if config.optimizer is OptimizerKind.muon:
            self._muon = Muon(chunks, self.megatron.chained_optimizers)
        if self._device.type != "cpu":
            self._fuse()

    def _fuse(self) -> None:
        """Makes torch's AdamW, which Megatron takes where it finds no other, one kernel.

        Its default on an accelerator allocates 4 bytes a parameter in every step, which was the peak of memory of a
        recomputed step on an H200.
        """
        for part in self.megatron.chained_optimizers:
            if isinstance(part.optimizer, torch.optim.AdamW):
                for group in part.optimizer.param_groups:
                    group["fused"] = True

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return learning_rate(self.config, self.num_steps)

    def step(self, *, loss_is_finite: bool) -> Stepped:
        """Clip and apply the reduced gradients.  A non-finite gradient or loss changes nothing.

        The gradient of an infinite loss can be finite: a clamped ratio has none.  Collective over the world: every
        rank passes the same global loss, gets the same norm and takes the same branch.
        """
        parts = self.megatron.chained_optimizers
        found_inf = self.megatron.prepare_grads()
        grad_norm = self._grad_norm()
        if found_inf or not loss_is_finite or not math.isfinite(grad_norm):
            return Stepped(grad_norm, finite=False)
        for group in self.megatron.param_groups:
            group["lr"] = 0.0 if MARK in group else self.lr  # Muon moves matrices
            # Megatron marks biases and norms with wd_mult 0; its scheduler, which we do not use, would apply it.
            group["weight_decay"] = self.config.weight_decay * group["wd_mult"]
        for part in parts:
            if self.config.clip_grad > 0 and part.get_parameters():
                clip_grads.clip_grad_by_total_norm_fp32(part.get_parameters(), self.config.clip_grad, grad_norm)
        if self._muon is not None:
            self._muon.step(self.lr, self.config.weight_decay, self.config.betas[0])
        self.megatron.step_with_ready_grads()
        self.num_steps += 1
        return Stepped(grad_norm, finite=True)

    @torch.no_grad()
    def _grad_norm(self) -> float:
        """The global L2 norm, as Megatron computes it, with one read of the device for all tensors and parts.

        Without Transformer Engine or Apex, Megatron's own reads it once for every tensor (core/utils.py:1205, 0.16.1).
        """
        parts = self.megatron.chained_optimizers
        named = [(grads_for_norm(part), part.get_grad_stats_parallel_group()) for part in parts]
        if len(parts) > 1 and self.megatron.grads_states_parallel_group_is_shared():
            named = [([grad for grads, _ in named for grad in grads], self.megatron.get_grad_stats_parallel_group())]
        squares = []
        for grads, group in named:
            norms = torch.stack(torch._foreach_norm(grads)) if grads else torch.zeros(1, device=self._device)
            squares.append(torch.norm(norms).view(1) ** 2)
            dist.all_reduce(squares[-1], group=group)
        of_parts = [float(square) ** 0.5 for square in torch.cat(squares).tolist()]
        return of_parts[0] if len(of_parts) == 1 else math.sqrt(sum(norm**2 for norm in of_parts))

    def state_tensors(self) -> list[Tensor]:
        """Main weights and Adam moments of this rank's shard."""
        tensors: list[Tensor] = []
        for part in self.megatron.chained_optimizers:
            for group in part.optimizer.param_groups:
                tensors += group["params"]
                tensors += [
                    tensor
                    for parameter in group["params"]
                    for tensor in part.optimizer.state.get(parameter, {}).values()
                    if isinstance(tensor, Tensor) and tensor.dim() > 0
                ]
        return tensors
