"""Real runs with damaged checkpoints, a full disk, a reward that kills its process, and resumed in another layout."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mcore_rl.checkpoints.manifest import MANIFEST
from tests.crash.conftest import Undisturbed
from tests.support.crash_runs import STEPS, bits_of, mounted, nothing_survives, says, start
from tests.support.skips import KERNEL

pytestmark = [pytest.mark.tier("full"), pytest.mark.timeout(2400)]
RANK = "actor/rank_00001.safetensors"


def truncate(checkpoint: Path) -> None:
    """The end of a rank's file is lost."""
    os.truncate(checkpoint / RANK, (checkpoint / RANK).stat().st_size - 1000)


def flip(checkpoint: Path) -> None:
    """One bit of a rank's file, in the middle of its tensors."""
    with (checkpoint / RANK).open("r+b") as file:
        file.seek((checkpoint / RANK).stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def lose(checkpoint: Path) -> None:
    """A rank's file."""
    (checkpoint / RANK).unlink()


def lose_manifest(checkpoint: Path) -> None:
    """What says what belongs to it."""
    (checkpoint / MANIFEST).unlink()


@pytest.mark.parametrize(
    ("damages", "words"),
    [
        (
            [truncate, flip],
            [f"step_3: {RANK} is 1,000 bytes short", f"step_2: {RANK} has other bytes than were written"],
        ),
        ([lose, lose_manifest], [f"step_3: {RANK} is missing", f"step_2: {MANIFEST} is missing"]),
    ],
    ids=["truncated, a bit flipped", "a rank's file missing, no manifest"],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_taken(
    damages: list[Callable[[Path], None]], words: list[str], undisturbed: Undisturbed, tmp_path: Path
) -> None:
    shutil.copytree(undisturbed.directory, tmp_path / "run")
    for back, damage in enumerate(damages):
        damage(tmp_path / "run" / "checkpoints" / f"step_{STEPS - back}")
    with nothing_survives(tmp_path) as traces:
        run = start(undisturbed.task, tmp_path / "run", traces)
        assert run.finish() == 0, run.said()
    assert "Resuming from step_1. Passed over:" in run.said()
    assert all(each in run.said() for each in words), run.said()
    assert bits_of(tmp_path / "run") == undisturbed.bits


def test_a_full_disk_costs_a_checkpoint_and_not_the_run(undisturbed: Undisturbed, tmp_path: Path) -> None:
    with nothing_survives(tmp_path) as traces, mounted(tmp_path / "disk", "64m") as disk:
        if disk is None:
            pytest.skip(f"{KERNEL}no file system may be mounted here")
        ballast = disk / "others"
        run = start(undisturbed.task, disk / "run", traces)
        run.until(lambda run: (disk / "run" / "checkpoints" / "step_1").is_dir())
        free = shutil.disk_usage(disk).free
        with ballast.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, free - (2 << 20))  # the run's own small files still fit
        run.until(says("no checkpoint of step 2 was written: .* are free on the disk"))
        ballast.unlink()
        assert run.finish() == 0, run.said()
        assert says("The last good one is step_1; it is tried again after the next step")(run)
        names = sorted(path.name for path in (disk / "run" / "checkpoints").iterdir())
        assert names[0] == "step_1" and names[-1] == f"step_{STEPS}" and not any("." in name for name in names), names
        bits = bits_of(disk / "run")
        assert bits == undisturbed.bits
        lines = [json.loads(line) for line in (disk / "run" / "metrics.jsonl").read_text().splitlines()]
        assert sum(line.get("perf/failed_saves", 0) for line in lines) >= 1


DEADLY = """
import os


def compute_score(data_source, solution_str, ground_truth, extra_info):
    value = sum(map(ord, solution_str)) % 5
    if value == 0:
        os._exit(3)
    return value / 4
"""


def test_a_reward_function_that_ends_its_process_costs_its_samples(undisturbed: Undisturbed, tmp_path: Path) -> None:
    path = tmp_path / "deadly.py"
    path.write_text(DEADLY)
    with nothing_survives(tmp_path) as traces:
        run = start(undisturbed.task, tmp_path / "run", traces, f"custom_reward_function.path={path}")
        assert run.finish() == 0, run.said()
    # What is 0 in the undisturbed run costs its process here, and is reward.error_score, 0, too.
    bits = bits_of(tmp_path / "run")
    assert bits.states == undisturbed.bits.states
    struck = 0
    for step, rows in bits.rollouts.items():
        for row, calm in zip(rows, undisturbed.bits.rollouts[step], strict=True):
            died = row["error"] is not None
            assert (row["response"], row["score"]) == (calm["response"], calm["score"])
            assert died == (calm["score"] == 0) and (not died or row["error"].startswith("died: "))
            struck += died
    assert struck > 0


@pytest.mark.parametrize(
    ("more", "note"),
    [
        (["actor.parallel.ep=1", "actor.parallel.pp=2"], "was written in another layout"),
        (
            ["rollout.dp=2"],
            r"so that results may differ:(\n  - .*)*\n  - rollout\.dp: 1 when the checkpoint was made, now 2",
        ),
    ],
    ids=["another layout", "another number of engines"],
)
def test_a_run_goes_on_in_another_layout(more: list[str], note: str, undisturbed: Undisturbed, tmp_path: Path) -> None:
    shutil.copytree(undisturbed.directory, tmp_path / "run")
    for step in range(2, STEPS + 1):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step_{step}")
    with nothing_survives(tmp_path) as traces:
        run = start(undisturbed.task, tmp_path / "run", traces, *more)
        assert run.finish() == 0, run.said()
    assert re.search(note, run.said()), run.said()
    metrics = bits_of(tmp_path / "run").metrics
    assert [line["step"] for line in metrics] == [line["step"] for line in undisturbed.bits.metrics]
    assert metrics[0] == undisturbed.bits.metrics[0], "what was done before stays"
    for line, calm in zip(metrics[1:], undisturbed.bits.metrics[1:], strict=True):
        for key in ("actor/loss", "actor/grad_norm", "actor/entropy", "reward/mean"):
            assert math.isclose(line[key], calm[key], rel_tol=0.25, abs_tol=0.15), (key, line[key], calm[key])
