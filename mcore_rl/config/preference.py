"""Losses that learn from preferences: one row each, and the keys that they read.

Imports no torch.  The functions are in ``algorithms/preference_losses.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from enum import Enum
from typing import Annotated, Any

from mcore_rl.config.bounds import Interval, NonNegativeFloat, PositiveFloat
from mcore_rl.ground.errors import Violation


class PreferenceLoss(Enum):
    """Losses of preferences, by the names of their papers; ``ROWS`` has what each is."""

    dpo = "dpo"
    ipo = "ipo"
    hinge = "hinge"
    simpo = "simpo"
    orpo = "orpo"
    kto = "kto"


@dataclass(frozen=True, kw_only=True)
class PreferenceRow:
    """What a loss of preferences is.

    formula: for docs/preferences.md, in its notation.
    paper: the source of the formula.
    beta, sft_coef: values of the keys of these names if they are not written.
    reference: whether it reads the log-probs of the reference.
    pairs: whether it looks at both responses of a pair at once; False: at each response and its label.
    reads: the keys that it reads beside ``loss`` and ``beta``.
    margins: whether it subtracts the margins of the data's pairs.
    """

    formula: str
    paper: str
    beta: float
    sft_coef: float = 0.0
    reference: bool = True
    pairs: bool = True
    reads: frozenset[str] = frozenset({"sft_coef"})
    margins: bool = False


_OF_REWARDS = frozenset({"sft_coef", "length_normalized"})

ROWS: dict[PreferenceLoss, PreferenceRow] = {
    PreferenceLoss.dpo: PreferenceRow(
        formula="`-(1 - s) log sigma(h) - s log sigma(-h)`, `h = beta (d_w - d_l) - m`",
        paper="arXiv:2305.18290, eq. 7; `s` (label_smoothing): cDPO; `m` (margins): arXiv:2402.10571",
        beta=0.1,
        reads=_OF_REWARDS | {"label_smoothing"},
        margins=True,
    ),
    PreferenceLoss.ipo: PreferenceRow(
        formula="`(d_w - d_l - 1 / (2 beta))^2`",
        paper="arXiv:2310.12036, eq. 17, whose tau is beta",
        beta=0.1,
        reads=_OF_REWARDS,
    ),
    PreferenceLoss.hinge: PreferenceRow(
        formula="`max(0, 1 - h)`, `h` as in `dpo`",
        paper="arXiv:2309.06657, section 3.3 (SLiC, arXiv:2305.10425, with a reference)",
        beta=0.1,
        reads=_OF_REWARDS,
        margins=True,
    ),
    PreferenceLoss.simpo: PreferenceRow(
        formula="as `dpo`, `h = beta (log p_w / |w| - log p_l / |l|) - gamma - m`",
        paper="arXiv:2405.14734, eq. 6",
        beta=2.0,
        reference=False,
        reads=frozenset({"sft_coef", "gamma", "label_smoothing"}),
        margins=True,
    ),
    PreferenceLoss.orpo: PreferenceRow(
        formula="`-c log p_w / |w| - beta log sigma(log odds_w - log odds_l)`, odds of `exp(log p / length)`",
        paper="arXiv:2403.07691, eq. 6 and 7, whose lambda is beta; `c` (sft_coef) is 1 there",
        beta=0.1,
        sft_coef=1.0,
        reference=False,
    ),
    PreferenceLoss.kto: PreferenceRow(
        formula="`w (1 - sigma(beta d - z))` of a desirable response, `u (1 - sigma(z - beta d))` of another",
        paper="arXiv:2402.01306, eq. 8; `w`, `u`: desirable_weight, undesirable_weight",
        beta=0.1,
        pairs=False,
        reads=frozenset({"desirable_weight", "undesirable_weight"}),
    ),
}


@dataclass(kw_only=True)
class PreferenceConfig:
    """How a policy learns from answers of which some are preferred (docs/preferences.md).

    loss: see ``PreferenceLoss``.
    beta: how much a log-ratio counts (ipo: tau, orpo: lambda); None: the loss's own, 0.1, or 2 with simpo.
    label_smoothing: the share of labels that are taken for wrong (cDPO).
    length_normalized: log-ratios are means over the tokens of a response, not sums (Tulu 3, arXiv:2411.15124).
    gamma: simpo's target margin; its paper tunes gamma / beta between 0.3 and 1.6.
    sft_coef: weight of the preferred answer's cross entropy per token; None: 1 with orpo, else 0.
    desirable_weight, undesirable_weight: what kto's loss of either kind of response is multiplied by.
    """

    loss: PreferenceLoss = PreferenceLoss.dpo
    beta: PositiveFloat | None = None
    label_smoothing: Annotated[float, Interval("[0, 0.5)")] = 0.0
    length_normalized: bool = False
    gamma: NonNegativeFloat = 1.0
    sft_coef: NonNegativeFloat | None = None
    desirable_weight: PositiveFloat = 1.0
    undesirable_weight: PositiveFloat = 1.0

    @property
    def row(self) -> PreferenceRow:
        """What its loss is."""
        return ROWS[self.loss]

    @property
    def strength(self) -> float:
        """``beta``, written or the loss's own."""
        return self.row.beta if self.beta is None else self.beta

    @property
    def sft_weight(self) -> float:
        """``sft_coef``, written or the loss's own."""
        return self.row.sft_coef if self.sft_coef is None else self.sft_coef


def parted_pairs(microbatch_sequences: int | None) -> Iterator[Violation]:
    """Microbatches of the actor that no pair fits into."""
    if microbatch_sequences == 1:
        problem = "parts the two sequences of a pair"
        yield Violation("actor.microbatch_sequences", 1, problem, "Write 2 or more, or actor.microbatch_tokens")


def preference_violations(config: PreferenceConfig, prefix: str) -> Iterator[Violation]:
    """Settings that the loss does not read.  prefix: of the keys, with its dot."""
    plain: dict[str, Any] = vars(PreferenceConfig(loss=config.loss))
    read = config.row.reads | {"loss", "beta"}
    for name in (each.name for each in fields(PreferenceConfig)):
        value = getattr(config, name)
        if name not in read and value != plain[name]:
            reading = [loss.value for loss, row in ROWS.items() if name in row.reads]
            remedy = f"Leave it out, or write {prefix}loss={' or '.join(reading)}"
            yield Violation(f"{prefix}{name}", value, f"is not read by {config.loss.value}", remedy)
