"""Runs that draw while they train, killed whoever and whenever: no prompt is lost, none is trained twice, nothing left.

Such runs have no bits to compare: which groups are trained together is chance.  The oracle is what they wrote down of
every step (``rollouts/*.parquet``), read here by itself: after the steps of one epoch each row of the data file was
trained exactly once.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from signal import SIGKILL

import pyarrow.parquet as pq
import pytest

from tests.crash.test_crashes import GOES_ON, IMPATIENT, Blow, engine, ray, stopped, worker
from tests.support.ahead_runs import APART, lines, staleness
from tests.support.crash_runs import Started, doing, drawing, nothing_survives, says, start, writing
from tests.support.run_task import GONE_S, write_task

pytestmark = [pytest.mark.tier("full"), pytest.mark.timeout(3600), pytest.mark.usefixtures("processes")]

STEPS, PROMPTS, BATCH, SAMPLES = 5, 40, 8, 4  # one epoch of the task
BOUND = 2
MODES = {
    "async": ("trainer.mode=async", f"async.max_staleness={BOUND}", *APART),
    "one_step_off": ("trainer.mode=one_step_off", *APART),
}
MOST = {"async": BOUND, "one_step_off": 1}
TWO_ENGINES = ("rollout.dp=2",)


SCORE, UPDATE, PUBLISH = "score", "train_step", "publish"
LIVES: dict[str, tuple[tuple[str, ...], list[Blow]]] = {
    "the controller": ((), [Blow(drawing(1)), Blow(doing(2, UPDATE)), Blow(doing(3, PUBLISH)), Blow(writing(3))]),
    "a trainer": (
        (),
        [worker(doing(2, SCORE), 0, 1), worker(doing(3, UPDATE), 0, 2), worker(doing(4, PUBLISH), 0, 3)],
    ),
    "a trainer, drawing and saving": ((), [worker(drawing(1), 0, 1), worker(writing(2), 0, 2)]),
    "an engine": ((), [engine(drawing(1), 1), engine(doing(2, UPDATE), 2), engine(doing(3, PUBLISH), 3)]),
    "an engine, saving": ((), [engine(writing(2), 1)]),
    "one of two engines": (TWO_ENGINES, [engine(drawing(1), 1), engine(doing(2, UPDATE), 2)]),
    "Ray": ((), [ray(drawing(1), "gcs_server"), ray(doing(2, UPDATE), "raylet"), ray(doing(3, PUBLISH), "gcs_server")]),
    "Ray, saving": ((), [ray(writing(2), "raylet")]),
    "an engine, stopped": (IMPATIENT, [stopped(drawing(1), 1, r"(generating \d+ samples|running|asked)")]),
    "an engine, stopped while a step is trained": (
        IMPATIENT,
        [stopped(doing(2, SCORE), 1, r"(generating \d+ samples|running|asked|starting an update)")],
    ),
}


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where all processes of a run put temporary files; nothing is left of them afterwards."""
    with tempfile.TemporaryDirectory(prefix="rl", dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)
        until = time.monotonic() + GONE_S
        while (left := [*Path(folder).iterdir()]) and time.monotonic() < until:
            time.sleep(0.2)
        assert not left, left


def trained(directory: Path, steps: int = STEPS) -> Counter[tuple[str, int]]:
    """How often each sample of each row was trained."""
    counts = Counter[tuple[str, int]]()
    for step in range(1, steps + 1):
        table = pq.read_table(directory / "rollouts" / f"step_{step}.parquet", columns=["prompt_id", "sample"])
        assert table.num_rows == BATCH * SAMPLES
        counts.update(zip(table["prompt_id"].to_pylist(), table["sample"].to_pylist(), strict=True))
    return counts


def demand_whole_epoch(directory: Path, mode: str) -> None:
    """Every sample of every row exactly once, every step told of once, and none too stale."""
    counts = trained(directory)
    assert set(counts.values()) == {1}, [key for key, count in counts.items() if count > 1]
    assert len({row for row, _ in counts}) == PROMPTS and len(counts) == PROMPTS * SAMPLES
    rows = lines(directory)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert max(most for _, most in staleness(rows)) <= MOST[mode]
    assert rows[-1]["progress/epoch"] == 1.0


def strike(run: Started, blow: Blow) -> None:
    assert blow.moment is not None
    run.strike_at(blow.moment, blow.victim, blow.signal)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", LIVES)
def test_deaths_lose_no_prompt_and_double_none(name: str, mode: str, temporary: Path, tmp_path: Path) -> None:
    (tmp_path / "task").mkdir()
    task, directory = write_task(tmp_path / "task"), tmp_path / "run"
    more, blows = LIVES[name]
    settings = (*MODES[mode], *more)
    with nothing_survives(tmp_path) as traces:
        begun = False
        for blow in blows:
            if not begun:
                run = start(task, directory, traces, *settings, steps=STEPS)
            strike(run, blow)
            begun = blow.exit_code is GOES_ON
            if begun:
                run.until(says(blow.words))
            else:
                assert run.finish() == blow.exit_code, run.said()
                assert says(blow.words)(run), run.said()
                assert "Traceback" not in run.said() or blow.exit_code == -SIGKILL, run.said()
        if not begun:
            run = start(task, directory, traces, *settings, steps=STEPS)
        assert run.finish() == 0, run.said()
        assert "never retrieved" not in run.said(), run.said()
    demand_whole_epoch(directory, mode)
