"""What a policy loss says of each token, and the ratio that most of them are made of."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

from torch import Tensor

from mcore_rl.types import LossInputs

MAX_LOG_RATIO = 20.0  # a ratio of 5e8: far outside every clip range, and no overflow in float32
# Float32 log-probs of up to 32 nats are 2e-6 apart, and two passes over one token differ by a few of these.
ROUNDING = 1e-5


@dataclass(frozen=True, kw_only=True)
class TokenLosses:
    """loss_N: with gradient; rows that are not trained hold numbers without meaning.

    metrics: sums over this rank's trained rows, without gradient.
    """

    loss_N: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)


def trained_rows(inputs: LossInputs) -> LossInputs:
    """``inputs`` with zeros in every row that is not trained: what stands there cannot reach a loss or a gradient."""
    zeroed: dict[str, Tensor] = {}
    for each in fields(inputs):
        value = getattr(inputs, each.name)
        if isinstance(value, Tensor) and value.is_floating_point():
            zeroed[each.name] = value.masked_fill(~inputs.mask_N, 0)
    return replace(inputs, **zeroed)  # type: ignore[arg-type]


def log_ratios(inputs: LossInputs) -> Tensor:
    """``log p - log p_old`` of trained rows, clamped to +-``MAX_LOG_RATIO``, 0 elsewhere; [N], differentiable."""
    assert inputs.logprobs_N is not None and inputs.old_logprobs_N is not None, "a ratio needs old log-probs"
    change_N = (inputs.logprobs_N - inputs.old_logprobs_N).masked_fill(~inputs.mask_N, 0)
    return change_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def masked_sum(x_N: Tensor, mask_N: Tensor) -> Tensor:
    """Sum over trained rows, scalar; connected to the graph of ``x_N`` where there are none, too."""
    return x_N.masked_fill(~mask_N, 0).sum()


def below(ratio_N: Tensor, bound: float) -> Tensor:
    """Whether a ratio is less than ``bound`` by more than rounding: one that equals it is not clipped."""
    return ratio_N < bound * (1 - ROUNDING)


def above(ratio_N: Tensor, bound: float) -> Tensor:
    """Whether a ratio exceeds ``bound`` by more than rounding."""
    return ratio_N > bound * (1 + ROUNDING)


def clip_metrics(low_N: Tensor, high_N: Tensor, mask_N: Tensor) -> dict[str, Tensor]:
    """Tokens cut at the lower bound, at the upper one, and both together; sums over trained rows.

    low_N, high_N: by ``below`` and ``above``, which do not count rounding.
    """
    low, high = ((cut_N & mask_N).sum().float() for cut_N in (low_N, high_N))
    return {"actor/clip_fraction": low + high, "actor/clip_fraction_low": low, "actor/clip_fraction_high": high}
