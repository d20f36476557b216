"""What advantages are made from, and what they are."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from mcore_rl.algorithms.ragged import Trained, at_tokens, sequence_counts, sequence_sums


@dataclass(frozen=True, kw_only=True)
class AdvantageInputs:
    """All sequences of one step, on the controller.  Floating tensors share one dtype, float32.

    lengths_S: tokens of each sequence.  mask_T: bool, trained tokens.  group_S: int64, which prompt each sequence is a
    sample of, in any order and numbering.  rewards_T: token-level, KL penalty included, the response's score on its
    last trained token; read at trained tokens only.  values_T: the critic's.  greedy_S: score of the greedy response
    to the same prompt (ReMax).
    """

    lengths_S: tuple[int, ...]
    mask_T: Tensor
    group_S: Tensor
    rewards_T: Tensor
    values_T: Tensor | None = None
    greedy_S: Tensor | None = None

    def __post_init__(self) -> None:
        num_sequences, num_tokens = len(self.lengths_S), sum(self.lengths_S)
        assert self.mask_T.dtype == torch.bool, "masks are bool"
        for name, tensor, rows in (
            ("mask_T", self.mask_T, num_tokens),
            ("rewards_T", self.rewards_T, num_tokens),
            ("values_T", self.values_T, num_tokens),
            ("group_S", self.group_S, num_sequences),
            ("greedy_S", self.greedy_S, num_sequences),
        ):
            assert tensor is None or tensor.shape == (rows,), f"{name} is {tuple(tensor.shape)}, not {(rows,)}"

    @cached_property
    def counts_S(self) -> Tensor:
        """Trained tokens of each sequence, int64."""
        return sequence_counts(self.mask_T, self.lengths_S)

    @cached_property
    def trained(self) -> Trained:
        """Takes the trained tokens out of [T], and puts them back."""
        return Trained(self.mask_T)

    @cached_property
    def scores_S(self) -> Tensor:
        """Sum of the rewards of each sequence's trained tokens."""
        return sequence_sums(self.rewards_T.masked_fill(~self.mask_T, 0), self.lengths_S)

    def spread(self, x_S: Tensor) -> Tensor:
        """``x_S`` at each trained token of its sequence, 0 elsewhere; [T]."""
        return at_tokens(x_S, self.lengths_S).masked_fill_(~self.mask_T, 0)


@dataclass(frozen=True, kw_only=True)
class Advantages:
    """advantages_T: 0 at untrained tokens.  returns_T: what the critic should have said; None where there is none."""

    advantages_T: Tensor
    returns_T: Tensor | None = None
