"""A Slurm of three nodes on this machine, jobs of the tiny task on it, and what becomes of them.

``tests/support/slurm/set_up.sh`` makes the cluster.  Moments are read from what a run writes while it goes.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.support.run_task import overrides

HERE = Path(__file__).parent / "slurm"
ROOT = Path(__file__).parents[2]
PATIENCE_S = 800.0  # for anything, on a busy machine
# Of a job that has not ended for good.
UNDER_WAY = ("PENDING", "CONFIGURING", "RUNNING", "SIGNALING", "COMPLETING", "PREEMPTED", "REQUEUED")
MISSING = 77  # exit code of set_up.sh where there is neither Slurm nor apt
REWARD = '''
"""Takes its time after the first step, so that a job is under way when something happens to it, until it may go on."""

import os
import time


def compute_score(data_source, solution_str, ground_truth, extra_info):
    with open({calls!r}, "a") as file:
        file.write("x")
    if os.path.getsize({calls!r}) > {first_step} and not os.path.exists({go!r}):
        time.sleep(1.5)
    return sum(map(ord, solution_str)) % 5 / 4
'''
FIRST_STEP = 32  # calls


class NoSlurm(Exception):
    """There is neither Slurm nor a way to get it."""


@dataclass
class SlurmCluster:
    """environment: of whoever talks to it."""

    directory: Path
    environment: dict[str, str]

    def command(self, *words: str) -> str:
        """What a command of Slurm's prints."""
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
        return done.stdout

    def submit(self, task: Path, run: Path, *texts: str, nodes: int = 2) -> subprocess.CompletedProcess[str]:
        """submit.py, for the tiny task with one training process on each of ``nodes``."""
        recipe = task / "tiny.yaml"
        recipe.write_text("defaults: [train, _self_]\n")
        settings = [each for each in overrides(task, run) if not each.startswith("trainer.n_gpus_per_node")]
        asked = [
            f"recipe={recipe}",
            "cluster=cpu",
            f"nodes={nodes}",
            "trainer.n_gpus_per_node=1",
            "cluster.slurm.grace_s=100",
            "cluster.slurm.time_limit=50",
        ]
        command = [sys.executable, "launch/slurm/submit.py", *asked, *settings, *texts]
        return subprocess.run(command, cwd=ROOT, env=self.environment, capture_output=True, text=True, check=False)

    def start(self, task: Path, run: Path, *texts: str) -> SlurmJob:
        """A job that was taken.  Its Ray has a port of its own; its steps are slow until ``SlurmJob.go_on``."""
        calls, go, reward = (str(run.with_name(f"{run.name}-{name}")) for name in ("calls", "go", "reward.py"))
        Path(reward).write_text(REWARD.format(calls=calls, go=go, first_step=FIRST_STEP))
        with socket.create_server(("127.0.0.2", 0)) as free:
            port = free.getsockname()[1]
        own = [f"cluster.slurm.port={port}", f"custom_reward_function.path={reward}"]
        done = self.submit(task, run, *own, *texts)
        assert done.returncode == 0, done.stderr
        match = re.match(r"job (\d+): tiny on 2 nodes of cpu\n", done.stdout)
        assert match, done.stdout
        return SlurmJob(self, match[1], run)

    def lose(self, node: str) -> None:
        """Kill everything of a node, as when its power fails."""
        daemon = psutil.Process(int((self.directory / f"slurmd-{node}.pid").read_text()))
        below = daemon.children(recursive=True)
        for each in [daemon, *below, *processes_with("SLURMD_NODENAME", node)]:
            with suppressed():
                each.kill()

    def bring_back(self, node: str) -> None:
        """Start a node again that was lost."""
        stepd = [f"{each}/slurmstepd" for each in self.environment["PATH"].split(":")]
        there = [each for each in stepd if Path(each).exists()][:1]
        self.command("slurmd", "-N", node, *(["-d", there[0]] if there else []))


