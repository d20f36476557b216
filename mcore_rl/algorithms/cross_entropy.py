"""Supervised fine-tuning: the cross entropy of the trained tokens."""

from __future__ import annotations

from dataclasses import dataclass

from mcore_rl.algorithms.losses.token_losses import masked_sum
from mcore_rl.algorithms.role_loss import RoleLoss
from mcore_rl.config.roles import RoleConfig
from mcore_rl.ground.types import LossInputs, LossSums


@dataclass(frozen=True)
class CrossEntropy(RoleLoss):
    """``-sum(log p(token))`` over trained tokens, nats; the engine divides by their number.  Can be pickled."""

    def __call__(self, inputs: LossInputs) -> LossSums:
        """The sum over this rank's rows; without a trained row, a zero that is connected to the graph."""
        assert inputs.logprobs_N is not None, "a language model's forward pass makes log-probs"
        return LossSums(total=-masked_sum(inputs.logprobs_N, inputs.mask_N), metrics={})


def cross_entropy(config: RoleConfig) -> CrossEntropy:
    """The loss of fine-tuning, which has no settings."""
    return CrossEntropy()
