"""What each key of a configuration means: the entries of the docstrings of its dataclasses.

An entry begins a line, or follows a sentence and two spaces, with the names of fields and a colon.  It ends at the next
entry or at an empty line:

    train_files, val_files: parquet files, read in this order.
    limit_s: seconds after which any call counts as hung; 0: no call ever does.

A subclass has the entries of its bases.  A field whose values are an Enum needs none if the Enum's docstring says all.
docs/configuration.md is made of them.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any

ENTRY = re.compile(r"(?:^ *|(?<=\.  ))((?:\w+, )*\w+): ", re.MULTILINE)
WORDS = {"None": "`null`", "True": "`true`", "False": "`false`"}
SPECIAL = re.compile(r"\b(?:None|True|False)\b|[<*]")


def in_markdown(text: str) -> str:
    """A docstring in one line of markdown, in the words of yaml."""
    line = re.sub(r"``([^`]+)``", r"`\1`", " ".join(text.split()))
    pieces = line.split("`")  # every second one is code
    pieces[::2] = [SPECIAL.sub(lambda word: WORDS.get(word[0], f"\\{word[0]}"), each) for each in pieces[::2]]
    return "`".join(pieces).replace("|", "\\|")


def _entries(schema: type[Any]) -> tuple[str, dict[str, str]]:
    """(what the docstring of ``schema`` says before its first entry, its entries), without those of its bases."""
    names = {each.name for each in fields(schema)}
    text = inspect.cleandoc(schema.__doc__ or "")
    starts = [match for match in ENTRY.finditer(text) if set(match[1].split(", ")) <= names]
    ends = [*(match.start() for match in starts), len(text)][1:]
    before = text[: starts[0].start()] if starts else text
    made = dict[str, str]()
    for match, end in zip(starts, ends, strict=True):
        named, entry = match[1].split(", "), text[match.end() : end].partition("\n\n")[0]
        several = f"{', '.join(f'``{name}``' for name in named)}: " if len(named) > 1 else ""
        made |= dict.fromkeys(named, several + entry)
    return before, made


@cache
def entries(schema: type[Any]) -> dict[str, str]:
    """The entry of each field of a dataclass that has one, as markdown."""
    classes = [each for each in reversed(schema.__mro__) if is_dataclass(each) and "__doc__" in vars(each)]
    return {name: in_markdown(text) for each in classes for name, text in _entries(each)[1].items()}


def about(schema: type[Any]) -> str:
    """What the docstring of a dataclass says of the whole group, as markdown."""
    return " ".join(in_markdown(each) for each in _entries(schema)[0].split("\n\n") if each.strip())


def meaning(schema: type[Any], name: str, kind: Any) -> str:
    """What the field ``name`` of ``schema`` means, as markdown; "" if nothing says so.  kind: of its values."""
    entry = entries(schema).get(name, "")  # type: ignore[arg-type]  # a class is hashable
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        return entry
    values = in_markdown(kind.__doc__ or "")
    return f"{re.sub(f'see `{kind.__name__}`[.;]?', '', entry).strip()} {values}".strip()
