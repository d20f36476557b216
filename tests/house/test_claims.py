"""docs/testing.md: every claim of the README and of docs/features.md has a test of `make test`, and each is there."""

from __future__ import annotations

import ast
import re

import pytest

from tests.house.source import ROOT
from tests.support.tiers import COLLECTED, TIERS, is_whole_tier

LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")


def cells(text: str) -> list[list[str]]:
    """Of every line of every table of a page, without links; headings too."""
    lines = [line for line in text.splitlines() if line.startswith("|") and not line.startswith("|---")]
    return [[LINK.sub(r"\1", cell).strip() for cell in line.strip("|").split("|")] for line in lines]


def claims() -> set[str]:
    """The bold words before the first heading of the README, and the first cells of its tables and the features'."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    bold = {" ".join(words.split()) for words in re.findall(r"\*\*(.+?)\*\*", readme.partition("\n## ")[0], re.DOTALL)}
    features = (ROOT / "docs" / "features.md").read_text(encoding="utf-8")
    return bold | {row[0] for row in [*cells(readme), *cells(features)]} - {"part", "machine"}


def table() -> list[tuple[str, str, str]]:
    """(claim, test, tier)"""
    rows = [row for row in cells((ROOT / "docs" / "testing.md").read_text(encoding="utf-8")) if "tests/" in row[1]]
    return [(claim, test.strip("`"), tier) for claim, test, tier in rows]


def test_every_claim_has_a_test_that_make_test_runs() -> None:
    assert len(claims()) > 15
    assert {claim for claim, _, _ in table()} == claims()
    assert {claim for claim, _, tier in table() if tier in ("check", "test")} == claims()
    assert {tier for _, _, tier in table()} == set(TIERS)


def test_the_readme_is_short_and_no_part_is_told_of_twice() -> None:
    pages = [(ROOT / page).read_text(encoding="utf-8") for page in ("README.md", "docs/features.md")]
    readme, features = ([row[0] for row in cells(page)] for page in pages)
    assert len(readme) <= 15 + len(("part", "machine"))
    assert set(readme) & set(features) == {"part"}


@pytest.mark.parametrize("test", sorted({test for _, test, _ in table()}))
def test_every_test_is_there_and_of_its_tier(test: str, request: pytest.FixtureRequest) -> None:
    """Its tier is held where it was collected: whenever a whole tier is run, or it was named beside this one."""
    path, _, name = test.partition("::")
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    functions = {node.name for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, kinds)}
    assert not name or name.partition("[")[0] in functions
    collected = request.config.stash[COLLECTED]
    tiers = {collected[each] for each in collected if each == test or each.startswith((f"{test}[", f"{test}::"))}
    if tiers or is_whole_tier(request.config):
        said = {tier for _, other, tier in table() if other == test}
        assert said == {min(tiers, key=TIERS.index)}
