r"""Whether an answer says what a ground truth says, form by form.

Numbers are equal or not.  A decimal may stand for an endless fraction or a root where it is right to six places.
Brackets, bases, known units, names and letters have to agree; the order of a set's or a list's items does not count.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from mcore_rl.rewards.math_forms import (
    Based,
    Expression,
    Form,
    Items,
    LetterChoice,
    Matrix,
    Measure,
    Named,
    Number,
    Relation,
    Rounded,
    Words,
    read,
)
from mcore_rl.rewards.math_units import Unit, letter_unit
from mcore_rl.rewards.symbolic_process import ALGEBRA

MAX_ANSWER = 4000  # characters; a longer answer is no answer
MAX_ITEMS = 64  # of a set that is compared in any order


@dataclass(frozen=True)
class Comparison:
    """How two forms are compared; ``percent``: 75 is right for 75%."""

    percent: bool

    def same(self, gold: Form, answer: Form) -> bool:
        """Whether ``answer`` says what ``gold`` says."""
        if gold.text == answer.text:
            return True
        if isinstance(gold, Number) and isinstance(answer, Number):
            return self._same_number(gold, answer)
        for kind, compare in (
            (LetterChoice, self._same_choice),
            (Rounded, self._same_rounded),
            (Measure, self._same_measure),
            (Named, self._same_named),
            (Relation, self._same_relation),
        ):
            if isinstance(gold, kind) or isinstance(answer, kind):
                return compare(gold, answer)
        return self._same_structure(gold, answer)

    def _same_structure(self, gold: Form, answer: Form) -> bool:
        if isinstance(gold, Words | Based | Matrix) or isinstance(answer, Words | Based | Matrix):
            return self._same_leaf(gold, answer)
        if isinstance(gold, Items) and isinstance(answer, Items):
            return self._same_items(gold, answer)
        if _alone(gold) or _alone(answer):
            return self.same(_alone(gold) or gold, _alone(answer) or answer)
        if any(isinstance(each, Items) and each.brackets not in ("u", "{}") for each in (gold, answer)):
            return False
        return _same_algebra(gold, answer)

    def _same_leaf(self, gold: Form, answer: Form) -> bool:
        if isinstance(gold, Words) and isinstance(answer, Words):
            return gold.said == answer.said
        if isinstance(gold, Words) and isinstance(answer, Expression):
            return gold.said == answer.text.lower()
        if isinstance(gold, Based):
            digits = answer.digits if isinstance(answer, Based) else answer.text
            base = answer.base if isinstance(answer, Based) else gold.base  # which base, the question says
            return (digits, base) == (gold.digits, gold.base)
        if isinstance(answer, Based):
            return answer.base == 10 and gold.text == answer.digits
        if isinstance(gold, Matrix) and isinstance(answer, Matrix):
            return [len(row) for row in gold.rows] == [len(row) for row in answer.rows] and all(
                self.same(g, a)
                for row, other in zip(gold.rows, answer.rows, strict=True)
                for g, a in zip(row, other, strict=True)
            )
        return False

    def _same_number(self, gold: Number, answer: Number) -> bool:
        if self._near(gold, answer):
            return True
        if self.percent and gold.is_percent != answer.is_percent:
            one, other = (gold, answer) if gold.is_percent else (answer, gold)
            return one.value * 100 == other.value
        return False

    def _near(self, gold: Number, answer: Number) -> bool:
        if gold.value == answer.value:
            return True
        difference = abs(gold.value - answer.value)
        size = abs(gold.value)
        if gold.is_decimal and answer.is_decimal:
            return difference * 10**12 <= size and difference * 2_000_000 <= 1
        if gold.is_decimal or answer.is_decimal:
            exact = answer if gold.is_decimal else gold
            endless = exact.value.denominator != 1 and _is_endless(exact.value)
            return endless and difference * 2_000_000 <= 1 and difference * 100_000 <= size
        return False

    def _same_choice(self, gold: Form, answer: Form) -> bool:
        letter, rest = (gold.letter, gold.rest) if isinstance(gold, LetterChoice) else (_letter(gold), None)
        said, also = (answer.letter, answer.rest) if isinstance(answer, LetterChoice) else (_letter(answer), None)
        if letter is not None and said is not None:
            return letter == said and (rest is None or also is None or self.same(rest, also))
        if isinstance(gold, LetterChoice):
            return rest is not None and self.same(rest, answer)
        return also is not None and self.same(gold, also)

    def _same_rounded(self, gold: Form, answer: Form) -> bool:
        if isinstance(gold, Rounded) and isinstance(answer, Rounded):
            return self.same(gold.exact, answer.exact) and self.same(gold.decimal, answer.decimal)
        if isinstance(gold, Rounded):
            return self.same(gold.exact, answer) or self.same(gold.decimal, answer)
        assert isinstance(answer, Rounded)
        is_decimal = isinstance(gold, Number) and gold.is_decimal
        return self.same(gold, answer.decimal if is_decimal else answer.exact)

    def _same_measure(self, gold: Form, answer: Form) -> bool:
        if isinstance(gold, Measure) and isinstance(answer, Expression):
            quantity, unit = letter_unit(answer.latex)
            answer = answer if unit is None else Measure(answer.text, read(quantity), unit)
        if isinstance(gold, Measure) and isinstance(answer, Measure):
            if not (gold.unit.dimension and answer.unit.dimension):
                powers = {gold.unit.power, answer.unit.power} - {1}
                return len(powers) < 2 and self.same(gold.quantity, answer.quantity)
            if (gold.unit.dimension, gold.unit.power) != (answer.unit.dimension, answer.unit.power):
                return False
            if gold.unit.factor == answer.unit.factor:
                return self.same(gold.quantity, answer.quantity)
            one = _in_base(gold)
            other = _in_base(answer)
            return one is not None and other is not None and one == other
        return self.same(
            gold.quantity if isinstance(gold, Measure) else gold,
            answer.quantity if isinstance(answer, Measure) else answer,
        )

    def _same_named(self, gold: Form, answer: Form) -> bool:
        if isinstance(gold, Named) and isinstance(answer, Named):
            if gold.name == answer.name and self.same(gold.value, answer.value):
                return True
            return _same_algebra(gold, answer)
        if any(isinstance(each, Expression) and "=" in each.latex for each in (gold, answer)):
            return _same_algebra(gold, answer)
        return self.same(
            gold.value if isinstance(gold, Named) else gold, answer.value if isinstance(answer, Named) else answer
        )

    def _same_relation(self, gold: Form, answer: Form) -> bool:
        if isinstance(gold, Relation):
            if isinstance(answer, Relation):
                return gold.variable == answer.variable and self.same(gold.interval, answer.interval)
            return self.same(gold.interval, answer) or (isinstance(answer, Expression) and _same_algebra(gold, answer))
        assert isinstance(answer, Relation)
        if isinstance(gold, Expression):
            return _same_algebra(gold, answer)
        # Where (1, 2) may be a point, an inequality does not answer the question.
        is_interval = answer.in_set or (isinstance(gold, Items) and gold.is_interval)
        return is_interval and self.same(gold, answer.interval)

    def _same_items(self, gold: Items, answer: Items) -> bool:
        loose = {gold.brackets, answer.brackets} in ({"", "{}"}, {"", "()"})
        if gold.brackets != answer.brackets and not loose:
            return False
        if len(gold.items) != len(answer.items):
            return gold.brackets == "u" and _same_algebra(gold, answer)
        if gold.is_ordered or answer.is_ordered:
            return all(self.same(g, a) for g, a in zip(gold.items, answer.items, strict=True))
        return self._same_in_any_order(gold.items, answer.items)

    def _same_in_any_order(self, gold: tuple[Form, ...], answer: tuple[Form, ...]) -> bool:
        left = list(answer)
        if len(left) > MAX_ITEMS:
            return all(self.same(g, a) for g, a in zip(gold, answer, strict=True))
        for each in gold:
            match = next((other for other in left if self.same(each, other)), None)
            if match is None:
                return False
            left.remove(match)
        return True


def _alone(form: Form) -> Form | None:
    """The item of a set of one."""
    return form.items[0] if isinstance(form, Items) and form.brackets == "{}" and len(form.items) == 1 else None


def _is_endless(value: Fraction) -> bool:
    bottom = value.denominator
    for prime in (2, 5):
        while bottom % prime == 0:
            bottom //= prime
    return bottom != 1


def _letter(form: Form) -> str | None:
    return form.text if isinstance(form, Expression) and len(form.text) == 1 and form.text in "ABCDEFGHIJ" else None


def _in_base(measure: Measure) -> Fraction | None:
    if not isinstance(measure.quantity, Number):
        return None
    unit: Unit = measure.unit
    return measure.quantity.value * unit.factor**unit.power


def _same_algebra(gold: Form, answer: Form) -> bool:
    return algebra_equal(latex_of(gold), latex_of(answer))


def latex_of(form: Form) -> str:
    """What sympy is given for ``form``."""
    return form.latex if isinstance(form, Expression) else form.text


@lru_cache(maxsize=8192)
def algebra_equal(gold: str, answer: str) -> bool:
    """Whether sympy finds both equal, within its limits."""
    return len(answer) <= MAX_ANSWER and ALGEBRA.equal(gold, answer)
