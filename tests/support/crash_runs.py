"""Runs of ``mcore-rl train`` in a process of its own, killed at a chosen moment, and what two runs must share.

The moment is read from what a run writes while it goes: lines of metrics.jsonl, phases of its workers, calls of its
reward function, the names of checkpoints.  Points between two system calls are ``tests.support.crash_points``'s.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq

from mcore_rl.rollout.vllm.engine.process_group import is_helper, is_tracker
from mcore_rl.runtime.answers import last_phase, phase_file
from tests.support.hostile import under_hostile_parent
from tests.support.run_task import AGREEMENT, GONE_S, SPEED, holders_of, overrides

STEPS = 3
SAMPLES = 32  # of a step
TRIED = 1  # call of the reward function before anything is drawn: each start tries it
# The engine draws few sequences at once, of more than the task's 12 tokens, and grading keeps pace with it, so that a
# moment of drawing lasts for most of a second.
AT_ONCE = 4
RESPONSE_TOKENS = 24
PATIENCE_S = 500.0  # for anything, on a busy machine
# The same text for every run, so that a copy of a run is graded by what it was begun with.
REWARD = '''
"""Writes down each call, so that whoever watches knows how far the drawing is; slow enough to be watched."""

import time


def compute_score(data_source, solution_str, ground_truth, extra_info):
    with open(__file__.removesuffix("-reward.py") + "-calls", "a") as file:
        file.write("x")
    time.sleep(0.02)
    return sum(map(ord, solution_str)) % 5 / 4
'''


@dataclass
class Started:
    """A run that goes on in ``process``; its output goes to ``output``, from ``heard`` on where it was begun again."""

    directory: Path
    process: subprocess.Popen[bytes]
    output: Path
    calls: Path
    heard: int = 0
    begun: float = field(default_factory=time.time)
    _before: tuple[int, int] = (0, 0)  # lines that were logged, and calls made until then

    @property
    def num_logged(self) -> int:
        """Steps of which metrics.jsonl tells."""
        path = self.directory / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.is_file() else 0

    @property
    def num_calls(self) -> int:
        """Of the reward function, as long as metrics.jsonl has told of as many steps as now."""
        made, logged = self.calls.stat().st_size if self.calls.is_file() else 0, self.num_logged
        if self._before[0] != logged:
            self._before = (logged, made)
        return made - self._before[1]

    def phase(self, rank: int = 0) -> str:
        """Of a training worker of this start; that of one before stays in its file for a while."""
        log = self.directory / "logs" / f"actor-rank-{rank}.log"
        return last_phase(log) if self.is_new(phase_file(log)) else ""

    def is_new(self, path: Path) -> bool:
        """Whether this start made or changed ``path``."""
        try:
            return path.stat().st_mtime >= self.begun
        except FileNotFoundError:
            return False

    def until(self, moment: Callable[[Started], bool]) -> None:
        """Return at ``moment``; the run must not end before."""
        end = time.monotonic() + PATIENCE_S
        with _before_all_others():
            while not moment(self):
                assert self.process.poll() is None, f"the run ended before its moment came:\n{self.said()}"
                assert time.monotonic() < end, f"its moment never came:\n{self.said()}"
                time.sleep(0.002)

    def victims(self, name: str) -> list[psutil.Process]:
        """Who is struck: "controller", a process of Ray's, or those whose output goes to ``name`` in ``logs/``.

        Not Python's resource trackers among these: they clean up behind the others.
        """
        own = psutil.Process(self.process.pid)
        if name == "controller":
            return [own]
        if name.endswith(".log"):
            holders = holders_of(self.directory / "logs" / name, own.pid)
            return [each for each in holders if not is_tracker(each)]
        return [each for each in own.children(recursive=True) if _name(each) == name]

    def strike_at(self, moment: Callable[[Started], bool], name: str, number: int = signal.SIGKILL) -> None:
        """Send the signal ``number`` to ``victims(name)`` at ``moment``, or where it has none, at its next that has."""
        self.until(lambda run: moment(run) and run.strike(name, number))

    def strike(self, name: str, number: int = signal.SIGKILL) -> bool:
        """Send the signal ``number`` to ``victims(name)``; whether there were any."""
        return self.hit(self.victims(name), number)

    def hit(self, victims: Sequence[psutil.Process], number: int = signal.SIGKILL) -> bool:
        """Send the signal ``number`` to ``victims``, but none to stand still to an engine's guard."""
        self.heard = self.output.stat().st_size
        for each in victims:
            with suppress(psutil.NoSuchProcess):
                if number != signal.SIGSTOP or not is_helper(each):
                    each.send_signal(number)
        return bool(victims)

    def finish(self, patience_s: float = PATIENCE_S) -> int:
        """The exit code."""
        try:
            return self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"it did not end:\n{self.said()}") from None

    def said(self) -> str:
        """All that it printed since it was struck last, or begun."""
        return self.output.read_bytes()[self.heard :].decode(errors="replace")


