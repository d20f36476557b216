"""docs/glossary.md: our words, each one sentence with a link; what it defines is used, what was asked for is there."""

from __future__ import annotations

import re
from functools import cache
from itertools import islice

from tests.house.source import ROOT, python_files, repository_files

GLOSSARY = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
ENTRY = re.compile(r"^- \*\*([^*]+)\*\*: (.+)$", re.MULTILINE)
# Words that a newcomer has asked for, or that the field uses in another sense.
ASKED = {
    "doctor", "episode", "family", "gate", "layer spec", "layout", "placement", "plan", "recipe", "rehearsal", "role",
    "rule", "rung", "shadow", "sidecar", "snapshot", "statement", "table", "tier", "verdict",
}  # fmt: skip


def entries() -> dict[str, str]:
    return dict(ENTRY.findall(GLOSSARY))


@cache
def texts() -> tuple[str, ...]:
    """Every page but the glossary, and every module, in lower case."""
    paths = [path for path in repository_files() if path.endswith(".md") and path != "docs/glossary.md"]
    return tuple(
        (ROOT / path).read_text(encoding="utf-8").lower() for path in [*paths, *python_files("mcore_rl", "tests")]
    )


def is_used(word: str) -> bool:
    """Whether two of these have the word or its plural."""
    either = rf"(?:{word}s?|{word.removesuffix('y')}ies)".replace(" ", "[ _]?")
    pattern = re.compile(rf"\b{either}\b")
    having = (text for text in texts() if pattern.search(text))
    return len(list(islice(having, 2))) == 2


def test_every_word_is_asked_for_in_order_once() -> None:
    words = [word for word, _ in ENTRY.findall(GLOSSARY)]
    assert words == sorted(set(words)) and set(words) >= ASKED
    assert len(words) == GLOSSARY.count("\n- "), "every item is a word"


def test_an_entry_is_one_sentence_with_a_link() -> None:
    wrong = {
        word: said
        for word, said in entries().items()
        if not (re.search(r"\]\([^)]+\)", said) and said.endswith(".") and ". " not in said and len(said) < 260)
    }
    assert wrong == {}


def test_what_is_defined_is_used() -> None:
    assert {word for word in entries() if not is_used(word)} == set()
    assert not is_used("gobbledygook")
