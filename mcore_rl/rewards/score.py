"""What graders are given and what they answer; plain records that travel between processes by pickle."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class RewardRequest:
    """One episode to grade; one answer to one prompt is the plain case.

    key: (prompt id, index of the sample), for messages.
    data_source: says who grades.
    response: what the model said last, as text without special tokens.
    ground_truth: ``reward_model.ground_truth`` of the row; what it must be is said by the grader.
    extra_info: the row's column of that name and its unknown columns.
    num_tokens: of all that follows the prompt.
    max_tokens: that could have followed it.
    truncated: it was cut off there.
    messages: the whole conversation as {role, content}, the prompt's messages first; empty where it is not known.
    num_turns: the model's turns that are trained, which ``Score.turn_rewards`` may reward one by one.
    """

    key: tuple[str, int]
    data_source: str
    response: str
    ground_truth: Any
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    num_tokens: int = 0
    max_tokens: int = 0
    truncated: bool = False
    messages: Sequence[Mapping[str, Any]] = ()
    num_turns: int = 1


@dataclass(frozen=True)
class Score:
    """What an episode is worth.

    value: the reward of the whole, always finite.
    parts: named pieces of it, or facts about it, for metrics.
    correct: 1 or 0 (or a share) where the grader knows whether the answer is right, else None.
    error: why there is no grade and ``value`` is ``reward.error_score``: a kind (see ``ERROR_KINDS``), a colon, and
        what happened; None where all is well.
    answer: what the grader took as the answer, in one spelling for one value where it can, for majority votes; None
        where the response has none or the grader looks for none.
    turn_rewards: what single turns of the model earned, beside ``value`` and finite: one number for each of
        ``RewardRequest.num_turns``, or none at all.
    """

    value: float
    parts: dict[str, float] = field(default_factory=dict)
    correct: float | None = None
    error: str | None = None
    answer: str | None = None
    turn_rewards: tuple[float, ...] = ()

    @property
    def total(self) -> float:
        """``value`` and the rewards of the turns."""
        return math.fsum([self.value, *self.turn_rewards]) if self.turn_rewards else self.value

    @property
    def overlong(self) -> float:
        """The part of ``value`` that punishes long responses, 0 or negative (``reward.overlong``)."""
        return self.parts.get("overlong", 0.0)

    def named(self, name: str) -> float | None:
        """The part called ``name``.

        Where none is: ``acc`` is whether the answer is right, ``score`` the value without the overlong penalty, and any
        other None.
        """
        return self.parts.get(name, {"acc": self.correct, "score": self.value - self.overlong}.get(name))


# raised: the grader raised.  not_a_number: it answered something else, nan or infinity.  timeout: it took longer than
# ``reward.timeout_s``.  died: its process ended.
ERROR_KINDS = ("raised", "not_a_number", "timeout", "died")


class NotANumberError(ValueError):
    """A grader answered something else than a finite number."""


def finite(value: object, what: str) -> float:
    """``value`` as a float; NotANumberError, naming ``what``, where it is no number, nan or infinity."""
    if not isinstance(value, str | bytes) and hasattr(value, "__float__"):
        number = float(value)
        if math.isfinite(number):
            return number
    raise NotANumberError(f"{what} is {repr(value)[:80]}, not a finite number")
