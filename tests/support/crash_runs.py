"""Runs of ``mcore-rl train`` in a process of its own, killed at a chosen moment, and what two runs must share.

The moment is read from what a run writes while it goes: lines of metrics.jsonl, phases of its workers, calls of its
reward function, the names of checkpoints.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq

from mcore_rl.runtime.answers import last_phase
from tests.support.run_task import AGREEMENT, GONE_S, SPEED, holders_of, overrides

STEPS = 3
PATIENCE_S = 400.0  # for anything, on a busy machine
REWARD = '''
"""Writes down each call, so that whoever watches knows how far the drawing is."""

import os


def compute_score(data_source, solution_str, ground_truth, extra_info):
    with open({calls!r}, "a") as file:
        file.write("x")
    return sum(map(ord, solution_str)) % 5 / 4
'''


@dataclass
class Started:
    """A run that goes on in ``process``; its output goes to ``output``."""

    directory: Path
    process: subprocess.Popen[bytes]
    output: Path
    calls: Path

    @property
    def num_logged(self) -> int:
        """Steps of which metrics.jsonl tells."""
        path = self.directory / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.is_file() else 0

    @property
    def num_calls(self) -> int:
        """Of the reward function."""
        return self.calls.stat().st_size if self.calls.is_file() else 0

    def phase(self, rank: int = 0) -> str:
        """Of a training worker."""
        return last_phase(self.directory / "logs" / f"actor-rank-{rank}.log")

    def until(self, moment: Callable[[Started], bool]) -> None:
        """Return at ``moment``; the run must not end before."""
        end = time.monotonic() + PATIENCE_S
        while not moment(self):
            assert self.process.poll() is None, f"the run ended before its moment came:\n{self.said()}"
            assert time.monotonic() < end, f"its moment never came:\n{self.said()}"
            time.sleep(0.002)

    def holders(self, log: str) -> list[psutil.Process]:
        """Processes below the run's whose output goes to ``logs/`` ``log``."""
        return holders_of(self.directory / "logs" / log, self.process.pid)

    def kill(self, log: str) -> None:
        """The processes that write to ``log``, at once."""
        holders = self.holders(log)
        assert holders, f"nobody writes to {log}"
        for each in holders:
            each.kill()

    def finish(self) -> int:
        """The exit code."""
        try:
            return self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"it did not end:\n{self.said()}") from None

    def said(self) -> str:
        """All that it printed."""
        return self.output.read_text(errors="replace")


@contextmanager
def nothing_survives() -> Iterator[str]:
    """Within: a mark for the environment of runs; no process with it is alive soon after, whoever its parent is now."""
    mark = f"MCORE_RL_TEST_MARK={uuid.uuid4().hex}"
    yield mark
    end, alive = time.monotonic() + GONE_S, marked(mark)
    while alive and time.monotonic() < end:
        time.sleep(0.2)
        alive = marked(mark)
    assert not alive, alive


def marked(mark: str) -> list[str]:
    """Processes whose environment has ``mark``."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in path.read_bytes():
                command = path.with_name("cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found.append(f"{path.parent.name}: {command[:160]}")
        except OSError:
            continue
    return found


def start(task: Path, directory: Path, mark: str = "", *more: str, steps: int = STEPS) -> Started:
    """``mcore-rl train``, a checkpoint after each step.  mark: an environment variable with its value."""
    calls = directory.with_name(f"{directory.name}-calls")
    reward = directory.with_name(f"{directory.name}-reward.py")
    if not reward.is_file():
        reward.write_text(REWARD.format(calls=str(calls)))
    settings = overrides(
        task,
        directory,
        f"trainer.total_training_steps={steps}",
        "trainer.save_freq=1",
        f"custom_reward_function.path={reward}",
        *more,
    )
    output = directory.with_name(f"{directory.name}-output")
    with output.open("ab") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "mcore_rl.cli", "train", *settings],
            stdout=file,
            stderr=file,
            start_new_session=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1"} | dict([mark.split("=")] if mark else []),
        )
    return Started(directory, process, output, calls)


@dataclass(frozen=True)
class Bits:
    """What must not depend on whether a run was ever interrupted."""

    metrics: list[dict[str, Any]]
    rollouts: dict[int, list[dict[str, Any]]]
    states: dict[str, Any]


def bits_of(directory: Path, steps: int = STEPS) -> Bits:
    """metrics: every line, without speed.  states: sums of the ranks' files in the last checkpoint."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    metrics = [{k: v for k, v in line.items() if not k.startswith(SPEED) and k not in AGREEMENT} for line in lines]
    rollouts = {
        step: pq.read_table(directory / "rollouts" / f"step_{step}.parquet").to_pylist() for step in range(1, steps + 1)
    }
    manifest = json.loads((directory / "checkpoints" / f"step_{steps}" / "manifest.json").read_text())
    states = {name: each for name, each in manifest["files"].items() if "/" in name and name.startswith("actor")}
    return Bits(metrics, rollouts, states)


def drawing(step: int) -> Callable[[Started], bool]:
    """The engine draws for ``step``: some of its samples are graded, and not all."""
    return lambda run: run.num_logged == step - 1 and run.num_calls > (step - 1) * 32


def doing(step: int, words: str) -> Callable[[Started], bool]:
    """A training worker is in a phase with ``words``, in ``step``."""
    return lambda run: run.num_logged == step - 1 and words in run.phase()


def writing(step: int) -> Callable[[Started], bool]:
    """The checkpoint of ``step`` is on its way."""
    return lambda run: (run.directory / "checkpoints" / f"step_{step}.incomplete").is_dir()


def named(step: int) -> Callable[[Started], bool]:
    """The checkpoint of ``step`` has its name."""
    return lambda run: (run.directory / "checkpoints" / f"step_{step}").is_dir()


SIGKILL, SIGTERM, SIGINT, SIGUSR1 = signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1
