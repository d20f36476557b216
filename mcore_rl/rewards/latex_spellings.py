r"""One spelling for what LaTeX spells in many ways: ``\dfrac12`` and ``\frac {1}{2}`` become ``\frac{1}{2}``.

The table ``SPELLINGS`` is all there is: rows are applied from the first to the last, to the text of an answer and to
that of the ground truth.  It only rewrites characters; ``math_forms`` reads what the text says.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache

_CHARACTERS = {
    "\N{MINUS SIGN}": "-",
    "\N{EN DASH}": "-",
    "\N{MULTIPLICATION SIGN}": r"\times ",
    "\N{MIDDLE DOT}": r"\cdot ",
    "\N{DIVISION SIGN}": "/",
    "\N{GREEK SMALL LETTER PI}": r"\pi ",
    "\N{INFINITY}": r"\infty ",
    "\N{DEGREE SIGN}": r"^\circ ",
    "\N{LESS-THAN OR EQUAL TO}": r"\le ",
    "\N{GREATER-THAN OR EQUAL TO}": r"\ge ",
    "\N{NOT EQUAL TO}": r"\ne ",
    "\N{ALMOST EQUAL TO}": r"\approx ",
    "\N{PLUS-MINUS SIGN}": r"\pm ",
    "\N{UNION}": r"\cup ",
    "\N{INTERSECTION}": r"\cap ",
    "\N{ELEMENT OF}": r"\in ",
    "\N{EMPTY SET}": r"\emptyset ",
    "\N{SQUARE ROOT}": r"\sqrt ",
    "\N{SUPERSCRIPT TWO}": "^2",
    "\N{SUPERSCRIPT THREE}": "^3",
    "\N{VULGAR FRACTION ONE HALF}": r"\frac{1}{2}",
    "\N{VULGAR FRACTION ONE QUARTER}": r"\frac{1}{4}",
    "\N{VULGAR FRACTION THREE QUARTERS}": r"\frac{3}{4}",
    "\N{GREEK SMALL LETTER THETA}": r"\theta ",
    "\N{DOUBLE-STRUCK CAPITAL R}": r"\mathbb{R}",
    "\N{FULLWIDTH COMMA}": ",",
    "\N{FULLWIDTH COLON}": ":",
    "\N{FULLWIDTH LEFT PARENTHESIS}": "(",
    "\N{FULLWIDTH RIGHT PARENTHESIS}": ")",
    "\N{NO-BREAK SPACE}": " ",
    "\N{THIN SPACE}": " ",
    "\N{NARROW NO-BREAK SPACE}": " ",
}


@dataclass(frozen=True)
class Spelling:
    """One row: every match of ``pattern`` becomes ``new``.

    example: (a text, what this row alone makes of it).  reason: why both say the same.
    """

    pattern: str
    new: str | Callable[[re.Match[str]], str]
    example: tuple[str, str]
    reason: str

    @cached_property
    def compiled(self) -> re.Pattern[str]:
        """The pattern, compiled once."""
        return re.compile(self.pattern)

    def apply(self, text: str) -> str:
        """``text`` by this row alone."""
        return self.compiled.sub(self.new, text)


_GROUP = r"\{((?:[^{}]|\{[^{}]*\})*)\}"  # braces around what has braces of one level at most
_DEEP = r"\{((?:[^{}]|\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\})*)\}"  # of three levels at most
_SIZES = r"(?:tiny|scriptsize|footnotesize|small|normalsize|large|Large|LARGE|huge|Huge)"
_OLD_FONTS = r"(?:bf|it|rm|bfseries|itshape|boldmath)"
_POWERS = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_WORD_FONTS = r"(?:text|mbox|hbox|textbf|textit|textrm|textnormal|textsf|texttt|emph|operatorname|rm|bf)"
_MATH_FONTS = r"(?:mathrm|mathbf|mathit|mathsf|boldsymbol|bm|rm|bf|it)"


def _plain_or_text(match: re.Match[str]) -> str:
    inside = match[1].strip()
    is_words = re.search(r"[A-Za-z]{2}", inside) is not None and "\\" not in inside
    return f"\\text{{{match[1]}}}" if is_words or not inside else inside


def _braced(match: re.Match[str]) -> str:
    return f"\\frac{{{match[1] or match[2]}}}{{{match[3] or match[4]}}}"


SPELLINGS = (
    Spelling(
        "[" + "".join(_CHARACTERS) + "]",
        lambda match: _CHARACTERS[match[0]],
        ("\N{MINUS SIGN}3\N{GREEK SMALL LETTER PI}", r"-3\pi "),
        "characters that stand for a command",
    ),
    Spelling(r"\*\*(.+?)\*\*", r"\1", ("**18**", "18"), "Markdown's bold type"),
    Spelling(
        r"^\s*(?:`+|__|[*_])\s*([^`*_]+?)\s*(?:`+|__|[*_])\s*$",
        r"\1",
        ("`18`", "18"),
        "Markdown's other marks",
    ),
    Spelling(r"\\?\$|(?<!\\)\\[()\[\]]", "", (r"$\$5$", "5"), "signs of formulas and of money"),
    Spelling(
        rf"\\(?:textcolor|colorbox)\s*(?:\[[A-Za-z]+\])?\{{[^{{}}]*\}}\s*{_DEEP}",
        r"\1",
        (r"\textcolor{red}{650}", "650"),
        "colours",
    ),
    Spelling(r"\\color\s*(?:\[[A-Za-z]+\])?\{[^{}]*\}\s*", "", (r"{\color{red} 650}", "{650}"), "colours of the rest"),
    Spelling(rf"\\(?:underline|uline|ensuremath)\s*{_DEEP}", r"\1", (r"\underline{650}", "650"), "lines below"),
    Spelling(rf"\\{_SIZES}(?![A-Za-z])\s*", "", (r"\Large 650", "650"), "size of letters"),
    Spelling(r"\\pounds|[\u20ac\u00a3\u00a5]", "", ("\N{EURO SIGN}5", "5"), "signs of money"),
    Spelling(
        r"\\(?:displaystyle|textstyle|limits|nolimits)(?![A-Za-z])", "", (r"\displaystyle 5", " 5"), "size of type"
    ),
    Spelling(
        r"\\(?:left|right|middle|[bB]igg?[lrm]?)(?![A-Za-z])\s*\.?",
        "",
        (r"\left( 1, 2\right)", "( 1, 2)"),
        "size of brackets",
    ),
    Spelling(r"(?<=\d)\s*(?:\{,\}|,\s*\\[!,]|\\,)\s*(?=\d{3}(?!\d))", ",", (r"1{,}000", "1,000"), "thousands"),
    Spelling(r",?\s*\\q?quad(?![A-Za-z])", ", ", (r"y=x \quad y=2x", "y=x,  y=2x"), "a wide space parts answers"),
    Spelling(
        r"(?<!\\)\\[!,;:> ]|\\hspace\*?\{[^{}]*\}|~",
        " ",
        (r"3\ \text{cm}", r"3 \text{cm}"),
        "space",
    ),
    Spelling(r"\\[dtc]frac(?![A-Za-z])", r"\\frac", (r"\dfrac12", r"\frac12"), "size of fractions"),
    Spelling(
        rf"\\{_WORD_FONTS}\s*{_GROUP}",
        r"\\text{\1}",
        (r"\textbf {(C)}", r"\text{(C)}"),
        "fonts of words",
    ),
    Spelling(
        rf"\\{_MATH_FONTS}\s*{_GROUP}",
        _plain_or_text,
        (r"6-5\mathrm{i}", "6-5i"),
        "fonts of letters; with several letters it is a word, mostly a unit",
    ),
    Spelling(r"\{\\(?:rm|bf|it)\s+([^{}]*)\}", r"\\text{\1}", (r"{\rm cm}", r"\text{cm}"), "fonts of old TeX"),
    Spelling(
        rf"\\{_OLD_FONTS}(?![A-Za-z])\s*(?=[^\s{{])", "", (r"\bf 650", "650"), "fonts of old TeX, of all that follows"
    ),
    Spelling(r"\\text\{\s*([-+]?\d[\d.,]*)\s*\}", r"\1", (r"\text{42}", "42"), "a number as a word"),
    Spelling(
        r"\\text\{\s*([-+]?\d[\d.,]*) ([A-Za-z ]+)\}",
        r"\1\\text{\2}",
        (r"\text{18 apples}", r"18\text{apples}"),
        "a number as a word",
    ),
    Spelling(
        r"(?<=\d)\s*(?:\\text\{\s*)?(?<![A-Za-z])(thousand|million|billion|trillion)(?![A-Za-z])\s*\}?",
        lambda match: f"\\times 10^{{{_POWERS[match[1]]}}}",
        ("18 million", r"18\times 10^{6}"),
        "powers of ten as words",
    ),
    Spelling(
        r"\\([dt]?binom)\s*(\d)\s*(\d)",
        r"\\binom{\2}{\3}",
        (r"\binom52", r"\binom{5}{2}"),
        "braces that TeX does not need",
    ),
    Spelling(r"\\textcircled\{(\d)\}", r"(\1)", (r"\textcircled{2}", "(2)"), "numbers in circles"),
    Spelling(
        rf"\\frac\s*(?:(\d)|{_GROUP})\s*(?:([\dA-Za-z])|{_GROUP})",
        _braced,
        (r"\frac{3}4", r"\frac{3}{4}"),
        "braces that TeX does not need",
    ),
    Spelling(r"\\sqrt\s*([\dA-Za-z])", r"\\sqrt{\1}", (r"\sqrt3", r"\sqrt{3}"), "braces that TeX does not need"),
    Spelling(r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}", (r"\sqrt (x+1)", r"\sqrt{x+1}"), "brackets of a root"),
    Spelling(
        r"\^\s*\{\s*\\circ\s*\}|\^\s*\\circ(?![A-Za-z])|\\degree(?![A-Za-z])",
        r"^\\circ ",
        (r"90^{\circ}", r"90^\circ "),
        "degrees",
    ),
    Spelling(r"\\(?:leqslant|leqq|leq)(?![A-Za-z])|<=", r"\\le ", (r"x\leq 3", r"x\le  3"), "names of a relation"),
    Spelling(r"\\(?:geqslant|geqq|geq)(?![A-Za-z])|>=", r"\\ge ", (r"x\geqslant 3", r"x\ge  3"), "names of a relation"),
    Spelling(r"\\(?:neq|not\s*=)(?![A-Za-z])", r"\\ne ", (r"x\neq 3", r"x\ne  3"), "names of a relation"),
    Spelling(r"\\lt(?![A-Za-z])", "<", (r"x \lt 3", "x < 3"), "names of a relation"),
    Spelling(r"\\gt(?![A-Za-z])", ">", (r"x \gt 3", "x > 3"), "names of a relation"),
    Spelling(r"\\(?:mid|vert|lvert|rvert)(?![A-Za-z])", "|", (r"\{x\mid x<1\}", r"\{x| x<1\}"), "names of a bar"),
    Spelling(r"\\lbrace(?![A-Za-z])", r"\\{", (r"\lbrace 1", r"\{ 1"), "names of a brace"),
    Spelling(r"\\rbrace(?![A-Za-z])", r"\\}", (r"1\rbrace", r"1\}"), "names of a brace"),
    Spelling(r"\\varnothing(?![A-Za-z])|\\\{\s*\\\}", r"\\emptyset", (r"\varnothing", r"\emptyset"), "the empty set"),
    Spelling(
        r"\\(?:Bbb|R)(?![A-Za-z])\s*R?|\\mathbb\s*R", r"\\mathbb{R}", (r"\mathbb R", r"\mathbb{R}"), "the real numbers"
    ),
    Spelling(
        r"(?<![^(\[{,;\s])(\s*)(?<![\w})\]] )\+\s*(?=\\infty)",
        r"\1",
        (r"(0,+\infty)", r"(0,\infty)"),
        "infinity is positive",
    ),
    Spelling(
        r"[\[(]?\s*\\begin\{(?:[pbB]?matrix|array)\}(?:\{[lcr| ]*\})?",
        r"\\begin{pmatrix}",
        (r"\begin{bmatrix}", r"\begin{pmatrix}"),
        "brackets of a matrix",
    ),
    Spelling(
        r"\\end\{(?:[pbB]?matrix|array)\}\s*[\])]?",
        r"\\end{pmatrix}",
        (r"\end{array}]", r"\end{pmatrix}"),
        "brackets of a matrix",
    ),
    Spelling(
        r"\\(?:ast|star)(?![A-Za-z])|(?<=[\w}) ])\*(?=[\w\\({ ])",
        r"\\cdot ",
        ("2*x", r"2\cdot x"),
        "signs of a product",
    ),
    Spelling(
        r"\\(sin|cos|tan|cot|sec|csc|ln|log)\s*\^\s*(\d)",
        r"\\\1^{\2}",
        (r"\sin^2 x", r"\sin^{2} x"),
        "braces that TeX does not need",
    ),
    Spelling(
        r"(?<![\\A-Za-z])(sin|cos|tan|ln|log)(?=\s*[({\d\\])",
        r"\\\1 ",
        ("ln(2)", r"\ln (2)"),
        "functions without a backslash",
    ),
    Spelling(
        r"\\exp(?![A-Za-z])\s*(?:\{([^{}]*)\}|\(([^()]*)\))",
        lambda m: f"e^{{{m[1] or m[2]}}}",
        (r"\exp{x}", "e^{x}"),
        "names of the exponential",
    ),
    Spelling(r"\\%|\\text\{\s*(?:percent|per cent)\s*\}|(?<=\d)\s*percent(?![a-z])", "%", (r"75\%", "75%"), "percent"),
    Spelling(
        r"(?<=[\d}])\s*\^\s*\{?\\text\{\s*(?:st|nd|rd|th)\s*\}\}?|(?<=\d)(?:st|nd|rd|th)(?![A-Za-z])",
        "",
        ("6th", "6"),
        "ordinal numbers",
    ),
    Spelling(r"\+\s*-\s*(?=\d)", "- ", ("11i + -3", "11i - 3"), "one sign for two"),
    Spelling(r"\s+", " ", ("1  +  2", "1 + 2"), "space"),
    Spelling(r"^[\s,]+|[\s.;,:]+$", "", (" 42. ", "42"), "the end of a sentence"),
)


@lru_cache(maxsize=8192)
def canonical(text: str) -> str:
    """``text`` in the one spelling of ``SPELLINGS``."""
    for spelling in SPELLINGS:
        text = spelling.apply(text)
    return text
