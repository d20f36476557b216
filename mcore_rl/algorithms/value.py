"""The critic's loss: squared error to the returns, clipped around the old values (arXiv:1707.06347; OpenAI baselines).

Every metric is a sum over trained tokens, as in ``policy.py``: ``critic/value_loss``, ``critic/vf_clip_fraction``,
``critic/values``, and the inputs of ``explained_variance``: ``critic/returns``, ``critic/returns_squared``,
``critic/errors``, ``critic/errors_squared``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from mcore_rl.algorithms.losses.aggregation import sum_token_losses
from mcore_rl.algorithms.losses.token_losses import ROUNDING, masked_sum, trained_rows
from mcore_rl.algorithms.role_loss import RoleLoss, UpdateSums
from mcore_rl.config.roles import CriticConfig
from mcore_rl.ground.types import LossInputs, LossSums


@dataclass(frozen=True)
class CriticLoss(RoleLoss):
    """``aggregate(0.5 * max((V - R)^2, (clip(V, V_old - range, V_old + range) - R)^2))`` as a sum; see the module."""

    config: CriticConfig

    def __call__(self, inputs: LossInputs) -> LossSums:
        """The sums over this rank's rows.  Needs returns, and old values if ``cliprange_value`` is not 0."""
        inputs = trained_rows(inputs)
        limit = self.config.cliprange_value
        assert inputs.values_N is not None and inputs.returns_N is not None, "a critic's loss needs values and returns"
        errors_N = inputs.values_N - inputs.returns_N
        loss_N = 0.5 * errors_N.square()
        clipped_N = torch.zeros_like(inputs.mask_N)
        if limit > 0:
            assert inputs.old_values_N is not None, "value clipping needs the old values"
            moved_N = (inputs.values_N - inputs.old_values_N).clamp(-limit, limit)
            held_N = 0.5 * (inputs.old_values_N + moved_N - inputs.returns_N).square()
            beyond_N = (inputs.values_N - inputs.old_values_N).abs() > limit * (1 + ROUNDING)
            clipped_N = beyond_N & (held_N > loss_N)  # within the limit the two differ by rounding
            loss_N = torch.maximum(loss_N, held_N)
        per_token = {
            "critic/value_loss": loss_N,
            "critic/vf_clip_fraction": clipped_N.to(loss_N.dtype),
            "critic/values": inputs.values_N,
            "critic/returns": inputs.returns_N,
            "critic/returns_squared": inputs.returns_N.square(),
            "critic/errors": errors_N,
            "critic/errors_squared": errors_N.square(),
        }
        metrics = {name: masked_sum(x_N.detach(), inputs.mask_N) for name, x_N in per_token.items()}
        return LossSums(total=sum_token_losses(loss_N, inputs, self.config.loss_agg_mode), metrics=metrics)

    def metrics(self, sums: UpdateSums) -> dict[str, float]:
        """The explained variance and the clipped fraction, see ``RoleLoss.metrics``."""
        clipped = sums.mean("critic/vf_clip_fraction")
        assert clipped is not None
        explained = explained_variance(sums.totals(), sum(sums.trained))
        return {"value/explained_variance": explained, "critic/clip_fraction": clipped}


def value_loss(config: CriticConfig) -> CriticLoss:
    """The critic's loss, which can be pickled."""
    return CriticLoss(config)


def explained_variance(metrics: Mapping[str, float], num_tokens: float) -> float:
    """``1 - Var(R - V) / Var(R)`` from the global sums over ``num_tokens`` trained tokens.

    1 is a perfect critic, 0 no better than a constant, and less is worse.  0 also if the returns do not vary, or if
    nothing is trained.
    """
    if num_tokens == 0:
        return 0.0

    def variance(name: str) -> float:
        return metrics[f"critic/{name}_squared"] / num_tokens - (metrics[f"critic/{name}"] / num_tokens) ** 2

    returns = variance("returns")
    return 1 - variance("errors") / returns if returns > 0 else 0.0
