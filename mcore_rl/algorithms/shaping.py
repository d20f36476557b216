"""What of a step's samples is trained at all: DAPO's two filters (arXiv:2503.14476, sections 3.2 and 3.4)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mcore_rl.algorithms.ragged import at_tokens


def informative_groups(scores_S: Tensor, group_S: Tensor) -> Tensor:
    """Bool [S]: whether the scores of a sequence's group are not all equal, so that group estimators learn from it.

    scores_S: finite.  group_S: int64, which prompt each sequence is a sample of, in any order and numbering.  The
    only member of a group is not informative.
    """
    _, index_S, counts_G = torch.unique(group_S, return_inverse=True, return_counts=True)
    bounds = torch.zeros(2, len(counts_G), dtype=scores_S.dtype)
    bounds[0].scatter_reduce_(0, index_S, scores_S, "amin", include_self=False)
    bounds[1].scatter_reduce_(0, index_S, scores_S, "amax", include_self=False)
    return (bounds[0] < bounds[1])[index_S]


def mask_truncated(mask_T: Tensor, lengths_S: Sequence[int], truncated_S: Tensor) -> Tensor:
    """``mask_T`` without the responses that were cut off at their limit (``truncated_S``, bool): overlong filtering.

    Call it before advantages are estimated: a response that is not trained is no member of its group either.
    """
    return mask_T & ~at_tokens(truncated_S, lengths_S)
