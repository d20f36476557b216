"""Write the report of a run, or one page that compares several.

    mcore-rl report runs/arithmetic                      -> runs/arithmetic/report.html
    mcore-rl report runs/grpo runs/rloo --out both.html  -> each its own report.html, and both.html

Works from the files of the run directory, while the run goes on or after it was killed too.  Exits with 0, or with 2
where there is no run.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mcore_rl.config.bounds import InputDirectory, OutputFile
from mcore_rl.config.options import typed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See ``mcore_rl.cli.Command``."""
    parser.description = __doc__
    parser.add_argument("run_dir", type=typed(InputDirectory), nargs="+", help="trainer.default_local_dir of a run")
    parser.add_argument(
        "--out", type=typed(OutputFile), default=Path("comparison.html"), help="of several runs (comparison.html)"
    )


def run(options: argparse.Namespace) -> int:
    """See ``mcore_rl.cli.Command``."""
    from mcore_rl.tracking.report import write_comparison, write_report

    written = [write_report(run_dir) for run_dir in options.run_dir]
    if len(written) > 1:
        written.append(write_comparison(options.run_dir, options.out))
    for path in written:
        sys.stdout.write(f"{path}\n")
    return 0
