r"""The answer of a text without a box: what its last sentence with *answer* says, else its last formula or number.

Markdown's marks are taken off first: ``The answer is **650**.`` says 650.  A statement counts only if it can be read as
an answer as a whole (``The answer is 5 or 6`` is a list, never 5), and one with *not* is no statement.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from mcore_rl.rewards.math_forms import Expression, Form, Relation, Words, inner, read
from mcore_rl.rewards.symbolic_process import ALGEBRA

TAIL = 2000  # characters of a response in which its answer is looked for
MAX_STATEMENT = 300  # characters of a statement
_FORMULA = re.compile(
    r"\$\$(.+?)\$\$|\\\[(.+?)\\\]|\\\((.+?)\\\)"
    r"|(?<![\\$])\$(?![\s$])((?:\\\$|[^$\n])+?)(?<![\s\\])\$(?!\d)|(?<![\\$])\$ ((?:\\\$|[^$\n])+?) \$(?!\d)",
    re.DOTALL,
)
# A formula's place while sentences are looked at.
_HELD = re.compile("\ue000(\\d+)\ue001")
_HELD_LIST = rf"{_HELD.pattern}(?:\s*(?:[,;]|,?\s*(?:and|or)\b)\s*{_HELD.pattern})*"
_FORMULAS = re.compile(_HELD_LIST)
_LAST_FORMULAS = re.compile(rf"({_HELD_LIST})[\s.!]*$")
_MARKS = re.compile(
    r"(?<![\w)}\ue001])\*\*|\*\*(?![\w({\\\ue000])|(?<!\w)__(?!_)|(?<!_)__(?!\w)|`+|^\s*#{1,6}\s+", re.MULTILINE
)
_SLANTED = re.compile(
    r"(?<![\w*\\)}\ue001])\*(?=[^\s*])([^*\n]*[^\s*])\*(?![\w*({\\\ue000])"
    r"|(?<![\w\\})])_(?=[^\s_])([^_\n]*[^\s_])_(?![\w{\\])"
)
_TAGS = re.compile(r"</?(?:b|i|u|em|strong|code|mark)>")
_LABELS = re.compile(r"<(?:answer|result|solution)>\s*")
_BLOCKS = re.compile(r"</?(?:answer|result|solution|think|reasoning|p|br|div) ?/?>")
_SUBJECT = r"(?:answers?|(?:correct|right|best|final)\s+(?:option|choice|result|value))\b"
_VERB = (
    r"(?:\b(?:is|are|equals|be)\b(?:\s+(?:thus|therefore|then|simply|indeed|exactly|about|approximately)\b)*\s*:?|[:=])"
)
_OPTION = r"(?:(?:option|choice)\s+(?=\(?(?-i:[A-J])\b))?"
_ANCHOR = re.compile(rf"\b{_SUBJECT}(?:[^.:=\n\ue000]{{0,80}}?{_VERB}|[ \t]*\n)\s*{_OPTION}", re.IGNORECASE)
_END = re.compile(r"[.!?](?=\s|$)|\n|$")
_REASON = re.compile(
    r",?\s+(?:since|because|as|which|due to)\b|,\s*(?:so|where|with|for|not|but|and (?:thus|so|not))\b"
)
_NOT = (
    r"(?:(?:(?:is|are|ca|wo|could|would)n['\u2019]t|cannot|can not|will not|could not)(?: be)?"
    r"|(?:is|are|be) (?:[a-z]+ly )?(?:not|never|neither|anything but))\b"
)
_SAYS = r"\b(?:is|are|equals|be)\s+\(?(?:[-+]?\d|(?-i:[A-J])\b)"  # what follows it denies something else
_DENIED = re.compile(  # the answer is not 5; 5 is not the answer
    rf"\b{_NOT} (?:the|an?|our) (?:\w+ )?answer\b|\b{_SUBJECT}(?:(?!{_SAYS})[^.:=\n\ue000]){{0,80}}?\b{_NOT}",
    re.IGNORECASE,
)
_SENTENCES = re.compile(r"(?<=[.!?])(?=\s)|(?<=\n)")
_BOUND = re.compile(
    r"(?:at (?:least|most)|(?:no )?(?:more|less|fewer|greater) than|between|over|under|up to|above|below)\b"
)
_SUM = re.compile(r"\A(?!.*(?<![A-Za-z\\])[A-Za-z].*=)(?=.*\d\s*=).*=\s*", re.DOTALL)  # 5 + 3 = 8 says 8
# What a sentence says about an answer instead of one.
_REMARK = re.compile(
    r"(?:in)?correct|right|wrong|clear|obvious|unique|obtained|found|given|known|below|above|reasonable|consistent|valid"
)
MAX_WORDS = 3  # of an answer in words


def stated(response: str) -> str | None:
    """The answer of a text without a box, as it is written; None if it has none."""
    formulas: list[str] = []

    def hold(match: re.Match[str]) -> str:
        formulas.append(next(group for group in match.groups() if group is not None).strip())
        return f"\ue000{len(formulas) - 1}\ue001"

    text = _FORMULA.sub(hold, re.sub("[\ue000\ue001\u201c\u201d]", "", response[-TAIL:]))
    text = _BLOCKS.sub("\n", _LABELS.sub("\nAnswer: ", _TAGS.sub("", text)))
    text = _SLANTED.sub(lambda match: match[1] or match[2], _MARKS.sub("", text))
    text = "".join(sentence for sentence in _SENTENCES.split(text) if not _DENIED.search(sentence))

    def put_back(part: str, form: Callable[[str], str] = str) -> str:
        return _HELD.sub(lambda match: form(formulas[int(match[1])]), part)

    in_words: str | None = None
    for anchor in reversed(list(_ANCHOR.finditer(text))):
        statement = _statement(text, anchor.end())
        said = _SUM.sub("", put_back(statement), count=1)
        if _BOUND.match(said):
            return said
        kind = _kind(said, is_formula=_FORMULAS.fullmatch(statement.strip()) is not None)
        if kind is Words:
            in_words = in_words or said
        elif kind is not None:
            return said
    if in_words is not None:
        return in_words
    if last := _LAST_FORMULAS.search(text):
        return _SUM.sub("", put_back(last[1]), count=1)
    return ALGEBRA.last_statement(put_back(text, "${}$".format)) if text.strip() else None


def _statement(text: str, start: int) -> str:
    """What follows an anchor, up to the end of its sentence or a reason."""
    end = _END.search(text, start)
    sentence = text[start : min(end.start() if end else len(text), start + MAX_STATEMENT)]
    return _REASON.split(sentence, maxsplit=1)[0]


def _kind(said: str, *, is_formula: bool) -> type[Form] | None:
    """``Words`` for an answer in words, ``Form`` for any other answer, None for none."""
    if not said.strip():
        return None
    form = read(said)
    if isinstance(form, Words) and not is_formula:
        return Words if len(form.said.split()) <= MAX_WORDS and not _REMARK.match(form.said) else None
    return Form if is_formula or _is_readable(form) else None


def _is_readable(form: Form) -> bool:
    """Whether sympy reads all that only sympy can in ``form``; words are none of it, and inequalities were read."""
    match form:
        case Relation():
            return True
        case Words():
            return False
        case Expression():
            return ALGEBRA.reads(form.latex)
    return all(map(_is_readable, inner(form)))
