"""docs/simulation.md beside benchmarks/simulation.py: the tables that are quick enough to be simulated again."""

from __future__ import annotations

import pytest

from benchmarks import simulation
from tests.house.source import ROOT


def page() -> str:
    return (ROOT / "docs" / "simulation.md").read_text(encoding="utf-8")


@pytest.mark.tier("ci")
def test_the_published_run_is_foretold_as_the_page_says() -> None:
    rows = list(simulation.published())
    assert len(rows) == 3
    for mean, *cells in rows:
        assert f"| {int(mean):,} | {' | '.join(cells)} |" in page()
    assert simulation.planned().partition(": ")[2] in " ".join(page().split())
