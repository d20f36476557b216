"""How the losses of tokens become one number: each rank's sum, and the divisor of the global sum.

Sequences without a trained token count in neither.  A token's part of the sum depends only on its own whole sequence,
not on microbatch, packing or context rank.
"""

from __future__ import annotations

from torch import Tensor

from mcore_rl.algorithms.losses.token_losses import masked_sum
from mcore_rl.config.roles import LossAggregation
from mcore_rl.ground.types import LossInputs


def sum_token_losses(loss_N: Tensor, inputs: LossInputs, mode: LossAggregation) -> Tensor:
    """This rank's part of the sum, scalar; the engine divides it by ``loss_denominator`` of the whole minibatch.

    With ``seq_mean_token_mean`` this is a collective over the context ranks, since each token is divided by the trained
    tokens of its whole sequence.
    """
    if mode is LossAggregation.seq_mean_token_mean:
        counts_S = inputs.sequence_sums(inputs.mask_N.to(loss_N.dtype))
        loss_N = loss_N / inputs.expand(counts_S.clamp(min=1))
    return masked_sum(loss_N, inputs.mask_N)


def loss_denominator(counts_S: Tensor, mode: LossAggregation, constant: float | None = None) -> float:
    """``Denominators.loss`` of a global minibatch over all data-parallel ranks.  counts_S: trained tokens per sequence.

    ``token_mean``: the number of trained tokens.  Otherwise: the number of sequences with trained tokens; for
    ``sum_over_constant`` times ``constant`` (tokens: ``loss_agg_constant``, or the longest response allowed).
    0.0 if nothing is trained: such a minibatch takes no optimizer step.
    """
    if mode is LossAggregation.token_mean:
        return float(counts_S.sum())
    sequences = float((counts_S > 0).sum())
    if mode is LossAggregation.sum_over_constant:
        assert constant is not None and constant > 0, "sum_over_constant needs its constant"
        return sequences * constant
    return sequences
