"""The samples of each prompt, for the estimators that compare a response with its siblings.

A sequence without a token is a member of no group: it neither moves a baseline nor counts.  One that was cut off and is
not trained for that is a member where ``masked_in_baseline`` says so.  The only member
of a group has nothing to be compared with: all that is computed here makes its advantage 0, never its raw reward, so
that a prompt which lost its other samples costs a sample and not the run (``rollout.n=1`` is refused beforehand).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class PromptGroups:
    """Members of each prompt's group.

    scores_S: less the lowest of the group, which no baseline notices, and which makes equal scores give exactly 0
    whatever the rounding of their mean; 0 for those who are no members.
    raw_S: scores as they were given.  parts_SK: of K named rewards, where an estimator reads them apart.
    counts_S: tokens.  member_S: bool.  index_S: int64, the group, counted from 0.  sizes_S: members of a
    sequence's group.
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
        """The groups of one step, of all its sequences.

        group_S: int64, which prompt each sequence is a sample of, in any order and numbering.  scores_S, parts_SK:
        finite.  counts_S: tokens of each member, int64; 0 of those who are none.
        """
        raw_S = scores_S
        groups, index_S = torch.unique(group_S, return_inverse=True)
        member_S = counts_S > 0
        lowest_G = torch.zeros(len(groups), dtype=scores_S.dtype)
        lowest_G.scatter_reduce_(0, index_S[member_S], scores_S[member_S], "amin", include_self=False)
        scores_S = torch.where(member_S, scores_S - lowest_G[index_S], 0)
        sizes_S = torch.zeros(len(groups), dtype=torch.int64).index_add(0, index_S, member_S.long())[index_S]
        return cls(
            scores_S=scores_S, raw_S=raw_S, counts_S=counts_S, member_S=member_S, index_S=index_S, sizes_S=sizes_S,
            parts_SK=parts_SK,
        )  # fmt: skip

    def by(self, scores_S: Tensor) -> PromptGroups:
        """The same groups with other scores."""
        return PromptGroups.of(self.index_S, scores_S, self.counts_S)

    @property
    def has_siblings_S(self) -> Tensor:
        """Bool: members of groups of two or more."""
        return self.member_S & (self.sizes_S > 1)

    def sums(self, x_S: Tensor) -> Tensor:
        """Sum of ``x_S`` over the members of each sequence's group, [S]."""
        members_S = torch.where(self.member_S, x_S, 0)
        return torch.zeros_like(members_S).index_add(0, self.index_S, members_S)[self.index_S]

    def centred(self) -> Tensor:
        """Scores less the mean of their group, [S]; 0 for only members."""
        return torch.where(self.member_S, self.scores_S - self.sums(self.scores_S) / self.sizes_S.clamp(min=1), 0)

    def deviations(self) -> Tensor:
        """Standard deviation of the group's scores with Bessel's correction, [S]; 0 for only members."""
        return (self.sums(self.centred().square()) / (self.sizes_S - 1).clamp(min=1)).sqrt()
