from __future__ import annotations

import pytest

from mcore_rl.tracking.metrics import METRICS, PHASES, markdown, metric_of
from tests.house.source import ROOT


def test_every_metric_is_named_once_with_unit_and_words() -> None:
    assert len({row.key for row in METRICS}) == len(METRICS)
    assert all(row.unit and row.help and row.short for row in METRICS)
    assert all(row.better in (None, "up", "down") for row in METRICS)


@pytest.mark.parametrize(
    ("key", "row"),
    [
        ("reward/mean", "reward/mean"),
        ("val/openai/gsm8k/accuracy", "val/{data_source}/accuracy"),  # data sources have slashes
        ("val/math.dapo+x/response_length", "val/{data_source}/response_length"),
        ("router/load_max", "router/load_max"),  # itself before its family
        ("router/dropped", "router/{name}"),
        ("verifier/loss", "{role}/loss"),
        ("verifier/says_right", "{role}/{metric}"),
        ("time/validate", "time/validate"),
        ("time/validate/generate", "time/{phase}/{part}"),
    ],
)
def test_a_key_has_its_row(key: str, row: str) -> None:
    assert metric_of(key).key == row


@pytest.mark.parametrize(
    "key", ["reward/maen", "reward/mean/", "val//accuracy", "val/accuracy", "critic/los", "time/lunch", "", "step"]
)
def test_an_unknown_key_is_refused_with_the_remedy(key: str) -> None:
    with pytest.raises(AssertionError, match=r"no such metric. Name it in mcore_rl/tracking/metrics.py"):
        metric_of(key)


def test_every_phase_has_a_metric() -> None:
    assert all(metric_of(f"time/{phase}").unit == "s" for phase in PHASES)


def test_the_documentation_holds_the_table() -> None:
    page = (ROOT / "docs/metrics.md").read_text()
    assert page.endswith(markdown()), "write it: python -c 'from mcore_rl.tracking.metrics import markdown; ...'"
    lines = markdown().splitlines()[2:]
    assert len(lines) == len(METRICS)
    assert all(line.replace("\\|", "").count("|") == 6 for line in lines)
