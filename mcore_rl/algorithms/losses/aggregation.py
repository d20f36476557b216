"""How the losses of tokens become one number: the sum that a rank adds up, and what the global sum is divided by.

Sequences without a trained token count in neither.  A token's share of the sum depends on its own sequence alone, the
whole of it: on no microbatch, packing or context rank.
"""

from __future__ import annotations

from torch import Tensor

from mcore_rl.algorithms.losses.token_losses import masked_sum
from mcore_rl.config.roles import LossAggregation
from mcore_rl.types import LossInputs


def sum_token_losses(loss_N: Tensor, inputs: LossInputs, mode: LossAggregation) -> Tensor:
    """This rank's part of the sum, scalar; to be divided by ``loss_denominator`` of the whole minibatch.

    Collective over the context ranks where ``mode`` is ``seq_mean_token_mean``: there each token is divided by the
    trained tokens of its whole sequence.
    """
    if mode is LossAggregation.seq_mean_token_mean:
        counts_S = inputs.sequence_sums(inputs.mask_N.to(loss_N.dtype))
        loss_N = loss_N / inputs.expand(counts_S.clamp(min=1))
    return masked_sum(loss_N, inputs.mask_N)


def loss_denominator(counts_S: Tensor, mode: LossAggregation, constant: float | None = None) -> float:
    """``Denominators.loss`` of a global minibatch, all data-parallel ranks together.  counts_S: trained tokens.

    All of them for ``token_mean``, else the sequences that have some; for ``sum_over_constant`` those times
    ``constant`` (tokens: ``loss_agg_constant``, or the longest response allowed).  0.0 where nothing is trained: such
    a minibatch takes no step.
    """
    if mode is LossAggregation.token_mean:
        return float(counts_S.sum())
    sequences = float((counts_S > 0).sum())
    if mode is LossAggregation.sum_over_constant:
        assert constant is not None and constant > 0, "sum_over_constant needs its constant"
        return sequences * constant
    return sequences
