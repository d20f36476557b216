"""One task and one run without a death, for all cases."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.crash_runs import Bits, bits_of, nothing_survives, start
from tests.support.run_task import write_task


@dataclass(frozen=True)
class Undisturbed:
    """A run that nobody disturbed; nothing below ``directory`` may be changed."""

    task: Path
    directory: Path
    bits: Bits


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, processes: None) -> Undisturbed:
    task = write_task(tmp_path_factory.mktemp("task"))
    folder = tmp_path_factory.mktemp("undisturbed")
    with nothing_survives(folder) as traces:
        run = start(task, folder / "run", traces)
        assert run.finish() == 0, run.said()
    return Undisturbed(task, folder / "run", bits_of(folder / "run"))
