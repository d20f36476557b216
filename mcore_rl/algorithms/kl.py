"""KL divergence between policy and reference: estimates from the sampled token, and its coefficient.

The three estimates of KL(policy || reference) are those of http://joschu.net/blog/kl-approx.html, for a token sampled
from the policy.  As a loss their gradients differ: that of k1 is 0 in expectation and pulls nowhere, that of k2 is the
gradient of the KL in expectation, that of k3 is the gradient of the KL the other way round, near enough the same while
the two are close (arXiv:2506.09477).  The exact sum over the vocabulary is ``training/full_kl.py``'s.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from mcore_rl.config.algorithm import KlControl, KlControlConfig, KlPenalty

MAX_LOG_RATIO = 10.0  # up to a ratio of 22026, k3 is exact
MAX_ADAPTIVE_ERROR = 0.2  # arXiv:1909.08593, section 2.2


def kl_k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """``log p - log q``: unbiased, of either sign.  Any shape, nats."""
    return logprobs - ref_logprobs


def kl_k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """``(log p - log q)^2 / 2``: biased, low variance, never negative.  Any shape, nats."""
    return 0.5 * (logprobs - ref_logprobs).square()


def kl_k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """``q/p - 1 - log(q/p)``: unbiased and never negative.  Any shape, nats.

    Where ``log(q/p)`` exceeds ``MAX_LOG_RATIO`` the exponential goes on along its tangent: it cannot overflow, and
    the gradient is bounded but still pulls back, where clamping the ratio or the result would let go.
    """
    log_ratio = ref_logprobs - logprobs
    exact = log_ratio.clamp(max=MAX_LOG_RATIO).exp()
    beyond = (log_ratio - MAX_LOG_RATIO).clamp(min=0)
    return exact + math.exp(MAX_LOG_RATIO) * beyond - 1 - log_ratio


PENALTIES: dict[KlPenalty, Callable[[Tensor, Tensor], Tensor]] = {
    KlPenalty.k1: kl_k1,
    KlPenalty.k2: kl_k2,
    KlPenalty.k3: kl_k3,
}


def penalty(kind: KlPenalty) -> Callable[[Tensor, Tensor], Tensor]:
    """The estimate called ``kind``: (log-probs, reference log-probs) to nats, elementwise; ``full`` is none."""
    return PENALTIES[kind]


class KlController:
    """The coefficient of the KL in the reward; ``adaptive`` moves it towards ``target_kl`` (arXiv:1909.08593, 2.2)."""

    def __init__(self, config: KlControlConfig) -> None:
        self.config = config
        self.coef = config.kl_coef

    def update(self, kl_mean: float, num_samples: int) -> None:
        """Tell it of one step.  kl_mean: nats per response, the mean over the step's ``num_samples`` responses.

        ``coef *= 1 + clip(kl_mean / target_kl - 1, -0.2, 0.2) * min(num_samples / horizon, 1)``; the min, which the
        paper lacks, keeps a batch larger than the horizon from turning the sign.  A KL that is not finite moves
        nothing, and ``fixed`` never moves.
        """
        if self.config.type is KlControl.fixed or not math.isfinite(kl_mean):
            return
        error = min(max(kl_mean / self.config.target_kl - 1, -MAX_ADAPTIVE_ERROR), MAX_ADAPTIVE_ERROR)
        self.coef *= 1 + error * min(num_samples / self.config.horizon, 1)

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint must keep."""
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on where ``state_dict`` was taken; a fixed coefficient is the configuration's, whatever was saved."""
        if self.config.type is KlControl.adaptive:
            self.coef = state["coef"]
