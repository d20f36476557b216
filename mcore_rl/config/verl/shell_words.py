"""Cuts a shell script into words and operators, as they are written."""

from __future__ import annotations

import re
from dataclasses import dataclass

OPERATORS = ("&&", "||", ";;", ";", "|", "&", "\n", "(", ")", "<", ">")
REDIRECTION = re.compile(r"(?:\d*(?:>>|>\||>|<)|&>>?)(?:&[12-])?")


class UnclosedError(ValueError):
    """A quote or a bracket that never ends.  args: what."""


@dataclass(frozen=True)
class Token:
    """A word as it is written, an operator, or the words of ``NAME=( ... )``."""

    text: str
    is_operator: bool = False
    items: tuple[str, ...] | None = None


def tokenized(text: str) -> list[Token]:
    """The tokens of a script, without comments."""
    tokens, place = list[Token](), 0
    while place < len(text):
        if text[place] in " \t\r":
            place += 1
        elif text[place] == "#":
            place = _at(text, "\n", place)
        elif match := REDIRECTION.match(text, place):
            place = match.end()
            if not match[0].endswith(("&1", "&2", "&-")):
                place = _word_end(text, place + len(text[place:]) - len(text[place:].lstrip(" \t")))
        elif operator := next((each for each in OPERATORS if text.startswith(each, place)), None):
            tokens.append(Token(operator, is_operator=True))
            place += len(operator)
        else:
            end = _word_end(text, place)
            word, place = text[place:end], end
            if re.fullmatch(r"\w+\+?=", word) and text.startswith("(", place):
                end = _closed(text, place, "(", ")")
                inside = tokenized(text[place + 1 : end - 1])
                tokens.append(Token(word, items=tuple(each.text for each in inside if not each.is_operator)))
                place = end
            else:
                tokens.append(Token(word))
    return tokens


def _at(text: str, mark: str, place: int) -> int:
    at = text.find(mark, place)
    return len(text) if at < 0 else at


def _word_end(text: str, place: int) -> int:
    while place < len(text) and text[place] not in " \t\r\n;|&()<>":
        place = past(text, place)
    return place


def past(text: str, place: int) -> int:
    """The place after the character, quotation or expansion that begins at ``place``."""
    if text[place] == "\\":
        return place + 2
    if text[place] == "'":
        end = text.find("'", place + 1)
        if end < 0:
            raise UnclosedError("a '")
        return end + 1
    if text[place] == '"':
        place += 1
        while place < len(text) and text[place] != '"':
            place = place + 2 if text[place] == "\\" else past(text, place) if text[place] == "$" else place + 1
        if place >= len(text):
            raise UnclosedError('a "')
        return place + 1
    if text.startswith("$(", place):
        return _closed(text, place + 1, "(", ")")
    if text.startswith("${", place):
        return _closed(text, place + 1, "{", "}")
    if text[place] == "`":
        return _at(text, "`", place + 1) + 1
    return place + 1


def _closed(text: str, place: int, opening: str, closing: str) -> int:
    """The place after the bracket that closes the one at ``place``."""
    depth, begin = 0, place
    while place < len(text):
        if text[place] == opening:
            depth += 1
        elif text[place] == closing:
            depth -= 1
            if not depth:
                return place + 1
        elif text[place] == "#" and opening == "(" and text[place - 1] in " \t\n":
            place = _at(text, "\n", place)
            continue
        elif text[place] in "'\"\\":
            place = past(text, place)
            continue
        place += 1
    raise UnclosedError(f"the {opening} of {text[begin : begin + 20]!r}")
