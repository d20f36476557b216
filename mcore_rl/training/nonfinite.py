"""Finds the source of a non-finite loss or gradient, at almost no cost for a finite step.

Each pass leaves a few small tensors on the device; the host reads them only after a non-finite step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from mcore_rl.parallel.groups import ProcessGroups


@dataclass(frozen=True, order=True)
class NonFiniteTensor:
    """One non-finite tensor.  Sorts by cause: losses first, then the gradient that the backward pass met first."""

    is_gradient: bool
    backward_order: int
    microbatch: int
    rank: int
    where: str
    coords: str

    def __str__(self) -> str:
        return f"{self.where} of microbatch {self.microbatch} on rank {self.rank} ({self.coords})"


class FiniteWatch:
    """Watches the losses of a step, and the gradients between the stages of ``models``, from ``begin`` to ``end``."""

    def __init__(self, groups: ProcessGroups, models: Sequence[GPTModel], num_chunks: int) -> None:
        self.groups = groups
        self.microbatch = 0
        self._is_on = False
        self._flags: list[tuple[bool, int, int, str, Tensor]] = []
        for stage, model in enumerate(models):
            order = num_chunks - 1 - (stage * groups.layout.pp + groups.coords.pp)
            # The decoder's output, not the chunk's: the last chunk's output are the logits, too large to check.
            where = f"the gradient at the output of pipeline chunk {num_chunks - 1 - order}"
            self._watch_output(model.decoder, where, order)
            if model.pre_process:
                self._watch_output(model.embedding, "the gradient at the embedding", num_chunks)

    def _watch_output(self, module: torch.nn.Module, where: str, order: int) -> None:
        def watch(_module: torch.nn.Module, _inputs: object, output: Tensor) -> None:
            if self._is_on and output.requires_grad:
                microbatch = self.microbatch
                output.register_hook(lambda grad: self._note(grad, True, order, microbatch, where))

        module.register_forward_hook(watch)

    def begin(self) -> None:
        """Start watching one step."""
        self._is_on = True
        self._flags.clear()

    def end(self) -> None:
        """Stop watching; the findings stay until the next ``begin``."""
        self._is_on = False

    def loss(self, total: Tensor, microbatch: int) -> None:
        """Watch a microbatch's loss."""
        self._note(total, False, 0, microbatch, "the loss")

    def _note(self, tensor: Tensor, is_gradient: bool, order: int, microbatch: int, where: str) -> None:
        # aminmax is one pass without a temporary, in any dtype, and gives NaN if any element is NaN.
        extremes = torch.stack(torch.aminmax(tensor.detach()))
        self._flags.append((is_gradient, order, microbatch, where, extremes))

    def explain(self) -> str:
        """The first cause over all ranks, in words.  Collective over the world."""
        rank = self.groups.rank
        coords = str(self.groups.coords)
        mine = [
            (is_gradient, order, microbatch, rank, where, coords)
            for is_gradient, order, microbatch, where, extremes in self._flags
            if not bool(extremes.isfinite().all())
        ]
        everyone: list[list[tuple[bool, int, int, int, str, str]]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, mine)
        findings = sorted(NonFiniteTensor(*finding) for rank_findings in everyone for finding in rank_findings)
        if not findings:
            return "a weight gradient, though every loss and every gradient between the stages was finite"
        others = len(findings) - 1
        return str(findings[0]) + (f" (and {others} that follow from it or stand beside it)" if others else "")
