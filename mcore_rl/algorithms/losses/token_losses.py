"""The result of a policy loss for each token, and the ratio that most policy losses use."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

from torch import Tensor

from mcore_rl.ground.types import LossInputs

MAX_LOG_RATIO = 20.0  # a ratio of 5e8: far outside every clip range, and no overflow in float32
# Float32 log-probs of up to 32 nats are 2e-6 apart, and two passes over one token differ by a few of these.
ROUNDING = 1e-5


@dataclass(frozen=True, kw_only=True)
class TokenLosses:
    """What a policy loss returns.

    loss_N: the loss of each row, with gradient; the values of untrained rows have no meaning.
    metrics: sums over this rank's trained rows, without gradient; ``actor/NAME`` is reported per trained token.
    """

    loss_N: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)


def trained_rows(inputs: LossInputs) -> LossInputs:
    """``inputs`` with zeros in every untrained row, whose values thus cannot reach a loss or a gradient."""
    zeroed: dict[str, Tensor] = {}
    for each in fields(inputs):
        value = getattr(inputs, each.name)
        if isinstance(value, Tensor) and value.is_floating_point():
            zeroed[each.name] = value.masked_fill(~inputs.mask_N, 0)
    extra_N = {name: x_N.masked_fill(~inputs.mask_N, 0) for name, x_N in inputs.extra_N.items()}
    return replace(inputs, extra_N=extra_N, **zeroed)  # type: ignore[arg-type]


def log_ratios(inputs: LossInputs) -> Tensor:
    """``log p - log p_old`` of trained rows, clamped to +-``MAX_LOG_RATIO``; 0 in other rows; [N], with gradient."""
    assert inputs.logprobs_N is not None and inputs.old_logprobs_N is not None, "a ratio needs old log-probs"
    change_N = (inputs.logprobs_N - inputs.old_logprobs_N).masked_fill(~inputs.mask_N, 0)
    return change_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def masked_sum(x_N: Tensor, mask_N: Tensor) -> Tensor:
    """The sum over trained rows, scalar; connected to the graph of ``x_N`` even if no row is trained."""
    return x_N.masked_fill(~mask_N, 0).sum()


def below(ratio_N: Tensor, bound: float) -> Tensor:
    """Bool [N]: ratios less than ``bound`` by more than rounding; a ratio equal to the bound is not clipped."""
    return ratio_N < bound * (1 - ROUNDING)


def above(ratio_N: Tensor, bound: float) -> Tensor:
    """Bool [N]: ratios that exceed ``bound`` by more than rounding."""
    return ratio_N > bound * (1 + ROUNDING)


def clip_metrics(low_N: Tensor, high_N: Tensor, mask_N: Tensor) -> dict[str, Tensor]:
    """The numbers of trained tokens clipped at the lower bound, at the upper bound, and at either.

    low_N, high_N: bool, from ``below`` and ``above``, which do not count rounding.
    """
    low, high = ((cut_N & mask_N).sum().float() for cut_N in (low_N, high_N))
    return {"actor/clip_fraction": low + high, "actor/clip_fraction_low": low, "actor/clip_fraction_high": high}
