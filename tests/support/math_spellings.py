r"""Ways to spell an answer again, and ways to change it, as functions of its LaTeX.

A spelling gives a text that says the same; a change gives one that says something else.  Both give None where they do
not apply.  They know nothing of the grader: they work on characters, so that they also apply to published answers.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

Edit = Callable[[str], str | None]

_INTEGER = re.compile(r"-?\d+")
_DECIMAL = re.compile(r"-?\d+\.\d+")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_FRACTION = re.compile(r"(-?)\\[dt]?frac\{(\d+)\}\{(\d+)\}")
_LIST = re.compile(r"[^,;()\[\]{}=]+(?:,[^,;()\[\]{}=]+)+")
_SET = re.compile(r"\\\{([^{}|:]+,[^{}|:]+)\\\}")
_TEXT = re.compile(r"\\(?:text|mbox|textbf|mathrm)\s?\{[^{}]*\}|[A-Za-z]{3,}")
_WORDS = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}|\\text|\\mbox|\\mathrm")
_PLAIN = re.compile(r"[0-9A-Za-z+\-*/^(){}\\ .]+")


def _only(pattern: re.Pattern[str], edit: Callable[[re.Match[str]], str | None]) -> Edit:
    """``edit`` for texts that match ``pattern`` as a whole."""

    def apply(text: str) -> str | None:
        match = pattern.fullmatch(text.strip())
        return None if match is None else edit(match)

    return apply


def _replaced(pattern: str, new: str | Callable[[re.Match[str]], str], count: int = 0) -> Edit:
    """Every match of ``pattern`` replaced; None where nothing changes."""

    def apply(text: str) -> str | None:
        edited = re.sub(pattern, new, text, count=count)
        return None if edited == text else edited

    return apply


def _is_sentence(text: str) -> bool:
    return len(re.findall(r"(?<![\\A-Za-z])[A-Za-z]{2,}", re.sub(r"\\[A-Za-z]+(\{[^{}]*\})?", " ", text))) > 2


def _tight(text: str) -> str | None:
    if _WORDS.search(text) or "\\ " in text or re.search(r"\d \d|\d \\d?frac|\d\s+\d", text) or "," in text:
        return None
    edited = re.sub(r"(?<!\\) +(?![A-Za-z])|(?<![\\A-Za-z]) +|(?<=[^A-Za-z\\]) +", "", text)
    return None if edited == text else edited


def _thousands(mark: str) -> Edit:
    def group(match: re.Match[str]) -> str | None:
        digits = match[0].lstrip("-")
        if len(digits) < 4 or digits.startswith("0"):
            return None
        return match[0][: -len(digits)] + f"{int(digits):,}".replace(",", mark)

    return _only(_INTEGER, group)


def _decimal_of(match: re.Match[str]) -> str | None:
    if int(match[3]) == 0:
        return None
    value = Fraction(int(match[1] + match[2]), int(match[3]))
    written = f"{float(value):.6f}".rstrip("0").rstrip(".")
    return written if Fraction(written) == value else None


def _fraction_of(match: re.Match[str]) -> str | None:
    value = Fraction(match[0])
    sign = "-" if value < 0 else ""
    return f"{sign}\\frac{{{abs(value.numerator)}}}{{{value.denominator}}}" if value.denominator > 1 else None


def _mixed_of(match: re.Match[str]) -> str | None:
    top, bottom = int(match[2]), int(match[3])
    if bottom == 0 or top <= bottom or top % bottom == 0:
        return None
    return f"{match[1]}{top // bottom}\\frac{{{top % bottom}}}{{{bottom}}}"


def _reversed(items: str) -> str:
    return ", ".join(item.strip() for item in reversed(items.split(",")))


def _list_reversed(match: re.Match[str]) -> str | None:
    text = match[0]
    grouped = re.fullmatch(r"-?\d{1,3}(,\d{3})+(\.\d+)?", text)
    return None if grouped or _is_sentence(text) or _WORDS.search(text) or "\\!" in text else _reversed(text)


def _named(text: str) -> str | None:
    if re.search(r"[=<>,;:]|\\(le|ge|ne|in|cup|text|approx|mbox|sim|pm)|\\\$|\$|%|\\begin", text) or _is_sentence(text):
        return None
    return (
        None
        if re.search(r"[x]|(?<![\\A-Za-z])[A-Za-z]{2,}", text) or re.fullmatch(r"\(?[A-J]\)?\.?", text)
        else f"x = {text}"
    )


def _left_right(text: str) -> str | None:
    if "\\left" in text or text.count("(") != text.count(")") or "(" not in text or _is_sentence(text):
        return None
    return text.replace("(", "\\left( ").replace(")", " \\right)")


def _unicode(text: str) -> str | None:
    table = {
        "\\pi": "\N{GREEK SMALL LETTER PI}",
        "\\infty": "\N{INFINITY}",
        "\\cup": "\N{UNION}",
        "\\leq": "\N{LESS-THAN OR EQUAL TO}",
        "\\geq": "\N{GREATER-THAN OR EQUAL TO}",
        "\\le ": "\N{LESS-THAN OR EQUAL TO}",
        "\\times": "\N{MULTIPLICATION SIGN}",
        "-": "\N{MINUS SIGN}",
    }
    edited = text
    if "\\begin" in text or ("\\pi" in text and re.search(r"\\pi[a-z]", text)):
        return None
    for old, new in table.items():
        edited = re.sub(re.escape(old.strip()) + ("(?![A-Za-z])" if old[0] == "\\" else ""), new, edited)
    return None if edited == text or _is_sentence(text) else edited


def _scientific(match: re.Match[str]) -> str:
    return f"{match[1]} \\times 10^{{{int(match[2])}}}"


SPELLINGS: dict[str, Edit] = {
    "as it is": lambda text: text,
    "a period": lambda text: None if text.endswith((".", ";", ",")) else f"{text}.",
    "a semicolon": lambda text: None if text.endswith((".", ";", ",")) else f"{text};",
    "dollars around": lambda text: None if "$" in text else f"${text}$",
    "lines around": lambda text: f"\n {text}\n",
    "thin spaces": _replaced(r"(?<![\\A-Za-z,]) (?![A-Za-z])", r"\\, "),
    "no spaces": _tight,
    r"\left and \right": _left_right,
    r"no \left, no \right": _replaced(r"\\(left|right)(?![A-Za-z.])\s?", ""),
    r"\dfrac": _replaced(r"\\frac", r"\\dfrac"),
    r"\tfrac": _replaced(r"\\[d]?frac", r"\\tfrac"),
    "short fractions": _replaced(r"\\frac\{(\d)\}\{(\d)\}", r"\\frac\1\2"),
    "a slash": _only(_FRACTION, lambda m: f"{m[1]}{m[2]}/{m[3]}"),
    "twice over twice": _only(_FRACTION, lambda m: f"{m[1]}\\frac{{{2 * int(m[2])}}}{{{2 * int(m[3])}}}"),
    "the sign above": _only(_FRACTION, lambda m: f"\\frac{{-{m[2]}}}{{{m[3]}}}" if m[1] else None),
    "a decimal of a fraction": _only(_FRACTION, _decimal_of),
    "a mixed number": _only(_FRACTION, _mixed_of),
    "a fraction of a decimal": _only(_DECIMAL, _fraction_of),
    "zeros": _only(_NUMBER, lambda m: m[0] + "0" if "." in m[0] else m[0] + ".00"),
    "a plus": _only(_NUMBER, lambda m: None if m[0].startswith("-") else f"+{m[0]}"),
    "commas": _thousands(","),
    "braced commas": _thousands("{,}"),
    "thin thousands": _thousands("\\,"),
    "close commas": _thousands(",\\!"),
    "bold": _only(_NUMBER, lambda m: f"\\mathbf{{{m[0]}}}"),
    "underlined": _only(_NUMBER, lambda m: f"\\underline{{{m[0]}}}"),
    "underlined and bold": _only(_NUMBER, lambda m: f"\\underline{{\\mathbf{{{m[0]}}}}}"),
    "coloured": lambda text: None if "$" in text else f"\\textcolor{{red}}{{{text}}}",
    "a colour for the rest": lambda text: None if "$" in text else f"{{\\color{{blue}} {text}}}",
    "a colour and its text": _only(_NUMBER, lambda m: f"\\color{{red}}{{{m[0]}}}"),
    "a coloured box": _only(_NUMBER, lambda m: f"\\colorbox{{yellow}}{{${m[0]}$}}"),
    "a large number": _only(_NUMBER, lambda m: f"\\Large {m[0]}"),
    "a bold number of old TeX": _only(_NUMBER, lambda m: f"\\bf {m[0]}"),
    "bold in Markdown": _only(_NUMBER, lambda m: f"**{m[0]}**"),
    "a word for a unit": _only(_NUMBER, lambda m: f"{m[0]} \\text{{ units}}"),
    "money": _only(_NUMBER, lambda m: None if m[0].startswith("-") else f"\\${m[0]}"),
    "the unit left out": _only(
        re.compile(r"(.*[\d}])\s*(?:\\[,;])?\s*\\(?:text|mbox)\{\s*[a-z. ]+\}(?:\^\{?[23]\}?)?"),
        lambda m: m[1] if not re.search(r"(or|and)", m[0]) else None,
    ),
    "upright units": _replaced(
        r"\\text(?=\{ ?(?:cm|m|km|kg|g|s|inches|feet|dollars|cents|units|hours|degrees)\})", r"\\mathrm"
    ),
    "a degree sign": _replaced(r"\s?\^\s?\{?\s?\\circ\s?\}?", "\N{DEGREE SIGN}"),
    "degrees left out": _only(
        re.compile(r"(-?[\d.]+|-?\\frac\{\d+\}\{\d+\})\s?\^\s?\{?\s?\\circ\s?\}?"), lambda m: m[1]
    ),
    "the word degrees": _only(
        re.compile(r"(-?[\d.]+)\s?\^\s?\{?\s?\\circ\s?\}?"), lambda m: f"{m[1]} \\text{{ degrees}}"
    ),
    "a bare percent sign": _only(re.compile(r"(-?[\d.]+)\s?\\%"), lambda m: f"{m[1]}%"),
    "a percentage as a decimal": _only(
        re.compile(r"(-?[\d.]+)\s?\\%"), lambda m: f"{float(Fraction(m[1]) / 100):.6f}".rstrip("0").rstrip(".")
    ),
    "a percentage without its sign": _only(re.compile(r"(-?[\d.]+)\s?\\%"), lambda m: m[1]),
    "the dollar sign left out": _only(re.compile(r"\\\$\s?([\d.,]+)"), lambda m: m[1]),
    "a power of ten": _only(re.compile(r"(-?\d+(?:\.\d+)?)e([+-]?\d+)"), _scientific),
    "a list turned round": _only(_LIST, _list_reversed),
    "a set turned round": _only(_SET, lambda m: f"\\{{{_reversed(m[1])}\\}}"),
    "a name": _named,
    "without its name": _only(re.compile(r"[xyn]\s?=\s?([^=,;]+)"), lambda m: None if _is_sentence(m[0]) else m[1]),
    r"\mathrm{i}": _only(re.compile(r"[-+\d\s]*\d\s?i"), lambda m: m[0].replace("i", "\\mathrm{i}")),
    "i before": _only(re.compile(r"(-?\d+)\s?\+\s?(\d+)\s?i"), lambda m: f"{m[2]}i + {m[1]}"),
    "characters for commands": _unicode,
    "a plus before infinity": _replaced(r"(?<![-+])\\infty", r"+\\infty"),
    "another matrix": _replaced(r"\{pmatrix\}", "{bmatrix}"),
    "braces at a base": _replaced(r"(?<=\d)_(\d)$", r"_{\1}"),
    "no braces at a base": _replaced(r"(?<=\d)_\{(\d+)\}$", r"_\1"),
    "a bold letter": _only(
        re.compile(r"\\text\{\(?([A-J])\)?\}|\(?([A-J])\)?"), lambda m: f"\\textbf{{({m[1] or m[2]})}}"
    ),
    "a letter in text": _only(re.compile(r"\(?([A-J])\)?"), lambda m: f"\\text{{{m[1]}}}"),
    "a word in text": _only(re.compile(r"[A-Z][a-z]{2,}(?: [a-z]+)*"), lambda m: f"\\text{{{m[0]}}}"),
    "a word in bold": _only(re.compile(r"\\text\{([A-Za-z ]+)\}"), lambda m: f"\\textbf{{{m[1].strip()}}}"),
    "a bare word": _only(re.compile(r"\\(?:text|mbox)\{([A-Za-z ]{3,})\}"), lambda m: m[1].strip()),
    "terms turned round": _only(
        re.compile(r"(\d*\\?[a-z]*(?:\{\d+\})?)\s?\+\s?(\d*\\?[a-z]*(?:\{\d+\})?)"),
        lambda m: f"{m[2].strip()} + {m[1].strip()}" if m[1].strip() and m[2].strip() else None,
    ),
}


def _number_changed(which: int, change: Callable[[str], str]) -> Edit:
    """The first or last run of digits changed."""

    def apply(text: str) -> str | None:
        runs = list(re.finditer(r"\d+", text))
        if not runs:
            return None
        run = runs[which]
        return text[: run.start()] + change(run[0]) + text[run.end() :]

    return apply


def _negated(text: str) -> str | None:
    if not re.match(r"-?\s?(\d|\\d?frac|\\sqrt|\\pi)", text) or re.search(
        r"[=,;:<>]|\\(text|mbox|le|ge|pm|cup|\$)", text
    ):
        return None
    if _is_sentence(text) or not re.search(r"[1-9a-z]", text) or re.search(r"(?<=.)[-+]", text) or "_" in text:
        return None
    return text[1:].lstrip() if text.startswith("-") else f"-{text}"


def _item_dropped(match: re.Match[str]) -> str | None:
    items = [item.strip() for item in match[0].split(",")]
    if re.fullmatch(r"-?\d{1,3}(,(\\!)?\d{3})+(\.\d+)?", match[0]) or _is_sentence(match[0]):
        return None
    return ", ".join(items[:-1]) if items[-1] not in items[:-1] else None


def _item_added(match: re.Match[str]) -> str | None:
    if re.fullmatch(r"-?\d{1,3}(,(\\!)?\d{3})+(\.\d+)?", match[0]):
        return None
    return f"{match[0]}, 9973"


def _last_number(text: str) -> str | None:
    """The number that today's extraction of a broken gold falls back to."""
    numbers = re.findall(r"-?\d+(?:\.\d+)?", text)
    plain = re.fullmatch(r"[^\d]{0,3}-?[\d.,\\!{}]+\s?[^\d]*|.*=\s?-?\d+(\.\d+)?|[^\d]*", text.strip())
    return (
        None
        if plain or "approx" in text or not numbers or len(numbers) < 2 or re.search(r"_\{?\d+\}?$", text)
        else str(numbers[-1])
    )