@dataclass
class SlurmJob:
    """A job of ``cluster``.  run: the run directory."""

    cluster: SlurmCluster
    id: str
    run: Path

    def facts(self) -> dict[str, str]:
        """What Slurm knows of it."""
        line = self.cluster.command("scontrol", "show", "job", "--oneliner", self.id)
        return dict(word.split("=", 1) for word in line.split() if "=" in word)

    @property
    def state(self) -> str:
        """As Slurm calls it: PENDING, RUNNING, COMPLETED, ..."""
        return self.facts()["JobState"]

    @property
    def log(self) -> str:
        """Of the script and the run, over all attempts."""
        path = self.run / "logs" / "slurm" / f"{self.id}.log"
        return path.read_text(errors="replace") if path.is_file() else ""

    def attempted(self, number: int) -> bool:
        """Whether attempt ``number``, from 0, has begun."""
        return (self.run / "logs" / "slurm" / f"{self.id}.{number}").is_dir()

    def steps(self) -> list[int]:
        """That metrics.jsonl tells of."""
        path = self.run / "metrics.jsonl"
        return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.is_file() else []

    def until(self, moment: Callable[[], Any]) -> None:
        """Return at ``moment``, which must come before the job ends."""
        end = time.monotonic() + PATIENCE_S
        while not moment():
            state = self.state
            assert state in UNDER_WAY, f"{state}:\n{self.log}"
            assert time.monotonic() < end, f"its moment never came:\n{self.log}"
            time.sleep(0.2)

    def finish(self) -> dict[str, str]:
        """What Slurm knows of it once it has ended for good."""
        end = time.monotonic() + PATIENCE_S
        while (state := self.state) in UNDER_WAY:
            assert time.monotonic() < end, f"{state}, it did not end:\n{self.log}"
            time.sleep(0.5)
        return self.facts()

    def go_on(self) -> None:
        """Let its steps be fast."""
        self.run.with_name(f"{self.run.name}-go").touch()

    def allow(self, minutes: int) -> None:
        """Change its time limit."""
        self.cluster.command("scontrol", "update", f"JobId={self.id}", f"TimeLimit={minutes}")

    def hosts(self) -> list[str]:
        """The nodes, as Slurm calls them, that the training ranks run on."""
        names = []
        for rank in range(2):
            log = str(self.run / "logs" / f"actor-rank-{rank}.log")
            (worker,) = [each for each in processes_with("SLURM_JOB_ID", self.id) if _output(each) == log]
            names.append(worker.environ()["SLURMD_NODENAME"])
        return names

    def left(self) -> list[str]:
        """Processes and folders of it that are still there half a minute after."""
        end = time.monotonic() + 30
        while (remains := self._left()) and time.monotonic() < end:
            time.sleep(0.2)
        return remains

    def _left(self) -> list[str]:
        alive = [f"{each.pid} {each.name()}" for each in processes_with("SLURM_JOB_ID", self.id)]
        return [*alive, *map(str, Path("/tmp").glob(f"mcore-rl-{self.id}-*"))]


def processes_with(name: str, value: str) -> list[psutil.Process]:
    """Those whose environment has it."""
    wanted = f"{name}={value}".encode()
    processes = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppressed():
            if wanted in path.read_bytes().split(b"\0"):
                processes.append(psutil.Process(int(path.parent.name)))
    return processes


def _output(process: psutil.Process) -> str:
    with suppressed():
        return os.readlink(f"/proc/{process.pid}/fd/1")
    return ""


@contextmanager
def suppressed() -> Iterator[None]:
    """What is raised of a process that has just ended."""
    with suppress(OSError, psutil.Error):
        yield


@contextmanager
def slurm_cluster(directory: Path) -> Iterator[SlurmCluster]:
    """Within: it is up.  NoSlurm: there is neither Slurm nor apt."""
    try:
        done = subprocess.run([HERE / "set_up.sh", directory], capture_output=True, text=True, check=False)
        if done.returncode == MISSING:
            raise NoSlurm(done.stderr.strip())
        assert done.returncode == 0, done.stderr
        command = ["bash", "-c", f"source {directory}/environment && env -0"]
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        environment = dict(each.split("=", 1) for each in listed.split("\0") if "=" in each)
        yield SlurmCluster(directory, environment | {"OMP_NUM_THREADS": "1"})
    finally:
        subprocess.run([HERE / "tear_down.sh", directory], capture_output=True, check=False)
