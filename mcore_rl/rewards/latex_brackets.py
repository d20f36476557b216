"""LaTeX cut at the marks and brackets that stand outside all others."""

from __future__ import annotations

import re

# ``{`` and ``}`` without a backslash group characters and mean nothing to a reader.
_TOKEN = re.compile(r"\\(?:begin|end)\{[a-z]+\*?\}|\\[A-Za-z]+|\\.|.", re.DOTALL)
_OPENERS, _CLOSERS = (
    frozenset(["(", "[", "{", r"\{", r"\langle", r"\lfloor", r"\lceil"]),
    frozenset([")", "]", "}", r"\}", r"\rangle", r"\rfloor", r"\rceil"]),
)


def tokens(text: str) -> list[tuple[str, int]]:
    """The tokens of ``text`` with the number of brackets that are open before an opening or after a closing one."""
    depth, parts = 0, list[tuple[str, int]]()
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
