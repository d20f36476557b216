"""Where PASS ends and FAIL begins."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mcore_rl.config.engine import Device
from mcore_rl.doctor.checks import (
    ACCELERATOR,
    NODES,
    THOROUGH,
    ExpectedRate,
    HealthCheck,
    Subject,
    Verdict,
    judged,
    problem_diagnosis,
    worst,
)
from mcore_rl.parallel.device import detect


@pytest.mark.parametrize(
    ("value", "verdict"),
    [(400.0, Verdict.PASS), (280.0, Verdict.PASS), (279.9, Verdict.WARN), (120.0, Verdict.WARN), (119.9, Verdict.FAIL)],
)
def test_a_rate_beside_what_is_expected(value: float, verdict: Verdict) -> None:
    expected = ExpectedRate(value=400.0, source="the yaml", passes=0.7, fails=0.3)
    diagnosis = judged("links", value, "GB/s", expected, "Mend them", key="links_gb_s")
    assert diagnosis.verdict is verdict
    assert diagnosis.numbers == {"links_gb_s": value}
    assert diagnosis.expected == "at least 280 GB/s, 70% of 400 (the yaml)"
    assert diagnosis.remedy == ("" if verdict is Verdict.PASS else "Mend them")


def test_a_rate_with_nothing_to_compare_is_told_and_passes() -> None:
    expected = ExpectedRate(value=None, source="no --cluster", passes=1.0, fails=1.0)
    diagnosis = judged("links", 0.001, "GB/s", expected, "Mend them", key="links_gb_s")
    assert (diagnosis.verdict, diagnosis.expected) == (Verdict.PASS, "not judged: no --cluster")


def test_what_a_check_needs_is_said_in_words(tmp_path: Path) -> None:
    subject = Subject(platform=detect(Device.cpu), directory=tmp_path, quick=True)
    check = HealthCheck(name="x", about="", limit_s=1, run=lambda *_: [], needs=(THOROUGH, ACCELERATOR))
    assert check.lacking(subject) == "left out by --quick"
    assert replace(check, needs=(NODES,)).lacking(subject) == "needs two nodes: --nodes N"
    assert replace(check, needs=()).lacking(subject) == ""


def test_problems_come_with_the_remedy_and_none_is_a_pass() -> None:
    diagnosis = problem_diagnosis("limits", ["few", "small"], "all", "more", "Set them", verdict=Verdict.WARN)
    assert (diagnosis.verdict, diagnosis.measured, diagnosis.remedy) == (Verdict.WARN, "few; small", "Set them")
    diagnosis = problem_diagnosis("limits", [], "all", "more", "Set them")
    assert (diagnosis.verdict, diagnosis.measured, diagnosis.remedy) == (Verdict.PASS, "all", "")


def test_the_worst_verdict() -> None:
    assert worst([Verdict.PASS, Verdict.SKIP, Verdict.WARN]) is Verdict.WARN
    assert worst([Verdict.FAIL, Verdict.WARN]) is Verdict.FAIL and worst([]) is Verdict.SKIP
