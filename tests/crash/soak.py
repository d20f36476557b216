"""A run under random deaths, for as long as one likes, against one without: the same bits in the end, and nothing left.

    python -m tests.crash.soak [--steps 20] [--mean-s 45] [--seed 0]

Every now and then (after ``--mean-s`` seconds in the mean, which must leave time to start) somebody is struck: the
controller, a training process, the engine, Ray's head or its raylet by SIGKILL, or the whole run by SIGTERM; the run is
begun again whenever it ended.  Prints each death with what became of it.  Exits with 1 where a bit differs.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from signal import SIGKILL, SIGTERM

from rich.console import Console

from tests.support.crash_runs import bits_of, nothing_survives, start
from tests.support.run_task import write_task

VICTIMS = ("controller", "actor-rank-0.log", "actor-rank-1.log", "engine-0.log", "gcs_server", "raylet", "SIGTERM")
ENDS = ("controller", "gcs_server", "raylet", "SIGTERM")  # the others are the run's to answer
RESTARTS = "trainer.max_restarts=1000"


def disturbed(task: Path, directory: Path, options: argparse.Namespace, console: Console) -> Counter[str]:
    """Run to the end under deaths; how many of each."""
    draw, deaths = random.Random(options.seed), Counter[str]()
    with nothing_survives(directory.parent) as traces:
        run, begun = start(task, directory, traces, RESTARTS, steps=options.steps), time.monotonic()
        while True:
            until = time.monotonic() + draw.expovariate(1 / options.mean_s)
            while run.process.poll() is None and time.monotonic() < until:
                time.sleep(0.05)
            code = run.process.poll()
            if code == 0:
                return deaths
            if code is None:
                victim = draw.choice(VICTIMS)
                name, number = ("controller", SIGTERM) if victim == "SIGTERM" else (victim, SIGKILL)
                if run.strike(name, number):
                    deaths[victim] += 1
                    after = time.monotonic() - begun
                    console.print(f"{after:7.1f} s  step {run.num_logged + 1:3d}  {victim:18s} {run.phase()[:60]}")
                    if victim in ENDS:
                        code = run.finish()
            if code is not None:
                console.print(f"{time.monotonic() - begun:7.1f} s  ended with {code}; begun again")
                run = start(task, directory, traces, RESTARTS, steps=options.steps)


def main() -> int:
    """Exit status: 1 where a bit differs."""
    parser = argparse.ArgumentParser(description="a run under random deaths")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--mean-s", type=float, default=45.0, help="seconds between deaths, in the mean")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "task").mkdir()
        task = write_task(Path(folder) / "task")
        begun = time.monotonic()
        (Path(folder) / "of-calm").mkdir()
        with nothing_survives(Path(folder) / "of-calm") as traces:
            calm = start(task, Path(folder) / "calm", traces, steps=options.steps)
            assert calm.finish(patience_s=86400) == 0, calm.said()
        calm_s, begun = time.monotonic() - begun, time.monotonic()
        deaths = disturbed(task, Path(folder) / "struck", options, console)
        struck_s = time.monotonic() - begun
        same = bits_of(Path(folder) / "struck", options.steps) == bits_of(Path(folder) / "calm", options.steps)
    console.print(f"{options.steps} steps: {calm_s:.0f} s undisturbed, {struck_s:.0f} s with {deaths.total()} deaths")
    console.print(", ".join(f"{name} {count}" for name, count in deaths.most_common()))
    console.print("the same bits" if same else "[red]the bits differ[/red]")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
