"""docs/glossary.md: our words, each one sentence with a link; what it defines is used, what was asked for is there."""

from __future__ import annotations

import re

from tests.house.source import ROOT, repository_files

GLOSSARY = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
ENTRY = re.compile(r"^- \*\*([^*]+)\*\*: (.+)$", re.MULTILINE)
# Words that a newcomer has asked for, or that the field uses in another sense.
ASKED = {
    "doctor", "episode", "family", "gate", "layer spec", "layout", "placement", "plan", "recipe", "rehearsal", "role",
    "rule", "rung", "shadow", "sidecar", "snapshot", "statement", "table", "tier", "verdict",
}  # fmt: skip


def entries() -> dict[str, str]:
    return dict(ENTRY.findall(GLOSSARY))


def uses(word: str) -> list[str]:
    """The pages and modules, but the glossary, that have the word or its plural."""
    plural = rf"(?:{word}s?|{word.removesuffix('y')}ies)".replace(" ", r"[ _]?")
    pattern = re.compile(rf"(?<![A-Za-z]){plural}(?![A-Za-z])", re.IGNORECASE)
    files = [path for path in repository_files() if path.endswith((".md", ".py")) and path != "docs/glossary.md"]
    return [path for path in files if pattern.search((ROOT / path).read_text(encoding="utf-8"))]


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
    assert {word for word in entries() if len(uses(word)) < 2} == set()
    assert len(uses("gobbledygook")) < 2
