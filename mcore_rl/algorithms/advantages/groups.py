"""The samples of each prompt, for the estimators that compare a response with its siblings.

A sequence without a token is a member of no group: it affects no baseline and no count.  A sequence that is not trained
because it was cut off is a member only if ``masked_in_baseline``.  The only member of a group has no sibling, and gets
the advantage 0, never its raw reward.  A prompt that lost its other samples therefore costs one sample, not the run
(``rollout.n=1`` is refused at the start).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# Scores of a group that are nearer than this share of its largest, some float32 roundings, are equal: 0.1 + 0.2 is 0.3.
TIE = 8 * 2.0**-24


def ranked(scores_N: Tensor, largest: float) -> Tensor:
    """``scores_N`` where those that are equal up to rounding are the lowest of them.  largest: the size of a score."""
    ascending_N, order_N = scores_N.sort()
    begins_N = ascending_N.diff(prepend=ascending_N[:1] - 1) > TIE * largest
    begins_N[:1] = True
    lowest_N = ascending_N[begins_N][begins_N.cumsum(0) - 1]
    return torch.empty_like(scores_N).index_copy_(0, order_N, lowest_N)


@dataclass(frozen=True, kw_only=True)
class PromptGroups:
    """The groups of a step's S sequences, one group per prompt.

    scores_S: the score minus the lowest score of the group, 0 for sequences that are no members.  Subtracting the
    lowest changes no advantage, and makes those of equal scores exactly 0, whatever the rounding of their mean.
    raw_S: the scores as given.
    counts_S: tokens of each sequence, int64.
    member_S: bool, whether the sequence is a member of its group.
    index_S: the number of its group, from 0, int64.
    sizes_S: the number of members of its group, int64.
    parts_SK: scores of K named parts of the reward; None if no estimator reads them.
    """

    scores_S: Tensor
    raw_S: Tensor
    counts_S: Tensor
    member_S: Tensor
    index_S: Tensor
    sizes_S: Tensor
    parts_SK: Tensor | None = None

    @classmethod
    def of(cls, group_S: Tensor, scores_S: Tensor, counts_S: Tensor, parts_SK: Tensor | None = None) -> PromptGroups:
        """The groups of all sequences of one step.

        group_S: the prompt that each sequence is a sample of, int64, in any order and numbering.  scores_S, parts_SK:
        finite.  counts_S: tokens of each member, int64; 0 for sequences that are no members.
        """
        raw_S = scores_S
        groups, index_S = torch.unique(group_S, return_inverse=True)
        member_S = counts_S > 0
        lowest_G = torch.zeros(len(groups), dtype=scores_S.dtype)
        lowest_G.scatter_reduce_(0, index_S[member_S], scores_S[member_S], "amin", include_self=False)
        scores_S = torch.where(member_S, scores_S - lowest_G[index_S], 0)
        sizes_S = torch.zeros(len(groups), dtype=torch.int64).index_add(0, index_S, member_S.long())[index_S]
        return cls(
            scores_S=scores_S,
            raw_S=raw_S,
            counts_S=counts_S,
            member_S=member_S,
            index_S=index_S,
            sizes_S=sizes_S,
            parts_SK=parts_SK,
        )

    @property
    def ranked_S(self) -> Tensor:
        """``scores_S`` for comparisons: those that differ by rounding alone are equal, [S]."""
        ranked_S = self.scores_S.clone()
        for members in self.members_of(self.member_S):
            ranked_S[members] = ranked(self.scores_S[members], float(self.raw_S[members].abs().max()))
        return ranked_S

    def members_of(self, chosen_S: Tensor) -> Iterator[Tensor]:
        """The places of all members of each group that has a sequence where ``chosen_S``, bool, is set."""
        for index in torch.unique(self.index_S[chosen_S]):
            yield (self.member_S & (self.index_S == index)).nonzero().squeeze(1)

    def by(self, scores_S: Tensor) -> PromptGroups:
        """The same groups with other scores."""
        return PromptGroups.of(self.index_S, scores_S, self.counts_S)

    @property
    def has_siblings_S(self) -> Tensor:
        """Bool [S]: whether a sequence is a member of a group of two or more."""
        return self.member_S & (self.sizes_S > 1)

    def sums(self, x_S: Tensor) -> Tensor:
        """Sum of ``x_S`` over the members of each sequence's group, [S]."""
        members_S = torch.where(self.member_S, x_S, 0)
        return torch.zeros_like(members_S).index_add(0, self.index_S, members_S)[self.index_S]

    def centred(self) -> Tensor:
        """Scores minus the mean of their group, [S]; 0 for the only member of a group, and for no members."""
        return torch.where(self.member_S, self.scores_S - self.sums(self.scores_S) / self.sizes_S.clamp(min=1), 0)

    def deviations(self) -> Tensor:
        """Standard deviation of the group's scores with Bessel's correction, [S]; 0 for the only member of a group."""
        return (self.sums(self.centred().square()) / (self.sizes_S - 1).clamp(min=1)).sqrt()
