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
from fractions import Fraction
from functools import lru_cache
from typing import Any

import mpmath
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
LONGEST_DECIMAL = 10**12  # a whole number above it is no decimal's: 15 digits do not tell it from the next one
LEAST_DIGITS = 60  # in which exact constants agree that are equal, beside the digits that they are written with
SPARE_DIGITS = 20  # of a computation, for what rounding takes
POINT_DIGITS = 400  # beside them where symbols have values, whose powers and exponentials may cancel
POINT_NOISE = 1e-8  # relative, of expressions with decimals at a point
POINTS = tuple(Fraction(each, 10_000) for each in (3719, 18317, 25391, 7713, 31237, 12931))
SCALES = (Fraction(1), Fraction(-1), Fraction(73, 10), Fraction(1013, 10), Fraction(-1013, 10))
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
    gold = expression(gold_latex)
    answer = expression(answer_latex)
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
    return bool(verify([gold], [answer], numeric_precision=_digits(gold, answer), timeout_seconds=None))


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
    if gold.has(sympy.Float) or answer.has(sympy.Float):
        digits = 30
        tolerance = mpmath.mpf(POINT_NOISE)
    else:
        digits = _digits(gold, answer) + POINT_DIGITS
        tolerance = mpmath.mpf(10) ** -(digits // 2)
    functions = [_function(symbols, each) for each in (gold, answer)]
    num_same = 0
    with mpmath.workdps(digits):
        for scale in SCALES:
            for shift in range(3):
                point = [scale * (POINTS[(index + shift) % len(POINTS)] + index) for index in range(len(symbols))]
                first, second = (_value(function, point) for function in functions)
                if first is None or second is None:
                    continue
                if abs(first - second) > tolerance * max(abs(first), abs(second), tolerance):
                    return False
                num_same += 1
    return True if num_same >= 3 else None


def _function(symbols: Sequence[Any], of: Any) -> Callable[..., Any] | None:
    try:
        function: Callable[..., Any] = sympy.lambdify(symbols, of.doit(), modules=["mpmath"])
    except Exception:  # noqa: BLE001
        return None
    return function


def _value(function: Callable[..., Any] | None, point: Sequence[Fraction]) -> Any:
    """The real value at a point; None where there is none, so that both sides of a root count only where it is real."""
    if function is None:
        return None
    try:
        value = mpmath.mpmathify(function(*(mpmath.mpf(each.numerator) / each.denominator for each in point)))
        return value if isinstance(value, mpmath.mpf) and mpmath.isfinite(value) else None
    except Exception:  # noqa: BLE001
        return None


def _same_number(gold: Any, answer: Any) -> bool | None:
    """Whether two constants are equal: exactly if both are exact, else as far as a decimal goes.

    Roots, logarithms and kin are exact to more digits than the largest and the smallest number in them have.
    """
    try:
        gold = gold.doit()
        answer = answer.doit()
        if gold == answer and gold.is_finite:
            return True
        if gold.is_Rational and answer.is_Rational:
            return False
        digits = _digits(gold, answer)
        first, second = (sympy.N(each, digits) for each in (gold, answer))
        if (
            not (first.is_number and second.is_number)
            or first.has(sympy.nan, sympy.zoo)
            or second.has(sympy.nan, sympy.zoo)
        ):
            return None
        if not (first.is_finite and second.is_finite):
            return bool(first == second)
        difference = abs(first - second)
        size = abs(first)
        if not (gold.has(sympy.Float) or answer.has(sympy.Float)):
            return bool(difference <= sympy.Float(10, digits) ** -(digits - SPARE_DIGITS) * max(size, 1))
        if any(each.is_Integer and abs(each) > LONGEST_DECIMAL for each in (gold, answer)):
            return False
        if isinstance(gold, sympy.Float) or isinstance(answer, sympy.Float):
            noise = bool(difference <= NOISE * size)
            return noise or (first.is_real and second.is_real and close(float(first), float(second)))
        return bool(difference <= PLACES and difference <= RELATIVE * size)
    except Exception:  # noqa: BLE001
        return None


def _digits(*expressions: Any) -> int:
    """The decimal digits that tell apart any two numbers which are written with the numbers in ``expressions``."""
    most = 0
    for each in expressions:
        for part in sympy.preorder_traversal(each):
            if not isinstance(part, sympy.Expr) or not part.is_number or part.has(sympy.oo, sympy.nan, sympy.zoo):
                continue
            if part.is_Rational:
                most = max(most, part.p.bit_length(), part.q.bit_length())
            elif part.is_Pow or part.is_Function:
                size = abs(sympy.N(part, 5))
                if size.is_finite and size > 0:
                    most = max(most, abs(int(sympy.log(size, 2))))
    return SPARE_DIGITS + LEAST_DIGITS + 2 * int(most * math.log10(2))


def reads(latex: str) -> bool:
    """Whether sympy reads all of ``latex``."""
    return expression(latex) is not None


def last_statement(response: str) -> str | None:
    """The last formula or number of a text without a box, as it is written; None if there is none."""
    latex = LatexExtractionConfig(boxed_match_priority=-1, normalization_config=_LATEX)
    said = parse(response, [latex, ExprExtractionConfig()], parsing_timeout=None)
    return str(said[-1]) if said else None
