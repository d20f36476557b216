"""Generated word problems (``data/arithmetic.py``): GSM8K's grading, and what the sums on the way say.

A right answer under a false sum, ``4 + 4 = 9`` and ``#### 9``, does not follow from it: it gets half of the reward, so
that a model learns to show how it came to its answer.  Whether an answer is correct is as in GSM8K.
"""

from __future__ import annotations

import re
from dataclasses import replace
from operator import add, mul, sub

from mcore_rl.config.reward import RewardConfig
from mcore_rl.rewards.gsm8k import grade_gsm8k
from mcore_rl.rewards.score import RewardRequest, Score

OPERATORS = {"+": add, "-": sub, "*": mul}
FALSE_SUM_SHARE = 0.5
_SUM = re.compile(r"(?<!\d)(\d{1,9}) ?([-+*]) ?(\d{1,9}) ?= ?(-?\d{1,18})(?!\d)")


def false_sums(text: str) -> list[str]:
    """Each ``a + b = c``, also with ``-`` or ``*``, that does not hold."""
    return [each[0] for each in _SUM.finditer(text) if OPERATORS[each[2]](int(each[1]), int(each[3])) != int(each[4])]


def grade_arithmetic(request: RewardRequest, config: RewardConfig) -> Score:
    """The score of ``grade_gsm8k``; half of it for a right answer with a false sum.

    parts: beside GSM8K's, ``sums``, 1 if no sum of the response is false, else 0.
    """
    score = grade_gsm8k(request, config)
    wrong = bool(false_sums(request.response))
    value = score.value * FALSE_SUM_SHARE if score.correct and wrong else score.value
    return replace(score, value=value, parts=score.parts | {"sums": float(not wrong)})
