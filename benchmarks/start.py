"""The first minute: how long a help takes, and a run of the tiny model to its first line and its first step.

    python benchmarks/start.py

Every help, the first line of ``train``, and the line of its first step, on the CPU with two training processes and one
engine.  Below each line that the run prints: the seconds since its start, and those of the processor in all of its
processes, which do not depend on what else the machine does.  Targets: 0.5 s, 1 s and 20 s, on two idle cores.  Exits
with 1 where one is missed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

from mcore_rl.cli import COMMANDS
from mcore_rl.doctor.tiny_task import task_overrides, write_task

HELP_S = 0.5
LINE_S = 1.0
STEP_S = 20.0
LOOK_S = 0.2
COMMAND = [sys.executable, "-m", "mcore_rl.cli"]


class ProcessorTime:
    """Seconds of the processor in a process and in all below it, those that have ended too."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._seen = dict[tuple[int, float], tuple[float, str]]()
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        while True:
            try:
                for each in [self._process, *self._process.children(recursive=True)]:
                    times = each.cpu_times()
                    name = " ".join(each.cmdline()[:4]) or each.name()
                    self._seen[each.pid, each.create_time()] = times.user + times.system, name
            except psutil.Error:
                if not self._process.is_running():
                    return
            time.sleep(LOOK_S)

    @property
    def total(self) -> float:
        """All of it, up to now."""
        return sum(seconds for seconds, _ in self._seen.values())

    def largest(self, count: int) -> list[tuple[float, str]]:
        """Those that took most."""
        return sorted(self._seen.values(), reverse=True)[:count]


def help_seconds(name: str) -> float:
    """The fastest of three: what else runs can only add."""
    taken = []
    for _ in range(3):
        began = time.perf_counter()
        subprocess.run([*COMMAND, name, "--help"], check=True, stdout=subprocess.DEVNULL)
        taken.append(time.perf_counter() - began)
    return min(taken)


def start(folder: Path) -> tuple[float, float]:
    """Seconds to the first line of a run, and to that of its first step."""
    (folder / "task").mkdir()
    task = write_task(folder / "task", 16)
    words = task_overrides(task, folder / "run", prompts=8, per_node=2, ep=2, precision="float32", cache_bytes=16 << 20)
    words = [each for each in words if not each.startswith("trainer.logger")]
    began = time.perf_counter()
    lines = list[float]()
    run = subprocess.Popen(
        [*COMMAND, "train", *words, "trainer.total_training_steps=1", "trainer.save_freq=0", "trainer.test_freq=0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    processor = ProcessorTime(run.pid)
    step = 0.0
    assert run.stdout is not None
    for line in run.stdout:
        lines.append(time.perf_counter() - began)
        print(f"  {lines[-1]:6.2f} s, processor {processor.total:6.1f} s | {line.rstrip()[:120]}")
        if not step and "step 1/" in line:
            step = lines[-1]
    assert run.wait() == 0 and step, "the run failed; its lines are above"
    for seconds, name in processor.largest(8):
        print(f"  processor {seconds:6.1f} s | {name[:100]}")
    return lines[0], step


def main() -> int:
    """Measures, prints, and says by the exit code whether all targets were met."""
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    helps = {name: help_seconds(name) for name in COMMANDS}
    slowest = max(helps, key=lambda name: helps[name])
    with tempfile.TemporaryDirectory() as folder:
        line, step = start(Path(folder))
    results = [
        (f"help of {slowest}, the slowest", helps[slowest], HELP_S),
        ("first line of train", line, LINE_S),
        ("first step of train", step, STEP_S),
    ]
    for what, seconds, target in results:
        print(f"{what}: {seconds:.2f} s (target {target:g} s)")
    return int(any(seconds > target for _, seconds, target in results))


if __name__ == "__main__":
    sys.exit(main())
