"""The tiers of the gate: marks and what a test uses decide, the guard holds ``check`` to it, skips are told.

A suite of a few tests is run by a pytest of its own, with nothing but the plugin of the tiers.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.source import ROOT

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
def test_marked(openly):
    start()

@pytest.mark.tier("ci")
@pytest.mark.parametrize("n", [0, pytest.param(1, marks=pytest.mark.tier("full"))])
def test_dearest_wins(n):
    start()

@pytest.mark.tier("full")
class TestClass:
    @pytest.mark.tier("test")
    def test_nearest_wins(self):
        start()

    def test_of_its_class(self):
        start()
"""
INI = """
[pytest]
testpaths = .
markers = tier(name): a tier
"""
SKIPS = """
import pytest

@pytest.mark.parametrize("n", range(3))
def test_a_library(n):
    pytest.skip("not installed: make test-ci installs it")

def test_a_kernel():
    pytest.skip("kernel: it mounts nothing")

@pytest.mark.skip(reason="accelerator: there is none")
def test_an_accelerator():
    pass

def test_passes():
    pass
"""
PLUGINS = ("-p", "tests.support.tiers", "-p", "tests.support.skip_report")
REFUSED = ("test_a_process", "test_a_refusal_that_is_caught", "test_a_program", "test_a_fixture")


def outcomes(folder: Path, *arguments: str, suite: str = SUITE) -> tuple[dict[str, str], str]:
    """Test -> what became of it, and all that pytest said."""
    (folder / "test_suite.py").write_text(suite)
    (folder / "pytest.ini").write_text(INI)
    done = pytest_of(folder, *arguments)
    return dict(re.findall(r"^test_suite\.py::(?:TestClass::)?(\S+) (\w+)", done.stdout, re.MULTILINE)), done.stdout


def pytest_of(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", *PLUGINS, "-p", "no:cacheprovider", "-vv", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def exit_status(folder: Path, *arguments: str) -> int:
    """Of pytest, on the suite that ``outcomes`` has written."""
    return pytest_of(folder, *arguments).returncode


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory, processes: None) -> tuple[dict[str, str], str]:
    return outcomes(tmp_path_factory.mktemp("check"), "--tier=check")


def test_a_test_of_check_that_starts_what_is_dear_fails(checked: tuple[dict[str, str], str]) -> None:
    ends, said = checked
    assert {name for name in ends if ends[name] in ("FAILED", "ERROR")} == set(REFUSED), said
    assert ends["test_cheap"] == "PASSED"
    assert said.count("a test of the tier check starts it.  Ask for the fixture `processes`") >= len(REFUSED)


def test_what_is_dear_by_a_fixture_or_a_mark_is_left_to_its_tier(checked: tuple[dict[str, str], str]) -> None:
    assert checked[0].keys() == {"test_cheap", *REFUSED}


OF_TEST = {"test_marked", "test_nearest_wins"}
OF_CI = {"test_allowed", "test_dearest_wins[0]"}
OF_FULL = {"test_dearest_wins[1]", "test_of_its_class"}


@pytest.mark.parametrize(
    ("tier", "held"), [("test", OF_TEST), ("ci", OF_TEST | OF_CI), ("full", OF_TEST | OF_CI | OF_FULL)]
)
def test_each_tier_holds_the_cheaper_ones(tier: str, held: set[str], tmp_path: Path, processes: None) -> None:
    ends, said = outcomes(tmp_path, f"--tier={tier}")
    assert ends.keys() == {"test_cheap", *REFUSED, *held}, said
    assert {ends[name] for name in held} == {"PASSED"}, said


def test_what_another_tier_holds_may_be_left_out(tmp_path: Path, processes: None) -> None:
    ends, said = outcomes(tmp_path, "--tier=ci", "--beyond=test")
    assert ends == dict.fromkeys(OF_CI, "PASSED"), said


def closing(folder: Path, *arguments: str) -> list[str]:
    """What pytest said of skips, from their heading to its closing line."""
    _, said = outcomes(folder, *arguments, suite=SKIPS)
    return [line.strip("= ") for line in said.partition("= skipped =")[2].splitlines()[1:]]


@pytest.mark.parametrize("tier", ["ci", "full"])
def test_what_is_not_installed_fails_the_tiers_of_ci_and_is_told_last(
    tier: str, tmp_path: Path, processes: None
) -> None:
    told = closing(tmp_path, f"--tier={tier}")
    assert told[0] == "3 not installed: make test-ci installs it"
    assert set(told[1:3]) == {"1 kernel: it mounts nothing", "1 accelerator: there is none"}
    assert told[3] == "1 reason is not allowed in the tiers of CI"
    assert told[-1].startswith("1 passed, 5 skipped")
    assert exit_status(tmp_path, f"--tier={tier}") == 1
    assert exit_status(tmp_path, f"--tier={tier}", "-k", "not library") == 0


@pytest.mark.parametrize("tier", ["check", "test"])
def test_elsewhere_it_is_only_told(tier: str, tmp_path: Path, processes: None) -> None:
    told = closing(tmp_path, f"--tier={tier}")
    assert told[0] == "3 not installed: make test-ci installs it"
    assert not any("not allowed" in line for line in told)
    assert exit_status(tmp_path, f"--tier={tier}") == 0
