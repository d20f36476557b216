r"""Geometry with pictures (``hiyouga/geometry3k``): a boxed answer behind a thought, as verl's ``geo3k.py`` scores it.

The answer is nine tenths of the score, and the form ``<think>...</think>...\boxed{...}`` the tenth that is left.
"""

from __future__ import annotations

from mcore_rl.config.reward import RewardConfig
from mcore_rl.rewards.math import boxed, grade_math
from mcore_rl.rewards.score import RewardRequest, Score

FORMAT_SHARE = 0.1


def is_in_form(response: str) -> bool:
    r"""Whether verl's ``<think>.*</think>.*\\boxed\{.*\}.*`` is the whole response; in linear time."""
    if not response.startswith("<think>"):
        return False
    place = len("<think>")
    for part in ("</think>", "\\boxed{", "}"):
        start = response.find(part, place)
        if start < 0:
            return False
        place = start + len(part)
    return True


def grade_geo3k(request: RewardRequest, config: RewardConfig) -> Score:
    """The score is 0.9 for a right answer in a box (``grade_math``), and 0.1 for the form.

    parts: ``format``, 1 if the response has the form, else 0.  ValueError: the ground truth is empty.
    """
    in_form = float(is_in_form(request.response))
    parts = {"format": in_form}
    if boxed(request.response) is None:  # which grade_math would read an answer of all the same
        return Score(FORMAT_SHARE * in_form, parts, correct=0.0)
    graded = grade_math(request, config)
    value = (1 - FORMAT_SHARE) * graded.value + FORMAT_SHARE * in_form
    return Score(value, parts, correct=graded.correct, answer=graded.answer)