@contextmanager
def _before_all_others() -> Iterator[None]:
    """Let this process run whenever it can, where it may ask for that: a busy machine would let moments go by unseen.

    What it starts meanwhile is scheduled as ever.
    """
    usual = os.sched_getscheduler(0)
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    try:
        yield
    finally:
        with suppress(OSError):
            os.sched_setscheduler(0, usual, os.sched_param(0))


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.Error:
        return ""


@dataclass
class Traces:
    """By which what runs leave behind is found.

    mark: in their environment.  sessions: that they lead.  shared_memory: what is /dev/shm to them; None where nothing
    may be mounted.
    """

    shared_memory: Path | None = None
    mark: str = field(default_factory=lambda: f"MCORE_RL_TEST_MARK={uuid.uuid4().hex}")
    sessions: set[int] = field(default_factory=set)

    def alive(self) -> list[str]:
        """Processes, whoever their parent is now; some write their titles where their environment was."""
        alive = []
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                fields = (path / "stat").read_text().rpartition(")")[2].split()
                if fields[0] in "ZX":
                    continue
                if int(fields[3]) in self.sessions or self.mark.encode() in (path / "environ").read_bytes():
                    command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    alive.append(f"{path.name}: {command[:160].strip()}")
        return alive


@contextmanager
def nothing_survives(directory: Path) -> Iterator[Traces]:
    """Within: runs are started with what it gives.  After: neither process nor shared memory of theirs is left.

    Ports are held by processes, and go with them.
    """
    with mounted(directory / "shm", "8g") as shared_memory:
        traces = Traces(shared_memory)
        yield traces
        end = time.monotonic() + GONE_S
        while (alive := traces.alive()) and time.monotonic() < end:
            time.sleep(0.2)
        assert not alive, alive
        assert shared_memory is None or not (left := [path.name for path in shared_memory.iterdir()]), left


@contextmanager
def mounted(place: Path, size: str) -> Iterator[Path | None]:
    """A file system in memory at ``place``, which is made; None where nothing may be mounted."""
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        yield None
        return
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def start(task: Path, directory: Path, traces: Traces, *more: str, steps: int = STEPS, point: str = "") -> Started:
    """``mcore-rl train``, a checkpoint after each step.  point: of ``crash_points``, at which it kills itself."""
    calls = directory.with_name(f"{directory.name}-calls")
    reward = directory.with_name(f"{directory.name}-reward.py")
    if not reward.is_file():
        reward.write_text(REWARD)
    settings = overrides(
        task,
        directory,
        f"trainer.total_training_steps={steps}",
        "trainer.save_freq=1",
        f"custom_reward_function.path={reward}",
        f"rollout.max_num_seqs={AT_ONCE}",
        f"data.max_response_length={RESPONSE_TOKENS}",
        *more,
    )
    return launch(["train", *settings], directory, traces, calls=calls, point=point)


def launch(
    words: Sequence[str],
    directory: Path,
    traces: Traces,
    *,
    calls: Path = Path(os.devnull),
    point: str = "",
    hostile: bool = False,
) -> Started:
    """``mcore-rl WORDS``, a run in ``directory``.  calls: what its reward function writes to.

    hostile: by a parent as ``tests/support/hostile.py`` has it.
    """
    program = ["-m", "tests.support.crash_points", point] if point else ["-m", "mcore_rl.cli"]
    command = [sys.executable, *program, *words]
    if traces.shared_memory is not None:  # one that nobody else writes to
        script = 'mount --bind "$0" /dev/shm && exec "$@"'
        private = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, str(traces.shared_memory)]
        command = private + command
    environment = dict(os.environ)
    if hostile:
        command, environment = under_hostile_parent(command)
    output = directory.with_name(f"{directory.name}-output")
    with output.open("ab") as file:
        heard = file.tell()
        process = subprocess.Popen(
            command,
            stdout=file,
            stderr=file,
            start_new_session=True,
            env=environment | {"PYTHONUNBUFFERED": "1"} | dict([traces.mark.split("=")]),
        )
    traces.sessions.add(process.pid)
    return Started(directory, process, output, calls, heard)


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


Moment = Callable[[Started], bool]


def starting(run: Started) -> bool:
    """Training processes are there, and no step was done."""
    return run.is_new(run.directory / "logs" / "actor-rank-1.log") and run.num_logged == 0


def drawing(step: int) -> Moment:
    """The engine draws for ``step``: its first samples are graded, and others are not drawn yet."""
    return lambda run: run.num_logged == step - 1 and TRIED < run.num_calls <= SAMPLES - 2 * AT_ONCE


def grading(step: int) -> Moment:
    """The last samples of ``step`` are drawn or graded."""
    return lambda run: run.num_logged == step - 1 and run.num_calls > SAMPLES - AT_ONCE


def doing(step: int, words: str) -> Moment:
    """A training worker is in a phase with ``words``, in ``step``."""
    return lambda run: run.num_logged == step - 1 and words in run.phase()


def writing(step: int) -> Moment:
    """The checkpoint of ``step`` is on its way."""
    return lambda run: run.is_new(run.directory / "checkpoints" / f"step_{step}.incomplete")


def says(pattern: str) -> Moment:
    """It printed something that the regular expression finds."""
    return lambda run: re.search(pattern, run.said()) is not None
