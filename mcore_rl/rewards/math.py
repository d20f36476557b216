r"""Mathematics by value: ``\boxed{\frac12}`` is 0.5.

The answer is the last box; what stands in it is read into forms (``math_forms``) and compared (``math_comparison``):
numbers exactly, and expressions by math-verify and sympy in a process of their own, with a limit of 5 s an answer
(``symbolic_process``).  Most answers are plain numbers, which need neither.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache

from mcore_rl.config.reward import RewardConfig
from mcore_rl.rewards.math_comparison import MAX_ANSWER, Comparison
from mcore_rl.rewards.math_forms import Expression, Form, inner, read
from mcore_rl.rewards.math_statement import stated
from mcore_rl.rewards.score import RewardRequest, Score
from mcore_rl.rewards.symbolic_process import ALGEBRA

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_BARE_BOX = re.compile(r"[-+]?[0-9A-Za-z.,/]+")
_BETWEEN = re.compile(r"[\s$.]*(?:,|;|,?\s*(?:and|or|\\text\s*\{\s*(?:and|or)\s*\}))[\s$]*", re.IGNORECASE)


def boxed(text: str) -> str | None:
    r"""The content of the last complete ``\boxed{}`` or ``\fbox{}``; None if there is none.

    Boxes with only a comma, *and* or *or* between them are one answer.  Any other words make the last one the answer:
    "\boxed{5}, no, \boxed{6}" is 6.
    """
    contents: list[str] = []
    before = len(text)
    for match in reversed(list(_BOX.finditer(text))):
        end, content = _content(text, match.end())
        if content is None:
            continue
        if contents and not _BETWEEN.fullmatch(text, end, before):
            break
        contents.append(content)
        before = match.start()
    if not contents:
        return None
    return ", ".join(dict.fromkeys(content.strip() for content in reversed(contents)))


def _content(text: str, start: int) -> tuple[int, str | None]:
    """(where the box that opens at ``start`` ends, its content or None)."""
    if not text.startswith("{", start):
        bare = _BARE_BOX.match(text, start)
        return (start, None) if bare is None else (bare.end(), bare[0])
    end = text.find("}", start)
    if end >= 0 and text.find("{", start + 1, end) < 0:
        return end + 1, text[start + 1 : end]
    depth = 0
    for position in range(start, min(len(text), start + MAX_ANSWER)):
        character = text[position]
        if character == "\\":
            continue
        if text[position - 1] != "\\":
            depth += (character == "{") - (character == "}")
        if depth == 0:
            return position + 1, text[start + 1 : position]
    return start, None


_COMPARISONS = {percent: Comparison(percent) for percent in (False, True)}


@lru_cache(maxsize=4096)
def gold_form(ground_truth: str) -> Form:
    r"""What a ground truth says: LaTeX or a number, alone or in a solution with ``\boxed{}``.

    ValueError: it is empty.
    """
    text = boxed(ground_truth) if "\\boxed" in ground_truth or "\\fbox" in ground_truth else ground_truth
    if text is None or not text.strip():
        raise ValueError(
            f"ground truth {ground_truth[:80]!r} is no formula. Correct reward_model.ground_truth of that row"
        )
    return read(text)


def parts_by_text(ground_truth: str) -> list[str]:
    """The parts of a ground truth that sympy does not read, so that they are right only in the same words."""
    return [part.latex for part in _expressions(gold_form(ground_truth)) if not _reads(part.latex)]


@lru_cache(maxsize=65536)
def _reads(latex: str) -> bool:
    return ALGEBRA.reads(latex)


def _expressions(form: Form) -> Iterator[Expression]:
    """The expressions in ``form``, at any depth."""
    if isinstance(form, Expression):
        yield form
    for each in inner(form):
        yield from _expressions(each)


def answer_of(response: str) -> str | None:
    """The answer of a response as it is written: its last box, else what it states (``math_statement``)."""
    said = boxed(response)
    return stated(response) if said is None and response.strip() else said


def grade_math(request: RewardRequest, config: RewardConfig) -> Score:
    r"""The score is 1 if the response's answer equals the ground truth as an expression, else 0.

    The answer is the content of the last ``\boxed{}``, else what the response states.  parts: ``boxed``, 1 if the
    response begins a box, else 0.

    ValueError: the ground truth is empty.
    """
    gold = gold_form(str(request.ground_truth))
    said = answer_of(request.response)
    parts = {"boxed": float(_BOX.search(request.response) is not None)}
    if said is None or not said.strip() or len(said) > MAX_ANSWER:
        return Score(0.0, parts, correct=0.0)
    answer = read(said)
    right = _COMPARISONS[config.math.percent].same(gold, answer)
    return Score(float(right), parts, correct=float(right), answer=answer.text)
