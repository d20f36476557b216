"""Losses of reward models: scores of whole answers in, one loss per pair or answer out, and how far scores are right.

Of an answer whose steps have labels, the value at each trained token is the score of a step.  Else the score of an
answer is the value at its only trained token (``data/scored_answers.py``), so the sum over its trained
tokens; an answer without one has the score 0.  Every number of a pair is computed from two whole sequences, which all
context ranks have; each rank adds its share of it (``LossInputs.own_shares``), so that the ranks' sum has it once.

Validation calls the same functions on the controller.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from mcore_rl.algorithms.losses.token_losses import masked_sum, trained_rows
from mcore_rl.algorithms.preference import LABEL, MARGIN, WEIGHT, wins
from mcore_rl.algorithms.role_loss import RoleLoss
from mcore_rl.config.reward_training import RewardLoss, RewardLossConfig, TrainedRewardConfig
from mcore_rl.ground.types import LossInputs, LossSums

STEP_LABEL_T, STEP_LABEL_N = "step_label_T", "step_label_N"  # of a batch, and of what a loss sees of it
BINS = 10  # of a calibration error, of equal width from 0 to 1


@dataclass(frozen=True)
class ScoresLoss(RoleLoss):
    """The sum of the losses of pairs, or of answers and their labels; the engine divides by their number.

    Reads values, and of ``extra_S``, where they are there, ``margin_S``, ``weight_S`` (both the first sequence's of a
    pair) and ``label_S``; a loss of pairs also ``pairs_P2``.  Its metrics are sums, as ``score_sums`` has them.
    Where ``extra_N`` has ``step_label_N``, every trained row is the score of a step, and losses and metrics are of
    steps (arXiv:2312.08935, eq. 2), each times its sequence's weight.
    """

    config: RewardLossConfig

    @property
    def with_pairs(self) -> bool:
        """Whether it looks at both sequences of a pair."""
        return self.config.row.pairs

    def __call__(self, inputs: LossInputs) -> LossSums:
        """The sums over this rank's shares; without a pair, a zero that is connected to the graph."""
        inputs = trained_rows(inputs)
        assert inputs.values_N is not None, "a reward model's forward pass makes values"
        if STEP_LABEL_N in inputs.extra_N:
            return self._of_steps(inputs)
        score_S = inputs.sequence_sums(inputs.values_N)
        share_S = inputs.own_shares(inputs.values_N.dtype)
        extra_S = {name: x_S.to(score_S.dtype) for name, x_S in inputs.extra_S.items()}
        first_S = torch.arange(inputs.num_sequences, device=score_S.device)
        second_S = None
        if self.with_pairs:
            assert inputs.pairs_P2 is not None, "a loss of pairs needs pairs"
            first_S, second_S = inputs.pairs_P2.unbind(1)
        loss_U = losses(score_S, first_S, second_S, extra_S, self.config)
        metrics = score_sums(score_S.detach(), first_S, second_S, extra_S, self.config, share_S)
        return LossSums(total=(loss_U * share_S[first_S]).sum(), metrics=metrics)

    def _of_steps(self, inputs: LossInputs) -> LossSums:
        assert inputs.values_N is not None
        value_N = inputs.values_N
        row_N = torch.arange(len(inputs.values_N), device=inputs.values_N.device)
        extra_N = {LABEL: inputs.extra_N[STEP_LABEL_N].to(value_N.dtype)}
        if WEIGHT in inputs.extra_S and inputs.num_sequences:  # an empty microbatch has padding alone
            extra_N[WEIGHT] = inputs.expand(inputs.extra_S[WEIGHT].to(value_N.dtype))
        loss_N = losses(value_N, row_N, None, extra_N, self.config)
        metrics = score_sums(value_N.detach(), row_N, None, extra_N, self.config, inputs.mask_N.to(value_N.dtype))
        return LossSums(total=masked_sum(loss_N, inputs.mask_N), metrics=metrics)


def scores_loss(config: TrainedRewardConfig) -> ScoresLoss:
    """The loss of a reward model."""
    return ScoresLoss(config.reward)