def _inverted(match: re.Match[str]) -> str | None:
    return f"{match[1]}\\frac{{{match[3]}}}{{{match[2]}}}" if int(match[2]) not in (0, int(match[3])) else None


def _letter_changed(match: re.Match[str]) -> str:
    letter = match[1] or match[2]
    return match[0].replace(letter, "B" if letter != "B" else "D")


def _word_changed(match: re.Match[str]) -> str:
    word = match[1]
    return match[0].replace(word, word[:-1] + ("b" if word[-1] != "b" else "c"))


def _anagram(match: re.Match[str]) -> str | None:
    word = match[1]
    turned = word[::-1]
    return match[0].replace(word, turned) if turned.lower() != word.lower() else None


_BRACKETS = {"(": "[", "[": "(", ")": "]", "]": ")"}
_INTERVAL = re.compile(r"(?:\\left)?[\[(][^,()\[\]]+,[^,()\[\]]+(?:\\right)?[\])]")

CHANGES: dict[str, Edit] = {
    "first number one more": _number_changed(0, lambda run: str(int(run) + 1)),
    "last number one more": _number_changed(-1, lambda run: str(int(run) + 1)),
    "last number with a digit more": _number_changed(-1, lambda run: f"{run}7"),
    "the sign": _negated,
    "an item dropped": _only(_LIST, _item_dropped),
    "an item added": _only(_LIST, _item_added),
    "an item of a set dropped": _only(
        _SET, lambda m: None if (cut := _item_dropped(re.match(r".*", m[1], re.S))) is None else f"\\{{{cut}\\}}"
    ),  # type: ignore[arg-type]
    "the left bracket": _only(_INTERVAL, lambda m: re.sub(r"[\[(]", lambda b: _BRACKETS[b[0]], m[0], count=1)),
    "the right bracket": _only(_INTERVAL, lambda m: m[0][:-1] + _BRACKETS[m[0][-1]]),
    "items of a pair exchanged": _only(
        re.compile(r"\(\s*([^,()]+?)\s*,\s*([^,()]+?)\s*\)"), lambda m: f"({m[2]}, {m[1]})" if m[1] != m[2] else None
    ),
    "the relation turned round": _replaced(r"(?<!\\left)<|>", lambda m: ">" if m[0] == "<" else "<", count=1),
    "a strict relation": _replaced(r"\\leq?(?![a-z])|\\geq?(?![a-z])", lambda m: "<" if "l" in m[0] else ">", count=1),
    "another sign between": _only(
        re.compile(r"[-\d\\{}\sa-z]*[\da-z}]\s*\+\s*[\d\\{}\sa-z]*[\da-z}]\s*"), lambda m: m[0].replace("+", "-", 1)
    ),
    "the root dropped": _only(
        re.compile(r"(-?\d*)\s?\\sqrt\{(\d+)\}"), lambda m: f"{m[1]}({m[2]})" if m[2] not in "01" else None
    ),
    r"\pi dropped": _only(re.compile(r"(-?\d+)\s?\\pi"), lambda m: m[1]),
    "the fraction turned over": _only(_FRACTION, _inverted),
    "ten times": _only(
        _NUMBER, lambda m: None if float(m[0]) == 0 else (m[0] + "0" if "." not in m[0] else str(Fraction(m[0]) * 10))
    ),
    "a thousandth more": _only(
        _NUMBER,
        lambda m: f"{m[0]}001" if re.fullmatch(r".*\.\d{1,4}", m[0]) else f"{m[0]}.001" if "." not in m[0] else None,
    ),
    "a power of ten more": _only(re.compile(r"(-?\d+(?:\.\d+)?)e([+-]?\d+)"), lambda m: f"{m[1]}e{int(m[2]) + 1}"),
    "another base": _replaced(r"(?<=\d)_\{?(\d+)\}?$", lambda m: f"_{{{int(m[1]) + 1}}}"),
    "another letter": _only(re.compile(r"\\text\{\(?([A-J])\)?\}|\(?([A-J])\)?"), _letter_changed),
    "another word": _only(
        re.compile(r"\\text\{\s?([A-Za-z ]{3,})\}|([A-Z][a-z]{2,})"), lambda m: _word_changed(m) if m[1] else None
    ),
    "a word backwards": _only(re.compile(r"\\(?:text|mbox)\{\s?([A-Za-z]{3,})\}"), _anagram),
    "another unit": _replaced(
        r"\\text\{ ?(cm|m|km|inches|feet|hours|minutes|cents)\}",
        lambda m: "\\text{ mm}" if m[1] in ("cm", "m", "km", "inches", "feet") else "\\text{ days}",
    ),
    "its last number alone": _last_number,
    "a factor t more": _only(
        re.compile(r"-?\d+|-?\d*\\sqrt\{\d+\}|-?\\frac\{\d+\}\{\d+\}"),
        lambda m: f"{m[0]} t" if m[0].strip("-") != "0" else None,
    ),
    "crossed out": _only(_NUMBER, lambda m: f"\\cancel{{{m[0]}}}"),
    "nothing": lambda text: "",
}
