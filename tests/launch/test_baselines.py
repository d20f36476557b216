"""docs/baselines.md is what tools/baselines.py writes, and what it says of a run of our own."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_rl.config.recipe import PublishedConfig
from tools import baselines


def test_the_page_is_up_to_date() -> None:
    """Else: python tools/baselines.py."""
    assert baselines.PAGE.read_text(encoding="utf-8") == baselines.page()


@pytest.mark.parametrize(
    ("score", "of_run", "said"),
    [
        (71.0, "best", "reached: best 70.0, final 68.0 after 1,120 steps, 8 MI300X"),
        (72.1, "best", "not reached: best 70.0"),
        (70.5, "", "reached: best 70.0"),
        (70.5, "final", "not reached: best 70.0"),
        (None, "", "best 70.0, final 68.0"),
    ],
)
def test_a_verdict_holds_the_best_against_the_best_and_the_last_against_the_last(
    score: float | None, of_run: str, said: str, tmp_path: Path
) -> None:
    published = PublishedConfig(score=score, of_run=of_run)
    assert baselines.verdict("x", published, tmp_path) == "no run yet"
    (tmp_path / "x.yaml").write_text("{hardware: 8 MI300X, commit: abc, steps: 1120, best: 70.0, final: 68.0}\n")
    assert baselines.verdict("x", published, tmp_path).startswith(said)
