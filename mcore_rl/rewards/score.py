"""The input and the result of graders: plain records that can be sent between processes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class RewardRequest:
    """One episode to grade; the simplest is one answer to one prompt.

    key: (prompt id, index of the sample), for messages.
    data_source: the row's data source, which selects the grader.
    response: the model's last turn, as text without special tokens.
    ground_truth: ``reward_model.ground_truth`` of the row; each grader defines its form.
    extra_info: the row's column of that name and its unknown columns.
    num_tokens: the number of tokens after the prompt.
    max_tokens: the limit of that number.
    truncated: whether the episode was cut off at that limit.
    messages: the whole conversation as {role, content}, the prompt's messages first; empty if it is not known.
    num_turns: the number of trained turns of the model, for which ``Score.turn_rewards`` may give rewards.
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
    """The grade of an episode.

    value: the reward of the whole episode, always finite.
    parts: named parts of the value, or other measurements, for metrics.
    correct: 1 or 0 (or a share) if the grader judges whether the answer is right, else None.
    error: why grading failed, so that ``value`` is ``reward.error_score``: a kind (see ``ERROR_KINDS``), a colon, and
        what happened; None if it did not fail.
    answer: the answer that the grader read, if possible with one spelling per value, for majority votes; None if the
        response has none or the grader reads none.
    turn_rewards: rewards of single turns of the model, in addition to ``value``, finite: one number for each of
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
        """The sum of ``value`` and the rewards of the turns."""
        return math.fsum([self.value, *self.turn_rewards]) if self.turn_rewards else self.value

    @property
    def overlong(self) -> float:
        """The overlong penalty within ``value``, 0 or negative (``reward.overlong``)."""
        return self.parts.get("overlong", 0.0)

    def named(self, name: str) -> float | None:
        """The part called ``name``.

        Without such a part, ``acc`` is ``correct``, ``score`` is the value without the overlong penalty, and any other
        name is None.
        """
        return self.parts.get(name, {"acc": self.correct, "score": self.value - self.overlong}.get(name))


# raised: the grader raised.  not_a_number: it returned something that is not a finite number.  timeout: it took longer
# than ``reward.timeout_s``.  died: its process ended.
ERROR_KINDS = ("raised", "not_a_number", "timeout", "died")


class NotANumberError(ValueError):
    """A grader returned something that is not a finite number."""


def finite(value: object, what: str) -> float:
    """``value`` as a float.  NotANumberError, which names ``what``, if it is not a number, is nan or is infinite."""
    if not isinstance(value, str | bytes) and hasattr(value, "__float__"):
        try:
            number = float(value)
        except OverflowError:  # a whole number of hundreds of digits
            number = math.inf
        if math.isfinite(number):
            return number
    raise NotANumberError(f"{what} is {repr(value)[:80]}, not a finite number")
