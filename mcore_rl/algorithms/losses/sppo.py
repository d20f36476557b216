"""Self-play preference optimization (arXiv:2405.00675): regression of the log-ratio of a whole response."""

from __future__ import annotations

from mcore_rl.algorithms.losses.token_losses import TokenLosses, log_ratios
from mcore_rl.config.roles import ActorConfig
from mcore_rl.ground.types import LossInputs


def sppo(inputs: LossInputs, config: ActorConfig) -> TokenLosses:
    """``(sum of log r - A)^2`` of each response (eq. 3.3); ``A``, nats, is the log-ratio that is aimed at.

    ``A`` is one number per response (its mean, if an estimator gives one per token).  The loss of a response is spread
    evenly over its trained tokens, and each token has the gradient of its own log-prob, so that with
    ``loss_agg_mode=seq_mean_token_sum`` value and gradient are those of the sequence form.
    """
    assert inputs.logprobs_N is not None and inputs.advantages_N is not None
    changes_N = log_ratios(inputs).detach()
    counts_S = inputs.sequence_sums(inputs.mask_N.to(changes_N.dtype)).clamp(min=1)
    aims_S = inputs.sequence_sums(inputs.advantages_N.masked_fill(~inputs.mask_N, 0)) / counts_S
    errors_S = inputs.sequence_sums(changes_N) - aims_S
    logprobs_N = inputs.logprobs_N.masked_fill(~inputs.mask_N, 0)
    own_N = 2 * inputs.expand(errors_S) * (logprobs_N - logprobs_N.detach())  # 0, with the gradient
    return TokenLosses(loss_N=inputs.expand(errors_S.square() / counts_S) + own_N)
