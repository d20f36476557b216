"""The tiers of the gate: what a test uses decides, the guard holds ``check`` to it, and budgets are told.

A suite of a few tests is run by a pytest of its own, with nothing but the plugin of the tiers.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.house.source import ROOT
from tests.support.tiers import TIERS

SUITE = """
import multiprocessing, subprocess, sys
import pytest

def start():
    process = multiprocessing.get_context("spawn").Process(target=int)
    process.start()
    process.join()

def test_cheap():
    subprocess.run([sys.executable, "-c", ""], check=True)

def test_a_process():
    start()

def test_a_refusal_that_is_caught():
    try:
        start()
    except Exception:
        pass

def test_a_program():
    subprocess.run([sys.executable, "-m", "mcore_rl.cli", "train"])

@pytest.fixture
def secretly():
    start()

def test_a_fixture(secretly):
    pass

@pytest.fixture
def openly(processes):
    start()

@pytest.fixture
def through(openly):
    pass

def test_allowed(through):
    start()

@pytest.mark.tier("test")
def test_marked():
    start()

@pytest.mark.parametrize("n", [0, pytest.param(1, marks=pytest.mark.tier("full"))])
def test_dearest_wins(n, openly):
    pass
"""
INI = """
[pytest]
testpaths = .
markers = tier(name): a tier
tier_minutes =
    check = {check}
    test = 20
    full = 60
"""
REFUSED = ("test_a_process", "test_a_refusal_that_is_caught", "test_a_program", "test_a_fixture")


def outcomes(folder: Path, *arguments: str, check_minutes: float = 4.0) -> tuple[dict[str, str], str]:
    """Test -> what became of it, and all that pytest said."""
    (folder / "test_suite.py").write_text(SUITE)
    (folder / "pytest.ini").write_text(INI.format(check=check_minutes))
    command = [sys.executable, "-m", "pytest", "-p", "tests.support.tiers", "-p", "no:cacheprovider", "-vv", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    said = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False).stdout
    return dict(re.findall(r"^test_suite\.py::(\S+) (\w+)", said, re.MULTILINE)), said


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory, processes: None) -> tuple[dict[str, str], str]:
    return outcomes(tmp_path_factory.mktemp("check"), "--tier=check", check_minutes=0.001)


def test_a_test_of_check_that_starts_what_is_dear_fails(checked: tuple[dict[str, str], str]) -> None:
    ends, said = checked
    assert {name for name in ends if ends[name] in ("FAILED", "ERROR")} == set(REFUSED), said
    assert ends["test_cheap"] == "PASSED"
    assert said.count("a test of the tier check starts it.  Ask for the fixture `processes`") >= len(REFUSED)


def test_what_is_dear_by_a_fixture_or_a_mark_is_left_to_its_tier(checked: tuple[dict[str, str], str]) -> None:
    assert checked[0].keys() == {"test_cheap", *REFUSED}


@pytest.mark.parametrize(("tier", "more"), [("test", set()), ("full", {"test_dearest_wins[1]"})])
def test_each_tier_holds_the_cheaper_ones(tier: str, more: set[str], tmp_path: Path, processes: None) -> None:
    ends, said = outcomes(tmp_path, f"--tier={tier}")
    allowed = {"test_allowed", "test_marked", "test_dearest_wins[0]", *more}
    assert ends.keys() == {"test_cheap", *REFUSED, *allowed}, said
    assert {ends[name] for name in allowed} == {"PASSED"}, said


def test_a_tier_over_its_budget_says_so_and_does_not_fail_for_it(
    checked: tuple[dict[str, str], str], tmp_path: Path, processes: None
) -> None:
    assert re.search(r"tier check: 0\.\d min of 0\.001, OVER ITS BUDGET", checked[1])
    _, said = outcomes(tmp_path, "--tier=check", "--began=0")
    assert re.search(r"tier check: \d+\.\d min of 4, OVER ITS BUDGET", said)
    _, said = outcomes(tmp_path, "--tier=check")
    assert re.search(r"tier check: 0\.\d min of 4 =", said)
    _, said = outcomes(tmp_path, "--tier=check", "-k", "cheap")
    assert "tier check" not in said, "a part of a tier has no budget"


def test_a_budget_for_each_tier_is_said_in_one_place() -> None:
    pytest_options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert tuple(line.partition(" = ")[0] for line in pytest_options["tier_minutes"]) == TIERS
