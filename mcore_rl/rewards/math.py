r"""Mathematics by value, with math-verify (Hugging Face): ``\boxed{\frac12}`` is 0.5.

Its own time limits are off: they use SIGALRM, which works in a main thread only and does not end code that hangs in C.
The scorer's limit does.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

from mcore_rl.config.reward import RewardConfig
from mcore_rl.rewards.score import RewardRequest, Score


@cache
def _math_verify() -> Any:
    """The module math-verify, imported at the first use because that takes 0.3 s."""
    import math_verify as library

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of its limits being off
    return library


def grade_math(request: RewardRequest, config: RewardConfig) -> Score:
    r"""The score is 1 if the response's answer equals the ground truth as an expression, else 0.

    The answer is the content of ``\boxed{}``, else the last formula or number.  The ground truth is LaTeX or a number,
    alone or in a solution with ``\boxed{}``.  parts: ``boxed``, 1 if the response has a box, else 0.

    ValueError: the ground truth has no expression.
    """
    library = _math_verify()
    gold_text = str(request.ground_truth)
    if "\\boxed" not in gold_text:
        gold_text = f"\\boxed{{{gold_text}}}"
    gold = library.parse(gold_text, parsing_timeout=None)
    if not gold:
        raise ValueError(
            f"ground truth {gold_text[:80]!r} is no formula. Correct reward_model.ground_truth of that row"
        )
    answer = library.parse(request.response, parsing_timeout=None)
    right = bool(library.verify(gold, answer, timeout_seconds=None))
    # math-verify returns the expressions and, last, the text in which they were.
    written = "".join(str(answer[-1]).split()) if answer else None
    parts = {"boxed": float("\\boxed{" in request.response)}
    return Score(float(right), parts, correct=float(right), answer=written)
