"""Word problems with ``#### number`` solutions (GSM8K, arXiv:2110.14168).

strict: the answer is the number after the last ``####``.  flexible: it is the last number of the response.  Both
compare by value, without commas, dollar signs and a final period: 1,000.0 is 1000.
"""

from __future__ import annotations

import re
from decimal import Decimal

from mcore_rl.config.reward import AnswerMethod, RewardConfig
from mcore_rl.rewards.numbers import NUMBER, as_number, last_number, number_value, plain
from mcore_rl.rewards.score import RewardRequest, Score

_MARKED = re.compile(rf"####[ \t]*+({NUMBER})")


def marked_answer(text: str) -> Decimal | None:
    """The number after the last ``####`` that has a number after it on its line; None if there is none."""
    answers = _MARKED.findall(text)
    return number_value(answers[-1]) if answers else None


def gold_number(ground_truth: object) -> Decimal:
    """The value of a ground truth, ``18`` or a whole ``... #### 18`` solution.  ValueError: it is neither."""
    text = str(ground_truth)
    gold = as_number(text.rpartition("####")[2])
    if gold is None:
        raise ValueError(f"ground truth {text[:80]!r} is not a number. Correct reward_model.ground_truth of that row")
    return gold


def grade_gsm8k(request: RewardRequest, config: RewardConfig) -> Score:
    """``gsm8k.score`` for the right number, ``gsm8k.format_score`` for a wrong one in the right form, else 0.

    parts: ``format``, 1 if the response has a number in the form that the method requires, else 0.
    """
    gold = gold_number(request.ground_truth)
    strict = config.gsm8k.method is AnswerMethod.strict
    answer = marked_answer(request.response) if strict else last_number(request.response)
    if answer is None:
        return Score(0.0, {"format": 0.0}, correct=0.0)
    right = answer == gold
    value = config.gsm8k.score if right else config.gsm8k.format_score
    return Score(value, {"format": 1.0}, correct=float(right), answer=plain(answer))
