"""The loss of an implicit process reward model: cross entropy on outcomes of responses (arXiv:2502.01456).

Every number of a response is computed from sums over its whole sequence, which all context ranks have; each rank adds
its share (``LossInputs.own_shares``), so that the ranks' sum has it once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from mcore_rl.algorithms.losses.token_losses import trained_rows
from mcore_rl.algorithms.role_loss import RoleLoss, UpdateSums
from mcore_rl.config.algorithms.prime import ProcessRewardConfig
from mcore_rl.config.stages import OUTCOME
from mcore_rl.ground.types import LossInputs, LossSums

_RIGHT = "right"
_COUNT = "count"


@dataclass(frozen=True)
class OutcomeLoss(RoleLoss):
    """``-o log sigma(R) - (1 - o) log sigma(-R)`` of each response, summed; ``R = beta * sum of (log p - log p_ref)``.

    The engine divides by the number of responses.  ``o``, in [0, 1], is ``outcome_S`` of the batch's ``extra_S``.
    A response without a trained token is left out.
    """

    config: ProcessRewardConfig

    def __call__(self, inputs: LossInputs) -> LossSums:
        """The sums over this rank's shares; without a trained row, a zero that is connected to the graph."""
        inputs = trained_rows(inputs)
        assert inputs.logprobs_N is not None, "a language model's forward pass makes log-probs"
        rewards_S = self.config.beta * inputs.sequence_sums(
            inputs.logprobs_N - inputs.extra_N["process_ref_logprobs_N"]
        )
        there_S = inputs.sequence_sums(inputs.mask_N.to(rewards_S.dtype)) > 0
        share_S = inputs.own_shares(rewards_S.dtype) * there_S
        outcome_S = torch.zeros_like(rewards_S)  # an empty microbatch has sums, of nothing
        outcome_S[: inputs.num_sequences] = inputs.extra_S[OUTCOME].to(rewards_S.dtype)
        loss_S = binary_cross_entropy_with_logits(rewards_S, outcome_S, reduction="none")
        with torch.no_grad():
            right_S = ((rewards_S > 0) == (outcome_S > 0.5)).to(rewards_S.dtype)
            metrics = {_RIGHT: (right_S * share_S).sum(), _COUNT: share_S.sum()}
        return LossSums(total=(loss_S * share_S).sum(), metrics=metrics)

    def metrics(self, sums: UpdateSums) -> dict[str, float]:
        """The share of responses whose outcome it tells, by the weights before the update of their minibatch."""
        totals = sums.totals()
        return {"process_reward/accuracy": totals[_RIGHT] / totals[_COUNT]}


def outcome_loss(config: ProcessRewardConfig) -> OutcomeLoss:
    """The loss of a process reward model, which can be pickled."""
    return OutcomeLoss(config)
