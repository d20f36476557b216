"""Write the report of a run, or one page that compares several.

    mcore-rl report runs/arithmetic                      -> runs/arithmetic/report.html
    mcore-rl report runs/grpo runs/rloo --out both.html  -> each its own report.html, and both.html
    mcore-rl report runs/arithmetic --trace trace.json   -> what engines and trainer did, for ui.perfetto.dev
    mcore-rl report runs/arithmetic --serve              -> a page for a browser on this machine, which follows the run

Works from the files of the run directory, while the run goes on or after it was killed too.  Exits with 0, or with 2
where there is no run; --serve ends with Ctrl-C.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Annotated

from mcore_rl.config.bounds import InputDirectory, Interval, OutputFile
from mcore_rl.config.options import typed
from mcore_rl.ground.errors import ConfigError, Violation

Port = Annotated[int, Interval("[0, 65535]")]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See ``mcore_rl.cli.Command``."""
    parser.description = __doc__
    parser.add_argument("run_dir", type=typed(InputDirectory), nargs="+", help="trainer.default_local_dir of a run")
    parser.add_argument(
        "--out", type=typed(OutputFile), default=Path("comparison.html"), help="of several runs (comparison.html)"
    )
    parser.add_argument(
        "--trace", type=typed(OutputFile), metavar="FILE", help="also write one run as a trace, for ui.perfetto.dev"
    )
    parser.add_argument("--serve", action="store_true", help="a live page of one run at 127.0.0.1; writes no file")
    parser.add_argument("--port", type=typed(Port), default=0, help="of --serve; 0 is any that is free (0)")


def run(options: argparse.Namespace) -> int:
    """See ``mcore_rl.cli.Command``."""
    from mcore_rl.tracking.report import write_comparison, write_report
    from mcore_rl.tracking.trace import write_trace

    if len(options.run_dir) > 1 and (options.serve or options.trace):
        given, instead = ("--serve", "serves") if options.serve else ("--trace", "writes")
        problem = f"{len(options.run_dir)} runs are named, and it {instead} one"
        remedy = "Name one"
        raise ConfigError([Violation(given, "", problem, remedy)])
    if options.serve:
        return _serve(options.run_dir[0], options.port)
    written = [write_report(run_dir) for run_dir in options.run_dir]
    if len(written) > 1:
        written.append(write_comparison(options.run_dir, options.out))
    if options.trace is not None:
        written.append(write_trace(options.run_dir[0], options.trace))
    for path in written:
        sys.stdout.write(f"{path}\n")
    return 0


def _serve(run_dir: Path, port: int) -> int:
    from mcore_rl.tracking.report_server import ReportServer

    with ReportServer(run_dir, port) as server:
        sys.stdout.write(f"{server.address}  (Ctrl-C ends it)\n")
        sys.stdout.flush()
        server.serve_forever()
    return 0
