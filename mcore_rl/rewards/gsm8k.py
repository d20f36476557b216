"""Word problems with ``#### number`` solutions (GSM8K, arXiv:2110.14168).

strict: the answer is the number that follows the last ``####``, on its line or on the next.  flexible: it is the last
number of the response.  Both compare by value, without commas, dollar signs, Markdown's marks and a final period:
1,000.0 is 1000.  A number that goes on is no answer: of ``18/7``, ``18e3``, ``18 99999`` and ``18 million`` none is 18.
"""

from __future__ import annotations

import re
from collections import deque
from decimal import Decimal

from mcore_rl.config.reward import AnswerMethod, RewardConfig
from mcore_rl.rewards.numbers import GOES_ON, NUMBER, as_number, last_number, number_value, plain
from mcore_rl.rewards.score import RewardRequest, Score

_MARKED = re.compile(rf"####[ \t]*+\n?[ \t]*+[*_`]{{0,3}}+[ \t]*+\+?+({NUMBER})({GOES_ON})?+")


def marked_answer(text: str) -> Decimal | None:
    """The number after the last ``####`` that has one; None if there is none, or if it goes on."""
    last = deque(_MARKED.finditer(text), maxlen=1)
    return None if not last or last[0][2] else number_value(last[0][1])


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
