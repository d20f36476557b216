"""Group sequence policy optimization (arXiv:2507.18071): one ratio per response, the geometric mean of its tokens'."""

from __future__ import annotations

from mcore_rl.algorithms.losses.ppo_clip import clipped_surrogate
from mcore_rl.algorithms.losses.token_losses import MAX_LOG_RATIO, TokenLosses, log_ratios
from mcore_rl.config.clipping import ClippedConfig
from mcore_rl.ground.types import LossInputs


def gspo(inputs: LossInputs, config: ClippedConfig) -> TokenLosses:
    """``max(-A s_t, -A clip(s_t, 1 - low, 1 + high))`` with ``s_t = sg[s] p_t / sg[p_t]``, ``log s = mean log r``.

    The paper's token form (section 4.3): each token has the value of the sequence and its own gradient.  With
    ``loss_agg_mode=seq_mean_token_mean`` and one advantage per response, its gradient is that of the sequence form.
    Clip ranges of this ratio are small: 3e-4 and 4e-4 in the paper.  There is no dual clip.
    """
    assert inputs.logprobs_N is not None
    changes_N = log_ratios(inputs).detach()
    counts_S = inputs.sequence_sums(inputs.mask_N.to(changes_N.dtype)).clamp(min=1)
    mean_change_S = (inputs.sequence_sums(changes_N) / counts_S).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    logprobs_N = inputs.logprobs_N.masked_fill(~inputs.mask_N, 0)
    ratio_N = (inputs.expand(mean_change_S) + logprobs_N - logprobs_N.detach()).exp()
    return clipped_surrogate(ratio_N, inputs, config)
