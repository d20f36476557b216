"""Losses of reward models: one row each, and the keys that they read.

Imports no torch.  The functions are in ``algorithms/reward_loss.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from math import inf

from mcore_rl.config.bounds import NonNegativeFloat
from mcore_rl.errors import Violation


class RewardLoss(Enum):
    """What a score is fitted to: the better one of two answers, a number, or an outcome; ``ROWS`` has what each is."""

    bradley_terry = "bradley_terry"
    regression = "regression"
    bce = "bce"


@dataclass(frozen=True, kw_only=True)
class RewardLossRow:
    """What a loss of reward models is.

    formula: for docs/reward_training.md, in its notation.
    paper: the source of the formula.
    pairs: whether it looks at both answers of a pair; False: at one answer and its label.
    labels: the least and the greatest label that it reads.
    probabilities: whether its scores are log-odds, of a pair or of an outcome, so that they can be calibrated.
    """

    formula: str
    paper: str
    pairs: bool = False
    labels: tuple[float, float] = (-inf, inf)
    probabilities: bool = True


ROWS: dict[RewardLoss, RewardLossRow] = {
    RewardLoss.bradley_terry: RewardLossRow(
        formula="`-log sigma(r_w - r_l - m) + c (r_w + r_l)^2`",
        paper="arXiv:2203.02155, eq. 1; `m` (margins): arXiv:2307.09288, eq. 2; `c` (centering_coef): arXiv:2312.09244",
        pairs=True,
    ),
    RewardLoss.regression: RewardLossRow(
        formula="`(r - y)^2`",
        paper="arXiv:2406.08673",
        probabilities=False,
    ),
    RewardLoss.bce: RewardLossRow(
        formula="`-y log sigma(r) - (1 - y) log sigma(-r)`",
        paper="arXiv:2312.08935, eq. 1",
        labels=(0.0, 1.0),
    ),
}


@dataclass(kw_only=True)
class RewardLossConfig:
    """What a reward model is fitted to (docs/reward_training.md).

    loss: see ``RewardLoss``.
    centering_coef: with bradley_terry, weight of the squared sum of a pair's scores, which holds scores near 0; the
    paper has 0.01.
    """

    loss: RewardLoss = RewardLoss.bradley_terry
    centering_coef: NonNegativeFloat = 0.0

    @property
    def row(self) -> RewardLossRow:
        """What its loss is."""
        return ROWS[self.loss]


def reward_loss_violations(config: RewardLossConfig, prefix: str) -> Iterator[Violation]:
    """Settings that the loss does not read.  prefix: of the keys, with its dot."""
    if config.centering_coef and not config.row.pairs:
        remedy = f"Leave it out, or write {prefix}loss=bradley_terry"
        yield Violation(f"{prefix}centering_coef", config.centering_coef, f"is not read by {config.loss.value}", remedy)
