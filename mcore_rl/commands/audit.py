"""Prove that a run trained every prompt exactly once in each epoch, or name each that it did not.

    mcore-rl audit runs/gsm8k      -> what was trained, dropped and lost, and that nothing is missing or there twice

Reads schedule.jsonl of the run directory, and compares it with metrics.jsonl and rollouts/.  The run may be going on,
or have been killed at any moment.  Exits with 0 if the ledger holds, with 1 if it does not, with 2 where there is none.
"""

from __future__ import annotations

import argparse
import sys

from mcore_rl.config.bounds import InputDirectory
from mcore_rl.config.options import typed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See ``mcore_rl.cli.Command``."""
    parser.description = __doc__
    parser.add_argument("run_dir", type=typed(InputDirectory), help="trainer.default_local_dir of a run")


def run(options: argparse.Namespace) -> int:
    """See ``mcore_rl.cli.Command``."""
    from mcore_rl.tracking.ledger import audit

    verdict = audit(options.run_dir)
    for line in verdict.lines():
        sys.stdout.write(f"{line}\n")
    return 1 if verdict.violations else 0
