r"""What an answer says: a number, a list, an interval, a matrix, words, or an expression for sympy.

``read`` takes an answer apart as far as brackets, commas and signs go, without algebra, so that ``[1,-2]`` is not
``(1,-2)`` and ``2516_8`` is not ``2516_{10}``.  What is left are expressions, which sympy compares.  Numbers are exact,
in all their ways of writing: ``1,000``, ``3\frac{1}{2}``, ``1.24 \times 10^{-8}``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from mcore_rl.rewards.latex_spellings import canonical
from mcore_rl.rewards.math_units import Unit, split_unit

# ``{`` and ``}`` without a backslash group characters and mean nothing to a reader.
_TOKEN = re.compile(r"\\(?:begin|end)\{[a-z]+\*?\}|\\[A-Za-z]+|\\.|.", re.DOTALL)
_OPENERS = frozenset(["(", "[", "{", r"\{", r"\langle", r"\lfloor", r"\lceil"])
_CLOSERS = frozenset([")", "]", "}", r"\}", r"\rangle", r"\rfloor", r"\rceil"])


def tokens(text: str) -> list[tuple[str, int]]:
    """The tokens of ``text`` with the number of brackets that are open before an opening or after a closing one."""
    depth = 0
    parts = list[tuple[str, int]]()
    for token in _TOKEN.findall(text):
        if token in _CLOSERS or token.startswith(r"\end{"):
            depth -= 1
        parts.append((token, depth))
        if token in _OPENERS or token.startswith(r"\begin{"):
            depth += 1
    return parts


def split(text: str, marks: frozenset[str]) -> list[str]:
    """``text`` cut at each of ``marks`` that stands outside all brackets."""
    parts = [""]
    for token, depth in tokens(text):
        if depth == 0 and token in marks:
            parts.append("")
        else:
            parts[-1] += token
    return parts


def outer_brackets(text: str) -> tuple[str, str] | None:
    """(the outer brackets, what is inside) if one pair of brackets holds the whole text."""
    parts = tokens(text)
    if len(parts) < 2 or parts[0][0] not in ("(", "[", r"\{") or parts[-1][0] not in (")", "]", r"\}"):
        return None
    if any(depth == 0 for _, depth in parts[1:-1]) or parts[-1][1] != 0:
        return None
    pair = (parts[0][0] + parts[-1][0]).replace("\\", "")
    if ("{" in pair) != ("}" in pair):
        return None
    return pair, "".join(token for token, _ in parts[1:-1])


def unwrapped(text: str) -> str:
    """``text`` without brackets and grouping braces around the whole."""
    text = text.strip()
    while (inner := outer_brackets(text)) is not None and inner[0] == "()":
        text = inner[1].strip()
    return ungrouped(text)


def ungrouped(text: str) -> str:
    """``text`` without grouping braces around the whole."""
    text = text.strip()
    if text.startswith("{") and text.endswith("}") and all(depth > 0 for _, depth in tokens(text)[1:-1]):
        return text[1:-1].strip()
    return text


MAX_EXPONENT = 400  # of a power of ten that is still written out


@dataclass(frozen=True)
class Form:
    """What is common to all forms.  text: how it is written, without spaces."""

    text: str


@dataclass(frozen=True)
class Number(Form):
    """A rational number.  is_decimal: written with a point or a power of ten.  is_percent: written with a percent sign.

    ``value`` of 75% is 3/4.
    """

    value: Fraction
    is_decimal: bool = False
    is_percent: bool = False


def inner(form: Form) -> Iterator[Form]:
    """The forms of which ``form`` is made, not those within them."""
    for value in vars(form).values():
        yield from _flat(value)


def _flat(value: object) -> Iterator[Form]:
    if isinstance(value, Form):
        yield value
    elif isinstance(value, tuple):
        for each in value:
            yield from _flat(each)


def tight(text: str) -> str:
    """``text`` without spaces."""
    return re.sub(r"\s+", "", text)


_DIGITS = r"\d+(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+\.?\d*|\.\d+"
_SCALE = r"(?:\s*(?:\\times|\\cdot|\*)\s*10\s*\^\s*\{?\s*([-+]?\s*\d+)\s*\}?|[eE]\s*\{?([-+]?\d+)\}?)"
_DECIMAL = re.compile(rf"([-+]?)\s*({_DIGITS})({_SCALE})?\s*(%?)", re.ASCII)
_POWER_OF_TEN = re.compile(r"([-+]?)\s*10\s*\^\s*\{\s*([-+]?\d+)\s*\}", re.ASCII)
_RATIO = re.compile(
    rf"([-+]?)\s*(?:(\d+)\s*)?\\frac\{{\s*([-+]?\s*(?:{_DIGITS}))\s*\}}\{{\s*([-+]?\s*(?:{_DIGITS}))\s*\}}\s*(%?)",
    re.ASCII,
)
_SLASH = re.compile(rf"([-+]?)\s*(?:(\d+)\s+)?({_DIGITS})\s*/\s*({_DIGITS})\s*(%?)", re.ASCII)
_REPEATING = re.compile(r"([-+]?)\s*(\d*)\.(\d*)\\overline\{(\d+)\}", re.ASCII)
_PLAIN = re.compile(r"\s*\$?\s*(?:\\\$)?([-+]?)(\d{1,3}(?:,\d{3})+|\d+)(\.\d*)?\$?[.;]?\s*", re.ASCII)


def plain_number(text: str) -> Number | None:
    """The number that ``text`` is, if it is written with digits, commas and a point only: the cheap path."""
    match = _PLAIN.fullmatch(text)
    if match is None:
        return None
    sign, whole, decimals = match.groups()
    digits = f"{sign}{whole.replace(',', '')}"
    if decimals is None or not decimals.strip(".0"):
        return Number(digits, Fraction(int(digits)))
    return Number(digits + decimals, Fraction(digits + decimals), is_decimal=True)


def number(text: str) -> Number | None:
    """The rational number that ``text`` is, in any of its ways of writing; None if it is none."""
    written = unwrapped(text)
    if "," in written and "(" in text:
        return None  # a point, not thousands
    value: Fraction | None = None
    is_decimal = False
    percent = ""
    if match := _DECIMAL.fullmatch(written):
        exponent = int((match[4] or match[5] or "0").replace(" ", ""))
        if abs(exponent) > MAX_EXPONENT:
            return None
        value = _signed(match[1], _digits(match[2]) * Fraction(10) ** exponent)
        is_decimal = value.denominator != 1 or exponent < 0
        percent = match[6]
    elif match := _POWER_OF_TEN.fullmatch(written):
        if abs(int(match[2])) > MAX_EXPONENT:
            return None
        value = _signed(match[1], Fraction(10) ** int(match[2]))
    elif (match := _RATIO.fullmatch(written)) or (match := _SLASH.fullmatch(written)):
        top = _digits(match[3])
        bottom = _digits(match[4])
        if not bottom or (match[2] and not (top > 0 and bottom > 0)):
            return None
        value = _signed(match[1], int(match[2] or 0) + top / bottom)
        percent = match[5]
    elif match := _REPEATING.fullmatch(written):
        fixed = match[3]
        period = match[4]
        repeated = Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(fixed))
        value = _signed(match[1], Fraction(f"{match[2] or 0}.{fixed or 0}") + repeated)
    if value is None:
        return None
    return Number(tight(text), value / 100 if percent else value, is_decimal, bool(percent))


def _digits(text: str) -> Fraction:
    return Fraction(text.replace(",", "").replace(" ", "").rstrip("."))


def _signed(sign: str, value: Fraction) -> Fraction:
    return -value if sign == "-" else value


@dataclass(frozen=True)
class Measure(Form):
    """A quantity and its unit."""

    quantity: Form
    unit: Unit


@dataclass(frozen=True)
class Based(Form):
    """Digits in a base: ``2516_8``."""

    digits: str
    base: int


@dataclass(frozen=True)
class Words(Form):
    """Words; ``said`` is them in lower case."""

    said: str


@dataclass(frozen=True)
class LetterChoice(Form):
    """A letter of a multiple choice, with what stands behind it: ``(C) 5``."""

    letter: str
    rest: Form | None


@dataclass(frozen=True)
class Items(Form):
    """Several forms.

    brackets: ``()``, ``[)`` and so on for a pair, a point or an interval; ``{}``: a set; empty: a list without any;
    ``u``: a union; ``:``: a ratio or a time of day.
    """

    brackets: str
    items: tuple[Form, ...]

    @property
    def is_ordered(self) -> bool:
        """Whether the order of the items means something."""
        return self.brackets not in ("", "{}", "u")

    @property
    def is_interval(self) -> bool:
        """Whether this can only be an interval or a union of some, and no point or pair."""
        if self.brackets == "u":
            return all(isinstance(each, Items) for each in self.items)
        return self.brackets in ("[)", "(]") or any(r"\infty" in each.text for each in self.items)


@dataclass(frozen=True)
class Matrix(Form):
    """Rows of forms."""

    rows: tuple[tuple[Form, ...], ...]


@dataclass(frozen=True)
class Named(Form):
    """``name = value``; also ``f(x) = value`` and ``x \\in value``."""

    name: str
    value: Form


@dataclass(frozen=True)
class Rounded(Form):
    """``exact \\approx decimal``."""

    exact: Form
    decimal: Form


@dataclass(frozen=True)
class Relation(Form):
    """An inequality as the interval of its variable; ``in_set``: written as ``\\{x | ...\\}``."""

    variable: str
    interval: Form
    in_set: bool = False


@dataclass(frozen=True)
class Expression(Form):
    """Anything else; ``latex`` is what sympy reads."""

    latex: str


_COMMAS = frozenset([",", ";"])
_ABOUT = frozenset([r"\approx"])
_CUP = frozenset([r"\cup"])
_AND_OR = re.compile(r",?\s*(?:\\text\{\s*,?\s*(?:and|or)\s*\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z]))\s*")
_GOES_ON = re.compile(rf"\s*(?:[(^_+\-/=,;&|]|\\cdot|{_AND_OR.pattern})")  # behind a letter that is no choice alone
_THOUSANDS = re.compile(  # with a name before or a unit behind: their commas part no list
    r"(|[^,]*(?:=|\\approx)\s*[-+]?)\s*(\d{1,3}(?:,\d{3})+(?:\.\d+)?)"
    r"(\s*(?:\\text\{[^{}]*\}|[^,\d(){}\[\]\\]*|\^\\circ|%)(?:\s*\^\s*\{?[23]\}?)?)"
)
_BASED = re.compile(r"(\d[0-9A-F]*(?:\.[0-9A-F]+)?)_\s*\{?\s*(\d+)\s*\}?", re.ASCII)
_BASED_WORDS = re.compile(r"(\d+)_\s*\{?\\text\{\s*(two|three|four|five|six|seven|eight|nine|ten)\s*\}\}?", re.ASCII)
_BASES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_CHOICE = re.compile(r"(?:\\text\{\s*)?\(([A-J])\)\s*\}?(?:\s*\}?)(.*)", re.DOTALL)
_CHOICE_POINT = re.compile(r"(?:\\text\{\s*)?([A-J])\s*[.:)]\s*\}?\s*(.*)", re.DOTALL)
_LETTER = re.compile(r"\\text\{\s*([A-Z])\s*\}|([A-Z])")
_WORDS = re.compile(r"\\text\{([^{}\\$]*[A-Za-z][^{}\\$]*)\}|((?=.*[A-Za-z]{3})[A-Za-z][A-Za-z'\u2019. -]*)")
_NAME = r"(?:\\?[A-Za-z]+(?:_(?:\{\w+\}|\w+))?(?:\([^()=]{1,12}\))?|\(\s*[A-Za-z](?:\s*,\s*[A-Za-z])+\s*\))"
_NAMED = re.compile(rf"({_NAME})\s*(?:=|\\in(?![A-Za-z]))\s*([^=]+)", re.DOTALL)
_SET_BUILDER = re.compile(r"\\\{\s*([A-Za-z])\s*(?:\\in\s*[^|:]*)?[|:]\s*(.+)\\\}", re.DOTALL)
_ORDER = re.compile(r"(<|>|\\le(?![A-Za-z])|\\ge(?![A-Za-z]))")
_CLOCK = re.compile(r"\d+(?:\s*:\s*\d+)+", re.ASCII)
_MATRIX = re.compile(r"\\begin\{pmatrix\}(.*)\\end\{pmatrix\}", re.DOTALL)


@lru_cache(maxsize=4096)
def read(text: str) -> Form:
    """What ``text``, the content of a box, says."""
    if (plain := plain_number(text)) is not None:
        return plain
    return _read(canonical(text))


def _read(text: str) -> Form:
    text = re.sub(r"^\s*\\approx\s*", "", ungrouped(text)).strip().rstrip(" .;,")
    if (value := number(text)) is not None:
        return value
    for choice in (_CHOICE, _CHOICE_POINT):
        if (match := choice.fullmatch(text)) and not _GOES_ON.match(match[2]):
            rest = match[2].strip()
            return LetterChoice(tight(text), match[1], _read(rest) if rest else None)
    if match := _THOUSANDS.fullmatch(text):
        text = f"{match[1]}{match[2].replace(',', '')}{match[3]}"
    parts = [part for half in _AND_OR.split(text) for part in split(half, _COMMAS)] if _is_list(text) else [text]
    parts = [each for part in parts if part.strip() for each in _both_signs(part)]
    if len(parts) > 1:
        forms = tuple(_read(part) for part in parts)
        if all(isinstance(form, Relation) for form in forms):
            return _union_of(text, forms)
        return Items(tight(text), "", forms)
    return _read_one((parts or [text])[0].strip())


def _is_list(text: str) -> bool:
    """Whether commas and words between items, and not between clauses, part ``text``."""
    return _WORDS.fullmatch(text) is None


def _both_signs(part: str) -> list[str]:
    if r"\pm" not in part:
        return [part]
    return [part.replace(r"\pm", a).replace(r"\mp", b) for a, b in (("+", "-"), ("-", "+"))]


def _union_of(text: str, forms: tuple[Form, ...]) -> Form:
    relations = [form for form in forms if isinstance(form, Relation)]
    if len({relation.variable for relation in relations}) > 1:
        return Expression(tight(text), text)
    return Relation(
        tight(text), relations[0].variable, Items(tight(text), "u", tuple(each.interval for each in relations))
    )


def _read_one(text: str) -> Form:
    """What ``text`` says, where it is not a list without brackets."""
    written = tight(text)
    if (value := number(text)) is not None:
        return value
    if match := _BASED.fullmatch(text):
        return Based(written, match[1], int(match[2]))
    if match := _BASED_WORDS.fullmatch(text):
        return Based(written, match[1], _BASES.index(match[2]))
    if _CLOCK.fullmatch(text):
        return Items(written, ":", tuple(_read_one(part) for part in text.split(":")))
    if written == r"\mathbb{R}":
        return _bracketed(r"(-\infty,\infty)", "()", r"-\infty,\infty")
    if match := _LETTER.fullmatch(text):
        return Expression(match[1] or match[2], match[1] or match[2])
    if match := _WORDS.fullmatch(text):
        return Words(written, _said(match[1] or match[2]))
    quantity, unit = split_unit(text)
    if unit is not None:
        return Measure(written, _read(quantity), unit)
    if match := _SET_BUILDER.fullmatch(text):
        condition = _read(match[2])
        if isinstance(condition, Relation) and condition.variable == match[1]:
            return Relation(written, condition.variable, condition.interval, in_set=True)
        return Expression(written, text)
    if len(sides := split(text, _ABOUT)) == 2 and all(side.strip() for side in sides):
        return Rounded(written, _read(sides[0]), _read(sides[1]))
    if match := _NAMED.fullmatch(text):
        return Named(written, tight(match[1]), _read(match[2]))
    if len(parts := split(text, _CUP)) > 1:
        return Items(written, "u", tuple(_read(part) for part in parts))
    if (relation := _relation(text)) is not None:
        return relation
    if (inner := outer_brackets(text)) is not None:
        return _bracketed(text, *inner)
    if (match := _MATRIX.fullmatch(text)) and "\\begin" not in match[1]:
        rows = [row for row in re.split(r"\\\\(?:\[[^\]]*\])?", match[1]) if row.strip()]
        return Matrix(written, tuple(tuple(_read(cell) for cell in row.split("&")) for row in rows))
    return Expression(written, text)


def _said(words: str) -> str:
    plain = re.sub(r"[^\w\s-]", "", words).strip()
    plain = re.sub(r"\s+", " ", plain)
    return plain.lower().removeprefix("the ") if len(plain) > 1 else plain


def _bracketed(text: str, brackets: str, inside: str) -> Form:
    parts = [part for part in split(inside, _COMMAS) if part.strip()]
    if brackets != "{}" and len(parts) < 2:
        return Expression(tight(text), text)
    items = tuple(_read_one(each.strip()) for part in parts for each in _both_signs(part))
    return Items(tight(text), brackets, items)


def _relation(text: str) -> Form | None:
    """``1 < x \\le 3`` and kin as an interval; None where a variable does not stand alone."""
    pieces = [piece.strip() for piece in _ORDER.split(text)]
    if len(pieces) not in (3, 5) or not all(pieces[::2]) or "=" in text or "\\ne" in text:
        return None
    sides = pieces[::2]
    signs = pieces[1::2]
    if signs[0] in (">", r"\ge"):
        sides = sides[::-1]
        signs = [{">": "<", r"\ge": r"\le"}.get(sign, "") for sign in reversed(signs)]
    if not all(sign in ("<", r"\le") for sign in signs):
        return None
    variable = re.compile(r"[A-Za-z]|\\[a-z]+")
    if len(sides) == 2:
        infinity = Expression(r"\infty", r"\infty")
        if variable.fullmatch(sides[0]):
            low: Form = Expression(r"-\infty", r"-\infty")
            return _interval(text, sides[0], low, _read_one(sides[1]), "(", "]" if signs[0] == r"\le" else ")")
        if variable.fullmatch(sides[1]):
            return _interval(text, sides[1], _read_one(sides[0]), infinity, "[" if signs[0] == r"\le" else "(", ")")
        return None
    if not variable.fullmatch(sides[1]):
        return None
    left = "[" if signs[0] == r"\le" else "("
    right = "]" if signs[1] == r"\le" else ")"
    return _interval(text, sides[1], _read_one(sides[0]), _read_one(sides[2]), left, right)


def _interval(text: str, variable: str, low: Form, high: Form, left: str, right: str) -> Relation:
    written = f"{left}{low.text},{high.text}{right}"
    return Relation(tight(text), variable, Items(written, left + right, (low, high)))
