r"""Algebra for the math grader: whether two LaTeX expressions are equal, by math-verify (Hugging Face) and sympy.

It runs in a process of its own (``symbolic_process``), because what a model writes may need any time and any memory:
``9^{9^{9}}``.  Text is read as LaTeX as a whole or not at all: math-verify's own fall back to the last number of an
expression is off, and so are its units (``6 t`` would be 6) and its limits of time (they are signals).
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import sympy
from latex2sympy2_extended.latex2sympy2 import latex2sympy
from latex2sympy2_extended.logic import And
from latex2sympy2_extended.math_normalization import NormalizationConfig, normalize_latex
from math_verify import parse, verify
from math_verify.grader import should_treat_as_complex
from math_verify.parser import ExprExtractionConfig, LatexExtractionConfig

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of its limits being off
PLACES = 5e-7  # a decimal answer for 1/3 or \pi is right if it is right in six decimals
RELATIVE = 1e-5  # and in about as many digits, for small numbers
NOISE = 1e-12  # relative, of what a floating point computation leaves: 0.30000000000000004
POINTS = (0.3719, 1.8317, 2.5391, 0.7713, 3.1237, 1.2931)
_LATEX = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=False, boxed="none")
_ANGLE_OF = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-z])")
# Words of a sentence, which sympy would take for products of letters; xyz may be such a product.
_WORD = re.compile(
    r"(?<![A-Za-z\\])(?:[A-Za-z]{4,}|if|is|or|of|to|at|by|for|the|and|are|not|all|any|has|let|can)(?![A-Za-z])"
    r"|\\(?:text|mbox|ldots|cdots|dots)(?![A-Za-z])|\\begin|\\quad|[^\x00-\x7f]"
)


@lru_cache(maxsize=4096)
def expression(latex: str) -> Any:
    """The sympy object of ``latex``; None if sympy cannot read all of it."""
    if _WORD.search(latex) or not latex.strip():
        return None
    try:
        prepared = normalize_latex(latex, config=_LATEX)  # math-verify's, without what it makes of boxes and units
        return latex2sympy(
            prepared,
            is_real=not should_treat_as_complex(latex),
            convert_degrees=_ANGLE_OF.search(latex) is not None,
            normalization_config=None,
        )
    except Exception:  # noqa: BLE001  whatever a parser does with what a model wrote
        return None


def close(gold: float, answer: float) -> bool:
    """Whether a decimal and an exact value are the same to six places."""
    difference = abs(gold - answer)
    return difference <= PLACES and difference <= RELATIVE * abs(gold)


def equal(gold_latex: str, answer_latex: str) -> bool:
    """Whether both are the same expression, equation or set."""
    gold, answer = expression(gold_latex), expression(answer_latex)
    if gold is None or answer is None:
        return False
    if isinstance(gold, And):  # a chain of equations, of which math-verify compares the ends
        return False
    if isinstance(gold, sympy.Equality) and isinstance(answer, sympy.Equality):
        return _same_equation(gold, answer)
    if isinstance(answer, sympy.Equality) and not isinstance(gold, sympy.Equality):
        return False
    if any(isinstance(each, sympy.Set) and each.is_empty for each in (gold, answer)):
        return gold == answer and r"\emptyset" in gold_latex and r"\emptyset" in answer_latex
    if isinstance(gold, sympy.Expr) and isinstance(answer, sympy.Expr):
        decided = _by_value(gold, answer)
        if decided is not None:
            return decided
    return bool(verify([gold], [answer], timeout_seconds=None))


def _same_equation(gold: Any, answer: Any) -> bool:
    """Whether one equation is the other times a number."""
    left, right = (sympy.expand((side.lhs - side.rhs).doit()) for side in (gold, answer))
    if left == right:
        return True
    if left == 0 or right == 0 or not left.free_symbols or left.free_symbols != right.free_symbols:
        return False
    ratio = sympy.simplify(left / right)
    return bool(ratio.is_number and ratio.is_nonzero)


def _by_value(gold: Any, answer: Any) -> bool | None:
    """Whether both have the same value, at several points if they have symbols; None if that cannot be said."""
    symbols = sorted(gold.free_symbols | answer.free_symbols, key=str)
    if not symbols:
        return _same_number(gold, answer)
    if gold.free_symbols != answer.free_symbols and not (gold.has(sympy.Sum, sympy.Integral)):
        return None
    functions = [_function(symbols, each) for each in (gold, answer)]
    num_same = 0
    for scale in (1, -1, 7.3):
        for shift in range(3):
            point = [scale * (POINTS[(index + shift) % len(POINTS)] + index) for index in range(len(symbols))]
            first, second = (_value(function, point) for function in functions)
            if first is None or second is None:
                continue
            if abs(first - second) > 1e-8 * max(1e-30, abs(first), abs(second)):
                return False
            num_same += 1
    return True if num_same >= 3 else None


def _function(symbols: Sequence[Any], of: Any) -> Callable[..., Any] | None:
    try:
        function: Callable[..., Any] = sympy.lambdify(symbols, of.doit(), modules=["math"])
    except Exception:  # noqa: BLE001
        return None
    return function


def _value(function: Callable[..., Any] | None, point: list[float]) -> float | None:
    """The real value at a point; None where there is none, so that both sides of a root count only where it is real."""
    if function is None:
        return None
    try:
        value = function(*point)
        return value if isinstance(value, float | int) and math.isfinite(value) else None
    except Exception:  # noqa: BLE001
        return None


def _same_number(gold: Any, answer: Any) -> bool | None:
    """Whether two constants are equal: to 40 digits if both are exact, else as far as a decimal goes."""
    try:
        first, second = (sympy.N(each.doit(), 50) for each in (gold, answer))
        if (
            not (first.is_number and second.is_number)
            or first.has(sympy.nan, sympy.zoo)
            or second.has(sympy.nan, sympy.zoo)
        ):
            return None
        if not (first.is_finite and second.is_finite):
            return bool(first == second)
        difference, size = abs(first - second), abs(first)
        if not (gold.has(sympy.Float) or answer.has(sympy.Float)):
            return bool(difference <= sympy.Float("1e-40") * max(size, 1))
        if gold.has(sympy.Float) and answer.has(sympy.Float):
            return bool(difference <= NOISE * size)
        if first.is_real and second.is_real:
            return bool(difference <= NOISE * size) or close(float(first), float(second))
        return bool(difference <= PLACES and difference <= RELATIVE * size)
    except Exception:  # noqa: BLE001
        return None


def reads(latex: str) -> bool:
    """Whether sympy reads all of ``latex``."""
    return expression(latex) is not None


def last_statement(response: str) -> str | None:
    """The last formula or number of a text without a box, as it is written; None if there is none."""
    latex = LatexExtractionConfig(boxed_match_priority=-1, normalization_config=_LATEX)
    said = parse(response, [latex, ExprExtractionConfig()], parsing_timeout=None)
    return str(said[-1]) if said else None
