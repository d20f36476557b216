"""Collects what the microbatches of a pass say, and joins it over the ranks: results per token, and sums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_rl.config.role import Head
from mcore_rl.ground.types import LossInputs, LossSums, TokenScores
from mcore_rl.parallel.groups import ProcessGroups
from mcore_rl.training.microbatch import Microbatch


class TokenOutputs:
    """Log-probs, and with ``with_entropy`` entropies, or values of a value head, of every token of a rank's batch."""

    def __init__(self, head: Head, with_entropy: bool, num_tokens: int, groups: ProcessGroups) -> None:
        self.groups = groups
        self._names = ["values_T"] if head is Head.value else ["logprobs_T", "entropy_T"][: 1 + with_entropy]
        self._out = torch.zeros(len(self._names), num_tokens + 1, device=groups.device)

    def add(self, microbatch: Microbatch, outputs: Sequence[Tensor]) -> None:
        """Keeps the outputs of a microbatch, each [N], in predictor order."""
        for row, value_N in zip(self._out, outputs, strict=True):
            microbatch.scatter_to_targets(value_N.detach(), row)

    def over_ranks(self) -> TokenScores:
        """Those of all tokens, on the CPU, the same on every peer.  Collective over context and pipeline ranks."""
        dist.all_reduce(self._out, group=self.groups.cp)
        dist.all_reduce(self._out, group=self.groups.pp)
        return TokenScores(**dict(zip(self._names, self._out[:, :-1].cpu(), strict=True)))


class HiddenOutputs:
    """The hidden states [M, H] that predict the tokens of ``mask_T``, bool [T], of a rank's batch, in host memory."""

    BLOCK = 8192  # tokens that ranks exchange at once

    def __init__(self, mask_T: Tensor, width: int, dtype: torch.dtype, groups: ProcessGroups) -> None:
        self.groups = groups
        mask_T = mask_T.cpu()
        self._place_T = torch.where(mask_T, mask_T.cumsum(0) - 1, -1)
        self._out_MH = torch.zeros(int(mask_T.sum()), width, dtype=dtype)

    def add(self, microbatch: Microbatch, output: Tensor) -> None:
        """Keeps the trained rows of ``output``, [B, N/B, H], of a microbatch."""
        targets_N = microbatch.targets_N.cpu()
        place_N = torch.where(targets_N >= 0, self._place_T[targets_N.clamp(min=0)], -1)
        rows_M = (place_N >= 0).nonzero().squeeze(1)
        self._out_MH[place_N[rows_M]] = output.view(-1, output.shape[-1])[rows_M.to(output.device)].cpu()

    def over_ranks(self) -> Tensor:
        """Those of all rows, the same on every peer.  Collective over context and pipeline ranks."""
        layout = self.groups.layout
        for block_MH in self._out_MH.split(self.BLOCK) if layout.cp > 1 or layout.pp > 1 else ():
            moved_MH = block_MH.to(self.groups.device)
            dist.all_reduce(moved_MH, group=self.groups.cp)  # each row is one rank's, and 0 on the others
            dist.all_reduce(moved_MH, group=self.groups.pp)
            block_MH.copy_(moved_MH)
        return self._out_MH


def keep_scores(out: TokenOutputs, microbatch: Microbatch, inputs: LossInputs, *, with_entropy: bool) -> LossInputs:
    """Keeps log-probs and entropies of ``inputs``; returns what the loss gets.  with_entropy: it gets entropies.

    The weights are those before the step, so log-probs are their own old ones.
    """
    assert inputs.logprobs_N is not None and inputs.entropy_N is not None, "values have no log-probs"
    out.add(microbatch, [inputs.logprobs_N, inputs.entropy_N])
    old_N = inputs.logprobs_N.detach() if inputs.old_logprobs_N is None else inputs.old_logprobs_N
    return replace(inputs, old_logprobs_N=old_N, entropy_N=inputs.entropy_N if with_entropy else None)


class RunningSums:
    """Adds up the loss and the metrics of a step's microbatches, then over the ranks; keeps the largest of maxima."""

    def __init__(self, groups: ProcessGroups) -> None:
        self.groups = groups
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}

    def add(self, loss: Tensor, sums: LossSums) -> None:
        """Adds a microbatch.  loss: its part of the minibatch's; the other numbers are those of ``sums``."""
        for name, value in {"": loss, **sums.metrics}.items():
            value = value.detach().float()
            self._sums[name] = self._sums[name] + value if name in self._sums else value
        for name, value in sums.maxima.items():
            self._maxima[name] = torch.maximum(self._maxima[name], value) if name in self._maxima else value

    def over_ranks(self) -> tuple[float, dict[str, float], dict[str, float]]:
        """(loss, metrics, maxima) of the global minibatch, on every rank.  Collective over the world."""
        joined: list[dict[str, float]] = [{}, {}]
        if self.groups.is_last_stage:
            reductions = ((self._sums, dist.ReduceOp.SUM), (self._maxima, dist.ReduceOp.MAX))
            for place, (named, operation) in enumerate(reductions):
                if names := sorted(named):
                    stacked = torch.stack([named[name] for name in names])
                    dist.all_reduce(stacked, operation, group=self.groups.dp_cp)
                    joined[place] = dict(zip(names, stacked.tolist(), strict=True))
        if self.groups.layout.pp > 1:
            last = dist.get_global_rank(self.groups.pp, self.groups.layout.pp - 1)
            dist.broadcast_object_list(joined, src=last, group=self.groups.pp)
        sums, maxima = joined
        return sums.pop(""), sums, maxima