def losses(
    score_S: Tensor, first_U: Tensor, second_U: Tensor | None, extra_S: Mapping[str, Tensor], config: RewardLossConfig
) -> Tensor:
    """The loss of each pair, or of each answer, [U], with gradient and times its weight.

    first_U, second_U: numbers of the preferred answer of each pair, and of the other; of answers by themselves, their
    numbers and None.  extra_S: ``margin_S`` and ``weight_S``, if they are not 0 and 1, and ``label_S`` of answers.
    The formulas and their papers are in ``config/reward_training.py``.
    """
    chosen_U = score_S[first_U]
    nothing_U = torch.zeros_like(score_S[first_U])
    match config.loss:
        case RewardLoss.bradley_terry:
            assert second_U is not None, "it compares the answers of pairs"
            rejected_U = score_S[second_U]
            margin_U = extra_S[MARGIN][first_U] if MARGIN in extra_S else nothing_U
            loss_U = -logsigmoid(chosen_U - rejected_U - margin_U)
            if config.centering_coef:
                loss_U = loss_U + config.centering_coef * (chosen_U + rejected_U).square()
        case RewardLoss.regression:
            loss_U = (chosen_U - extra_S[LABEL][first_U]).square()
        case RewardLoss.bce:
            label_U = extra_S[LABEL][first_U]
            loss_U = -label_U * logsigmoid(chosen_U) - (1 - label_U) * logsigmoid(-chosen_U)
    return loss_U * extra_S[WEIGHT][first_U] if WEIGHT in extra_S else loss_U


@torch.no_grad()
def score_sums(
    score_S: Tensor,
    first_U: Tensor,
    second_U: Tensor | None,
    extra_S: Mapping[str, Tensor],
    config: RewardLossConfig,
    share_S: Tensor,
) -> dict[str, Tensor]:
    """What is counted of scores, as sums over pairs or answers: arguments as of ``losses``.  share_S: of each sequence.

    ``count``: pairs or answers.  ``accuracy``: pairs whose preferred answer has the higher score, or outcomes that the
    sign of the score says; equal ones and scores of 0 count half.  Of pairs ``chosen_score`` and ``rejected_score``, of
    answers ``score``.
    """
    share_U = share_S[first_U]
    own_U = score_S[first_U]
    sums = {"count": share_U.sum()}
    if second_U is not None:
        other_U = score_S[second_U]
        sums["chosen_score"] = (own_U * share_U).sum()
        sums["rejected_score"] = (other_U * share_S[second_U]).sum()
        return sums | {"accuracy": (wins(own_U, other_U) * share_U).sum()}
    sums["score"] = (own_U * share_U).sum()
    if config.row.probabilities:
        right_U = wins(own_U * (extra_S[LABEL][first_U] - 0.5), torch.zeros_like(own_U))
        sums["accuracy"] = (right_U * share_U).sum()
    return sums


def calibration_error(probability_N: Tensor, outcome_N: Tensor) -> float:
    """The expected calibration error (arXiv:1706.04599, eq. 5): how far probabilities are from shares of outcomes.

    The mean over N of the distance, within each of ``BINS`` bins of equal width, between the mean probability and the
    mean outcome.  probability_N: in [0, 1].  outcome_N: in [0, 1].
    """
    bin_N = (probability_N * BINS).long().clamp(max=BINS - 1)
    gaps_B = torch.zeros(BINS, dtype=torch.float64).index_add(0, bin_N, (probability_N - outcome_N).double())
    return float(gaps_B.abs().sum() / len(probability_N))


def pair_calibration_error(difference_P: Tensor) -> float:
    """``calibration_error`` of ``sigma(r_w - r_l)``, [P], as the probability that the first answer is preferred.

    Nothing says which answer of a pair is the first, so each pair counts in both orders.
    """
    both = torch.cat([difference_P, -difference_P])
    return calibration_error(torch.sigmoid(both), (torch.arange(len(both)) < len(difference_P)).double())


def correlation(score_N: Tensor, label_N: Tensor) -> float:
    """Pearson's correlation of scores and labels; 0 where either does not vary."""
    score_N = score_N - score_N.mean()
    label_N = label_N - label_N.mean()
    spread = float(score_N.norm() * label_N.norm())
    return float(score_N @ label_N) / spread if spread else 0.0
