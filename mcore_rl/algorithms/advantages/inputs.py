"""The inputs and the result of advantage estimators of ``Scope.token``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from mcore_rl.algorithms.advantages.ragged import Trained, at_tokens, last_trained, sequence_counts, sequence_sums


@dataclass(frozen=True, kw_only=True)
class AdvantageInputs:
    """Sequences of one step: all of them, or those of a rank.  Floating tensors share one dtype, float32.

    lengths_S: tokens of each sequence.
    mask_T: bool, trained tokens.
    outcome_S: the response's score, finite; it is a reward of the last trained token.
    process_T: further rewards of tokens, such as those of turns and the KL penalty; read at trained tokens only.
    values_T: the critic's values.
    greedy_S: the reward of the greedy response to the same prompt (ReMax).
    """

    lengths_S: tuple[int, ...]
    mask_T: Tensor
    outcome_S: Tensor
    process_T: Tensor | None = None
    values_T: Tensor | None = None
    greedy_S: Tensor | None = None

    def __post_init__(self) -> None:
        num_sequences = len(self.lengths_S)
        num_tokens = sum(self.lengths_S)
        assert self.mask_T.dtype == torch.bool, "masks are bool"
        for name, tensor, rows in (
            ("mask_T", self.mask_T, num_tokens),
            ("process_T", self.process_T, num_tokens),
            ("values_T", self.values_T, num_tokens),
            ("outcome_S", self.outcome_S, num_sequences),
            ("greedy_S", self.greedy_S, num_sequences),
        ):
            assert tensor is None or tensor.shape == (rows,), f"{name} is {tuple(tensor.shape)}, not {(rows,)}"

    @cached_property
    def counts_S(self) -> Tensor:
        """Trained tokens of each sequence, int64."""
        return sequence_counts(self.mask_T, self.lengths_S)

    @cached_property
    def trained(self) -> Trained:
        """Gathers trained tokens from [T] to [M] and scatters them back."""
        return Trained(self.mask_T)

    @cached_property
    def rewards_T(self) -> Tensor:
        """All rewards of each token, 0 at untrained tokens.

        The score of a sequence without a trained token is dropped: no action can have earned it.
        """
        if self.process_T is None:
            rewards_T = torch.zeros(self.mask_T.numel(), dtype=self.outcome_S.dtype)
        else:
            rewards_T = self.process_T.masked_fill(~self.mask_T, 0)
        rewards_T[last_trained(self.mask_T, self.lengths_S)] += self.outcome_S[self.counts_S > 0]
        return rewards_T

    @cached_property
    def scores_S(self) -> Tensor:
        """Sum of the rewards of each sequence's trained tokens."""
        if self.process_T is None:
            return torch.where(self.counts_S > 0, self.outcome_S, 0)
        return sequence_sums(self.rewards_T.double(), self.lengths_S).to(self.outcome_S.dtype)

    def spread(self, x_S: Tensor) -> Tensor:
        """``x_S`` at each trained token of its sequence, 0 elsewhere; [T]."""
        return torch.where(self.mask_T, at_tokens(x_S, self.lengths_S), 0)


@dataclass(frozen=True, kw_only=True)
class Advantages:
    """advantages_T: 0 at untrained tokens.  returns_T: the critic's targets; None if the estimator has no critic."""

    advantages_T: Tensor
    returns_T: Tensor | None = None
