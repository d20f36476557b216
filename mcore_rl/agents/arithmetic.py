"""Exact arithmetic on the text of an expression, and nothing else that Python could do."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from operator import add, floordiv, mod, mul, sub, truediv
from typing import Any

Operators = Mapping[type[ast.operator], Callable[[Fraction, Fraction], Any]]
OPERATORS: Operators = {
    ast.Add: add,
    ast.Sub: sub,
    ast.Mult: mul,
    ast.Div: truediv,
    ast.FloorDiv: floordiv,
    ast.Mod: mod,
}
MAX_LENGTH = 500  # characters of an expression
MAX_POWER = 1000
MAX_BITS = 4096  # of a numerator or denominator
DIGITS = 12  # significant ones of a result that is no whole number
_NUMBER = re.compile(r"\d{1,300}(\.\d{0,300})?|\.\d{1,300}")


def evaluated(expression: str, more: Operators | None = None) -> Fraction:
    """The value of an arithmetic expression.  more: operators besides ``OPERATORS``.

    ValueError: it is none, divides by zero, or is too large.
    """
    if len(expression) > MAX_LENGTH:
        raise ValueError(f"the expression has {len(expression)} characters, and may have {MAX_LENGTH}")
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", expression).replace("^", "**")
    try:
        return _value(ast.parse(text.strip(), mode="eval").body, text.strip(), {**OPERATORS, **(more or {})})
    except SyntaxError:
        raise ValueError(f"{expression!r} is no arithmetic expression") from None
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    except (RecursionError, MemoryError):
        raise ValueError("the expression is too deep") from None


def written(value: Fraction) -> str:
    """``value`` as a person writes it: 7, or 0.333333333333."""
    if value.denominator == 1:
        return str(value.numerator)
    try:
        return f"{float(value):.{DIGITS}g}"
    except OverflowError:
        return str(value.numerator // value.denominator)


def _value(node: ast.expr, text: str, operators: Operators) -> Fraction:
    if isinstance(node, ast.Constant):
        number = ast.get_source_segment(text, node) or ""
        if _NUMBER.fullmatch(number) is None:
            raise ValueError(f"{number[:80]} is no number that can be calculated with")
        return Fraction(number.rstrip(".") or "0")
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd | ast.USub):
        value = _value(node.operand, text, operators)
        return value if isinstance(node.op, ast.UAdd) else -value
    if isinstance(node, ast.BinOp):
        left = _value(node.left, text, operators)
        right = _value(node.right, text, operators)
        if isinstance(node.op, ast.Pow):
            return _limited(_power(left, right))
        return _limited(_applied(node.op, left, right, operators))
    raise ValueError(f"{(ast.get_source_segment(text, node) or '')[:80]!r} is no arithmetic on numbers")


def _applied(operator: ast.operator, left: Fraction, right: Fraction, operators: Operators) -> Fraction:
    if type(operator) not in operators:
        raise ValueError("the operators are + - * / // % **")
    return Fraction(operators[type(operator)](left, right))


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or abs(exponent) > MAX_POWER:
        raise ValueError(f"an exponent is a whole number of at most {MAX_POWER}")
    bits = max(base.numerator.bit_length(), base.denominator.bit_length()) * abs(exponent.numerator)
    if bits > 2 * MAX_BITS:
        raise ValueError("the result is too large")
    return Fraction(base**exponent.numerator)


def _limited(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise ValueError("the result is too large")
    return value
