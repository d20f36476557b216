r"""Mathematics by value, with math-verify (Hugging Face): ``\boxed{\frac12}`` is 0.5.

Its limits by SIGALRM are off: they work in a main thread only and do not end what hangs in C.  The scorer's limit does.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

from mcore_rl.config.reward import RewardConfig
from mcore_rl.rewards.score import RewardRequest, Score


@cache
def _math_verify() -> Any:
    """math-verify, which takes 0.3 s to import, once it is needed."""
    import math_verify as library

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of its limits being off
    return library


def grade_math(request: RewardRequest, config: RewardConfig) -> Score:
    r"""1 where the response's answer equals the ground truth as an expression, else 0.

    The answer is what stands in ``\boxed{}``, else the last formula or number.  ground_truth: LaTeX or a number, alone
    or in a solution with ``\boxed{}``.  parts: boxed, 1 where the response has a box.
    ValueError: the ground truth says nothing that can be compared.
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
    # math-verify lists the expressions it found and, last, the text they stand in.
    written = "".join(str(answer[-1]).split()) if answer else None
    parts = {"boxed": float("\\boxed{" in request.response)}
    return Score(float(right), parts, correct=float(right), answer=written)
