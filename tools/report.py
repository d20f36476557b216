"""Write the report of a run, or one page that compares several.

    python tools/report.py runs/arithmetic                      -> runs/arithmetic/report.html
    python tools/report.py runs/grpo runs/rloo --out both.html  -> each its own report.html, and both.html

Works from the files of the run directory, while the run goes on or after it was killed too.  Exits with 0, or with 2
where there is no run.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mcore_rl.config.bounds import InputDirectory, OutputFile
from mcore_rl.config.options import read_options, typed
from mcore_rl.errors import McoreRLError
from mcore_rl.tracking.report import write_comparison, write_report


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=typed(InputDirectory), nargs="+", help="trainer.default_local_dir of a run")
    parser.add_argument(
        "--out", type=typed(OutputFile), default=Path("comparison.html"), help="of several runs (comparison.html)"
    )
    try:
        asked = read_options(parser, arguments)
        for run_dir in asked.run_dir:
            print(write_report(run_dir))
        if len(asked.run_dir) > 1:
            print(write_comparison(asked.run_dir, asked.out))
    except (McoreRLError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
