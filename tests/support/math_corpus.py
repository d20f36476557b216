r"""Answers of our own making, of every kind that mathematical data sets have, drawn from a seed.

``cases_of`` spells each again in all ways of ``math_spellings.SPELLINGS`` within a box and of
``math_sentences.SENTENCES`` without one, which must be right, and changes it in all ways of
``math_spellings.CHANGES`` and ``math_sentences.DENIALS``, which must be wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import gcd, pi
from random import Random

from tests.support.math_sentences import DENIALS, SENTENCES, in_sentence
from tests.support.math_spellings import CHANGES, SPELLINGS

_WORDS = ("Tuesday", "Quadrant III", "odd", "parabola", "increasing", "Brand Q", "isosceles triangle")
_UNITS = ("cm", "m", "km", "inches", "hours", "minutes", "cents", "apples", "square feet", "dollars")


def _fraction(random: Random) -> str:
    bottom = random.randint(2, 30)
    top = random.choice([each for each in range(1, 90) if gcd(each, bottom) == 1])
    return f"{random.choice(['', '-'])}\\frac{{{top}}}{{{bottom}}}"


def _number(random: Random) -> str:
    return random.choice(
        [
            str(random.randint(-30, 30)),
            _fraction(random),
            f"{random.randint(2, 9)}\\sqrt{{{random.choice((2, 3, 5, 7))}}}",
        ]
    )


def _polynomial(random: Random, letter: str = "x") -> str:
    a, b, c = random.randint(2, 9), random.randint(2, 20), random.randint(1, 30)
    return f"{a}{letter}^2 {random.choice('+-')} {b}{letter} {random.choice('+-')} {c}"


def _ends(random: Random) -> tuple[int, int]:
    low = random.randint(-20, 18)
    return low, random.randint(low + 1, 20)


def _distinct(random: Random, count: int) -> list[str]:
    return [str(each) for each in random.sample(range(-40, 60), count)]


def _interval(random: Random) -> str:
    low, high = _ends(random)
    return f"{random.choice('([')}{low}, {high}{random.choice(')]')}"


def _union(random: Random) -> str:
    low, high = _ends(random)
    return f"(-\\infty, {low}) \\cup {random.choice('([')}{high}, \\infty)"


def _matrix(random: Random) -> str:
    cells = [str(random.randint(-9, 9)) for _ in range(4)]
    return f"\\begin{{pmatrix}} {cells[0]} & {cells[1]} \\\\ {cells[2]} & {cells[3]} \\end{{pmatrix}}"


def _based(random: Random) -> str:
    base = random.randint(3, 9)
    return f"{random.randint(1, base - 1)}{''.join(str(random.randint(0, base - 1)) for _ in range(3))}_{base}"


KINDS: dict[str, Callable[[Random], str]] = {
    "integer": lambda r: str(r.randint(-999, 999)),
    "large integer": lambda r: str(r.randint(1000, 10**8)),
    "decimal": lambda r: f"{r.randint(-99, 99)}.{r.randint(1, 9)}{r.choice(['', '5', '25'])}",
    "fraction": _fraction,
    "percentage": lambda r: f"{r.randint(1, 99)}\\%",
    "money": lambda r: f"\\${r.randint(2, 400)}.{r.randint(10, 99)}",
    "angle": lambda r: f"{r.randint(1, 179)}^\\circ",
    "quantity": lambda r: f"{r.randint(2, 500)} \\text{{ {r.choice(_UNITS)}}}",
    "power of ten": lambda r: f"{r.randint(1, 9)}.{r.randint(1, 9)}e{r.choice((-12, -8, -4, 5, 9, 21))}",
    "root": lambda r: f"{r.choice(['', '-'])}{r.randint(2, 19)}\\sqrt{{{r.choice((2, 3, 5, 6, 7, 10))}}}",
    "sum of roots": lambda r: f"{r.randint(2, 9)} + {r.randint(2, 9)}\\sqrt{{{r.choice((2, 3, 5))}}}",
    "multiple of pi": lambda r: f"{r.randint(2, 90)}\\pi",
    "share of pi": lambda r: f"\\frac{{{r.choice((2, 4, 5, 7))}\\pi}}{{{r.choice((3, 9, 11))}}}",
    "complex": lambda r: f"{r.randint(1, 20)} {r.choice('+-')} {r.randint(2, 20)}i",
    "power": lambda r: f"{r.randint(2, 7)}^{{{r.randint(10, 60)}}}",
    "polynomial": _polynomial,
    "product": lambda r: f"{r.randint(2, 9)}(x + {r.randint(1, 9)})(x - {r.randint(10, 19)})",
    "rational function": lambda r: f"\\frac{{{r.randint(2, 9)}x + {r.randint(1, 9)}}}{{x^2 + {r.randint(2, 9)}}}",
    "exponential": lambda r: f"{r.randint(2, 9)} e^{{-{r.randint(2, 9)} t}} \\cos({r.randint(2, 9)} t)",
    "logarithm": lambda r: f"\\ln {r.choice((2, 3, 5))} + \\log_{{{r.choice((2, 10))}}} {r.choice((3, 7))}",
    "point": lambda r: f"({_number(r)}, {_number(r)})",
    "point in space": lambda r: f"\\left( {_number(r)}, {_number(r)}, {_number(r)} \\right)",
    "interval": _interval,
    "union": _union,
    "inequality": lambda r: f"{r.randint(-20, 0)} \\le x < {r.randint(1, 20)}",
    "set with a condition": lambda r: f"\\{{x \\mid {r.randint(-20, 0)} < x \\leq {r.randint(1, 20)}\\}}",
    "list": lambda r: ", ".join(_distinct(r, r.randint(2, 4))),
    "set": lambda r: f"\\{{{', '.join(_distinct(r, r.randint(2, 4)))}\\}}",
    "points": lambda r: f"({r.randint(1, 9)}, {r.randint(10, 19)}), ({r.randint(20, 29)}, {r.randint(1, 9)})",
    "plus or minus": lambda r: f"{r.randint(2, 9)} \\pm {r.randint(2, 9)}\\sqrt{{{r.choice((2, 3))}}}",
    "matrix": _matrix,
    "base": _based,
    "large base": lambda r: f"{r.randint(100, 999)}_{{{r.randint(11, 16)}}}",
    "bare letter": lambda r: r.choice("ABCDE"),
    "bare word": lambda r: r.choice(("Monday", "Purple", "Harry", "Parallelogram")),
    "rounded": lambda r: f"{(n := r.randint(2, 9))}\\pi \\approx {n * pi:.2f}",
    "ratio": lambda r: f"{r.randint(1, 9)}:{r.randint(10, 19)}",
    "time": lambda r: f"{r.randint(1, 12)}:{r.randint(10, 59)} \\text{{ {r.choice(('a', 'p'))}.m.}}",
    "words": lambda r: f"\\text{{{r.choice(_WORDS)}}}",
    "letter": lambda r: f"\\text{{({r.choice('ABCDE')})}}",
    "equation": lambda r: f"y = {r.randint(2, 9)}x + {r.randint(1, 20)}",
    "equation of a line": lambda r: f"{r.randint(2, 9)}x {r.choice('+-')} y + {r.randint(1, 9)} = 0",
    "value of a letter": lambda r: f"x = {_number(r)}",
    "function": lambda r: f"f(x) = {_polynomial(r)}",
    "sentence": lambda r: f"The slope is {r.randint(2, 9)}, so the line rises by {r.randint(10, 99)} when x grows by 4",
}


@dataclass(frozen=True)
class Case:
    """A response to be graded.  way: the name of the spelling or change."""

    kind: str
    way: str
    gold: str
    response: str
    right: bool


def golds(per_kind: int, seed: int = 0) -> Iterator[tuple[str, str]]:
    """(kind, answer), each answer of a kind once."""
    for kind, draw in KINDS.items():
        random = Random(f"{seed} {kind}")
        yield from ((kind, each) for each in dict.fromkeys(draw(random) for _ in range(per_kind)))


def cases_of(kind: str, gold: str) -> Iterator[Case]:
    """Every way in which ``gold`` can be spelled or changed."""
    for way, spell in SPELLINGS.items():
        if (written := spell(gold)) is not None:
            yield Case(kind, way, gold, f"so it is $\\boxed{{{written}}}$", True)
    yield Case(kind, "a box with a space", gold, f"\\boxed {{{gold}}}", True)
    yield Case(kind, "a corrected answer", gold, f"\\boxed{{-98.25}}, but I made an error. \\boxed{{{gold}}}", True)
    yield Case(kind, "a spoiled answer", gold, f"\\boxed{{{gold}}}. Wait, I made an error. \\boxed{{-98.25}}", False)
    for way, write in SENTENCES.items():
        if (said := write(gold)) is not None:
            yield Case(kind, way, gold, said, True)
    for way, write in DENIALS.items():
        if (said := write(gold)) is not None:
            yield Case(kind, way, gold, said, False)
    for index, (way, change) in enumerate(CHANGES.items()):
        if (written := change(gold)) is not None and written != gold:
            yield Case(kind, way, gold, f"so it is $\\boxed{{{written}}}$", False)
            if written and (said := in_sentence(written, index)) is not None:
                yield Case(kind, way, gold, said, False)
