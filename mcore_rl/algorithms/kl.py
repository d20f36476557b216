"""KL divergence between policy and reference: estimates from the sampled token, and its coefficient.

The three estimates of KL(policy || reference) are those of http://joschu.net/blog/kl-approx.html, for a token sampled
from the policy.  As a loss, their gradients differ.  The gradient of k1 is 0 in expectation.  That of k2 is, in
expectation, the gradient of the KL.  That of k3 is the gradient of KL(reference || policy), which is nearly the same
while the two are close (arXiv:2506.09477).  ``k1_plus`` and ``k3_plus`` have the value of k1 and k3 and the gradient of
k2.  ``training/full_kl.py`` computes the exact sum over the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from mcore_rl.config.algorithm import KlControl, KlControlConfig, KlPenalty, KlUnit

KlEstimate = Callable[[Tensor, Tensor], Tensor]  # (log-probs, reference log-probs) -> nats, elementwise
MAX_LOG_RATIO = 10.0  # up to a ratio of 22026, k3 is exact
VERL_MAX_LOG_RATIO = 20.0
VERL_MAX_K3 = 10.0
MAX_ADAPTIVE_ERROR = 0.2  # arXiv:1909.08593, section 2.2


def kl_k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """``log p - log q``: unbiased, of either sign.  Any shape, nats."""
    return logprobs - ref_logprobs


def kl_k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """``(log p - log q)^2 / 2``: biased, low variance, never negative.  Any shape, nats."""
    return 0.5 * (logprobs - ref_logprobs).square()


def kl_k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """``q/p - 1 - log(q/p)``: unbiased and never negative.  Any shape, nats.

    Beyond ``log(q/p) = MAX_LOG_RATIO`` the tangent continues the exponential.  So it cannot overflow, and its gradient
    is bounded but still pulls towards the reference; clamping the ratio or the result would make that gradient 0.
    """
    log_ratio = ref_logprobs - logprobs
    exact = log_ratio.clamp(max=MAX_LOG_RATIO).exp()
    beyond = (log_ratio - MAX_LOG_RATIO).clamp(min=0)
    return exact + math.exp(MAX_LOG_RATIO) * beyond - 1 - log_ratio


def kl_low_var(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """verl's k3 (core_algos.kl_penalty_forward, 0.9.1): at most 10 nats.  Any shape.

    Above 10 nats, that is from ``log(q/p)`` = 2.61 on, the gradient is 0: the tokens that are furthest from the
    reference are not pulled back.
    """
    log_ratio = (ref_logprobs - logprobs).clamp(-VERL_MAX_LOG_RATIO, VERL_MAX_LOG_RATIO)
    return (log_ratio.exp() - log_ratio - 1).clamp(max=VERL_MAX_K3)


def straight_through(value: KlEstimate) -> KlEstimate:
    """An estimate with the value of ``value`` and the gradient of k2, which is that of the KL in expectation.

    arXiv:2506.09477; verl's ``+``.
    """

    def estimate(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        squared = kl_k2(logprobs, ref_logprobs)
        return value(logprobs, ref_logprobs).detach() + (squared - squared.detach())

    return estimate


# Without ``full``, which is no estimate from one token.
PENALTIES: dict[KlPenalty, KlEstimate] = {
    KlPenalty.k1: kl_k1,
    KlPenalty.k2: kl_k2,
    KlPenalty.k3: kl_k3,
    KlPenalty.low_var_kl: kl_low_var,
    KlPenalty.k1_plus: straight_through(kl_k1),
    KlPenalty.k3_plus: straight_through(kl_k3),
}


class KlController:
    """The coefficient of the KL in the reward; ``adaptive`` moves it towards ``target_kl`` (arXiv:1909.08593, 2.2)."""

    def __init__(self, config: KlControlConfig) -> None:
        self.config = config
        self.coef = config.kl_coef

    def update(self, *, per_token: float, per_response: float, num_samples: int) -> None:
        """Adjusts the coefficient to the KL of one step, in nats; ``target_kl_per`` says which of the two it reads.

        Args:
            per_token: mean over responses of the mean over a response's tokens.
            per_response: mean over responses of the sum over a response's tokens.
            num_samples: responses of the step.

        ``coef *= 1 + clip(kl / target_kl - 1, -0.2, 0.2) * min(num_samples / horizon, 1)``.  The paper and verl lack
        the min, which keeps a batch far larger than the horizon from making the coefficient negative.  A KL that is
        not finite changes nothing, and ``fixed`` never changes.
        """
        kl_mean = per_token if self.config.target_kl_per is KlUnit.token else per_response
        if self.config.type is KlControl.fixed or not math.isfinite(kl_mean):
            return
        error = min(max(kl_mean / self.config.target_kl - 1, -MAX_ADAPTIVE_ERROR), MAX_ADAPTIVE_ERROR)
        self.coef *= 1 + error * min(num_samples / self.config.horizon, 1)

    def state_dict(self) -> dict[str, float]:
        """The state that a checkpoint must keep."""
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restores the state of ``state_dict``; a fixed coefficient stays the configuration's, whatever was saved."""
        if self.config.type is KlControl.adaptive:
            self.coef = state["coef"]
