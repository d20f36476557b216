"""A whole run on one GPU of a machine that has little more than torch.

    python -m benchmarks.gpu_run build KIT            # here, without a GPU: what that machine lacks
    python -m benchmarks.gpu_run build KIT --transformer-engine COMPILED      # a second kit, of its layers alone
    python -m benchmarks.gpu_run unpack KIT SITE      # there, with nothing installed
    python -m benchmarks.gpu_run run --kit KIT --out OUT
    python -m benchmarks.gpu_run run --out OUT --device cpu --tiny        # the same parts on the CPU

``run`` unpacks the kit first, where it is given; it says what its options are with --help.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu_run.unpack import KitError, unpack


def main(arguments: Sequence[str]) -> int:
    """Exit status: 0, or 1 with one message; ``run`` has its own."""
    try:
        return perform(arguments)
    except KitError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def perform(arguments: Sequence[str]) -> int:
    """Do what the command line says.  KitError: why it cannot be done."""
    if arguments and arguments[0] == "run":
        from benchmarks.gpu_run.run import main as run

        return run(arguments[1:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    building = commands.add_parser("build", help="make the kit")
    building.add_argument("kit", type=Path, help="a folder; archives in it are replaced")
    building.add_argument(
        "--transformer-engine",
        type=Path,
        metavar="COMPILED",
        help="what tools/build_transformer_engine.sh wrote: the kit is Transformer Engine alone",
    )
    unpacking = commands.add_parser("unpack", help="unpack the kit")
    unpacking.add_argument("kit", type=Path)
    unpacking.add_argument("site", type=Path, help="a folder for PYTHONPATH, which must not be there yet")
    commands.add_parser("run", help="run all parts, or a choice")
    options = parser.parse_args(arguments)
    if options.command == "unpack":
        unpack(options.kit, options.site)
    else:
        from benchmarks.gpu_run import build  # which that machine lacks packages for

        if options.transformer_engine is not None:
            build.build_transformer_engine(options.transformer_engine, options.kit)
        else:
            build.build(options.kit)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
