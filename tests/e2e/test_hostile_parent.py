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
    "tests/commands/test_convert.py::test_an_interrupt_leaves_nothing_under_the_final_name",
    "tests/launch/test_submit.py::test_every_script_is_sound_bash",
    "tests/parallel/test_launch.py::test_an_interrupted_parent_takes_its_ranks_with_it",
    "tests/rewards/test_confinement.py::test_what_honest_programs_do_works",
    "tests/rewards/test_scorer.py::test_no_process_outlives_a_program_that_is_ended",
    "tests/tracking/test_console.py",
    "tests/tracking/test_progress.py",
    "tests/tracking/test_run_directory.py",
)
WHOLE_RUNS = ("tests/test_cli.py", "tests/e2e/test_secrets.py")


@pytest.mark.parametrize("path", SLICE + WHOLE_RUNS)
def test_what_the_slice_names_is_there(path: str) -> None:
    file, _, name = path.partition("::")
    assert f"def {name}(" in (ROOT / file).read_text() if name else (ROOT / file).is_file()


@pytest.mark.tier("full")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("paths", [SLICE, WHOLE_RUNS], ids=["quick", "runs"])
def test_a_slice_of_the_gate_passes(paths: tuple[str, ...], processes: None) -> None:
    pytest_command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tier=test", *paths]
    command, environment = under_hostile_parent(pytest_command)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
