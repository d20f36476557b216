"""List the rollout engines of a run that goes on, or let some join or leave it.

    mcore-rl engines runs/grpo                        -> name, state, version of the weights, load, nodes
    mcore-rl engines runs/grpo --add 2                -> two more; they draw once they have received weights
    mcore-rl engines runs/grpo --remove engine-1      -> that one leaves; others draw on with what it had begun
    mcore-rl engines runs/grpo --remove 2             -> those two leave that joined last

For mcore-rl train with trainer.placement=separate, whatever trainer.mode is.  The run does the work while it goes on,
and says so too; Ctrl-C ends this command alone.  An engine that joins is like the others: rollout.tp, and on
accelerators devices of its own, which Ray must have; a node joins Ray first (ray start --address).  A run that begins
anew has as many engines as rollout.dp says.

Exits with 0 when it is done, or with 2 and the reason if it cannot be: nothing changes then.
"""

from __future__ import annotations

import argparse
import sys
from typing import Annotated

from mcore_rl.config.bounds import InputDirectory, Interval
from mcore_rl.config.options import typed
from mcore_rl.ground.errors import RunDirectoryError

Count = Annotated[int, Interval("[1, 1024]")]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See ``mcore_rl.cli.Command``."""
    parser.description = __doc__
    parser.add_argument("run_dir", type=typed(InputDirectory), help="trainer.default_local_dir of the run")
    parser.add_argument("--add", type=typed(Count), metavar="N", help="how many engines join")
    parser.add_argument(
        "--remove", action="append", default=[], metavar="NAME|N", help="which engine leaves, or how many; repeatable"
    )


def run(options: argparse.Namespace) -> int:
    """See ``mcore_rl.cli.Command``."""
    from rich.console import Console
    from rich.table import Table

    from mcore_rl.tracking.engine_requests import ask

    counts = [int(text) for text in options.remove if text.isdecimal()]
    names = tuple(text for text in options.remove if not text.isdecimal())
    said = 0
    answer = None
    for answer in ask(options.run_dir, options.add or 0, names, sum(counts)):
        fresh = answer.lines[said:]
        said = len(answer.lines)
        if answer.state != "refused":
            sys.stdout.writelines(f"{line}\n" for line in fresh)
            sys.stdout.flush()
    assert answer is not None, "an answer, or an error"
    if answer.state == "refused":
        raise RunDirectoryError(answer.lines[-1])
    table = Table("engine", "state", "weights", "samples", "tokens to draw", "nodes", box=None, pad_edge=False)
    for row in answer.engines:
        version = "none" if row.version is None else f"version {row.version}"
        table.add_row(row.name, row.state, version, str(row.requests), f"{row.tokens:,}", ", ".join(row.nodes))
    Console(emoji=False).print(table)
    return 0
