"""Every key of every command says in a docstring what it means."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from typing import Any, get_type_hints

import pytest

from mcore_rl.config.bounds import setting_of
from tools.configuration import COMMANDS, about, entries, in_markdown, meaning


def groups(schema: type[Any]) -> set[type[Any]]:
    """``schema`` and every dataclass below it."""
    hints = get_type_hints(schema, include_extras=True)
    below = [groups(hints[each.name]) for each in fields(schema) if is_dataclass(hints[each.name])]  # type: ignore[arg-type]
    return {schema}.union(*below)


def unexplained(schema: type[Any]) -> list[str]:
    hints = get_type_hints(schema, include_extras=True)
    return [
        each.name
        for each in fields(schema)
        if not is_dataclass(hints[each.name]) and not each.metadata.get("omegaconf_ignore")
        if not meaning(schema, each.name, setting_of("", hints[each.name], None).kind)
    ]


@pytest.mark.parametrize("command", list(COMMANDS))
def test_every_key_has_a_meaning(command: str) -> None:
    missing = {each.__qualname__: unexplained(each) for each in groups(COMMANDS[command])}
    assert {name: keys for name, keys in missing.items() if keys} == {}, "write `KEY: what it is` into the docstring"


class Kind(Enum):
    """One of two.

    ``a``: the first.
    """

    a = "a"


@dataclass(kw_only=True)
class Base:
    """What all have.

    size: bytes | None is any, as in ``x | None``.
    first, second: of two.  third: a*b, if True.
    """

    size: int = 1
    first: int = 1
    second: int = 1
    third: int = 1
    silent: int = 1


@dataclass(kw_only=True)
class Derived(Base):
    """A thing: with a colon.

    More of it, over
    two lines.

    size: of its own,
        and indented.

    Not of size any more.
    kind: see ``Kind``.
    other: see ``Kind``; null is none.
    """

    kind: Kind = Kind.a
    other: Kind = Kind.a
    bare: Kind = field(default=Kind.a)


def test_entries_begin_lines_or_follow_sentences_and_end_with_a_paragraph() -> None:
    assert entries(Base) == {
        "size": "bytes \\| `null` is any, as in `x \\| None`.",
        "first": "`first`, `second`: of two.",
        "second": "`first`, `second`: of two.",
        "third": "a\\*b, if `true`.",
    }
    assert entries(Derived)["size"] == "of its own, and indented."
    assert unexplained(Base) == ["silent"] == unexplained(Derived)
    assert about(Derived) == "A thing: with a colon. More of it, over two lines."


def test_an_enum_says_its_values() -> None:
    assert meaning(Derived, "kind", Kind) == meaning(Derived, "bare", Kind) == "One of two. `a`: the first."
    assert meaning(Derived, "other", Kind) == "`null` is none. One of two. `a`: the first.".replace("`null`", "null")


def test_markdown_keeps_code_as_it_is() -> None:
    assert in_markdown("``<a>`` <b> ``None`` None") == "`<a>` \\<b> `None` `null`"
