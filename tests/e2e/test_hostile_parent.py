"""A slice of the gate, started by a parent that ignores SIGINT and has a umask, a locale and variables of its own.

The slice has a test of each kind that has ever depended on one of them.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.house.source import ROOT
from tests.support.hostile import under_hostile_parent

SLICE = (
    "tests/house/test_ground.py",
    "tests/config/test_compose.py",
    "tests/checkpoints/test_convert_command.py",  # Ctrl-C of a program
    "tests/launch/test_submit.py",  # scripts
    "tests/parallel/test_launch.py::test_an_interrupted_parent_takes_its_ranks_with_it",
    "tests/parallel/test_launch.py::test_results_come_back_in_the_order_of_the_ranks",
    "tests/rewards/test_confinement.py",
    "tests/rewards/test_scorer.py",  # signals of a program
    "tests/tracking",  # terminals, files, git
)
WHOLE_RUNS = ("tests/test_cli.py", "tests/e2e/test_secrets.py")


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "paths", [SLICE, pytest.param(WHOLE_RUNS, marks=pytest.mark.tier("full"))], ids=["quick", "runs"]
)
def test_a_slice_of_the_gate_passes(paths: tuple[str, ...], processes: None) -> None:
    pytest_command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tier=test", *paths]
    command, environment = under_hostile_parent(pytest_command)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
