"""How long a dead rollout engine is away: from its death, drawing, to the first response that the next one gives.

    python -m tests.crash.recovery [--deaths 3]

The new engine is started and has the actor's current weights then: it draws nothing before.  Prints each death with the
load of the machine.  Exits with 1 where one took more than ``LIMIT_S``.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

from tests.support.crash_runs import Started, drawing, nothing_survives, says, start
from tests.support.run_task import write_task

LIMIT_S = 60.0  # on a machine that does nothing else


def recover(run: Started) -> tuple[float, float]:
    """Seconds from the death of the engine, now, until it was started again, and until it has answered."""
    struck = time.monotonic()
    assert run.strike("engine-0.log"), "there is no engine"
    run.until(says("engine 0: ready after"))
    started, graded = time.monotonic(), run.num_calls
    run.until(lambda run: run.num_calls > graded)
    return started - struck, time.monotonic() - struck


def main() -> int:
    """Exit status: 1 where a recovery took too long."""
    parser = argparse.ArgumentParser(description="recovery of a dead rollout engine")
    parser.add_argument("--deaths", type=int, default=3)
    options = parser.parse_args()
    console, longest = Console(), 0.0
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "task").mkdir()
        task = write_task(Path(folder) / "task")
        with nothing_survives(Path(folder)) as traces:
            more = f"trainer.max_restarts={options.deaths}"
            run = start(task, Path(folder) / "run", traces, more, steps=options.deaths + 2)
            for step in range(2, options.deaths + 2):
                run.until(drawing(step))
                load = os.getloadavg()[0]
                started_s, answered_s = recover(run)
                longest = max(longest, answered_s)
                console.print(
                    f"started again after {started_s:.1f} s, answered after {answered_s:.1f} s; load {load:.1f}"
                )
            assert run.finish() == 0, run.said()
    console.print(f"the longest took {longest:.1f} s, of at most {LIMIT_S:.0f} s on a machine with nothing else to do")
    return int(longest > LIMIT_S)


if __name__ == "__main__":
    sys.exit(main())
