"""Runs the parts on the machine: those that prove most come first, and none can take the others' time.

Writes gpu_run.json, gpu_run.md and records.tar.gz (what the runs wrote: logs, metrics, plans), anew after each part.
"""

from __future__ import annotations

import argparse
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.gpu_run.unpack import unpack

if TYPE_CHECKING:
    from benchmarks.gpu import Section

LIMIT_S = 560.0  # of all, unpacking too; a command on a borrowed machine often has ten minutes
WORK = Path(tempfile.gettempdir(), "gpu_run")
RECORDED = (".log", ".jsonl", ".json", ".yaml")
RECORDED_BYTES = 4 << 20  # of a larger file, the end


def main(arguments: Sequence[str], parts: Sequence[Section] = ()) -> int:
    """Run ``parts``, or all.  Exit status: see ``benchmarks.gpu.run_plan``."""
    began = time.monotonic()
    early = argparse.ArgumentParser(add_help=False)
    early.add_argument("--kit", type=Path, help="what ``build`` made; it is unpacked into the folder of --work, once")
    early.add_argument("--work", type=Path, default=WORK, help="for data, models and runs (default: %(default)s)")
    early.add_argument("--out", type=Path, default=Path("gpu_run"), help="for the results (default: %(default)s)")
    given, _ = early.parse_known_args(arguments)
    given.work.mkdir(parents=True, exist_ok=True)
    if given.kit is not None:
        use_kit(given.kit, given.work / "site")

    from benchmarks import gpu
    from benchmarks.gpu_run.parts import PARTS
    from mcore_rl.parallel.launch import inherited_environment

    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_run run", description=__doc__, parents=[early])
    parts = parts or PARTS
    gpu.add_options(parser, [part.name for part in parts], LIMIT_S)
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    options.json = options.out / "gpu_run.json"
    options.table = options.out / "gpu_run.md"
    options.limit_s -= time.monotonic() - began

    class RecordingReport(gpu.Report):
        """The two files, and the records of the runs."""

        def write(self) -> None:
            super().write()
            write_records(options.work, options.out / "records.tar.gz")

    offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with inherited_environment(offline):
        return gpu.run_plan(options, parts, options.work, lends_time=True, report_type=RecordingReport)


def use_kit(kit: Path, site: Path) -> None:
    """Import from ``site`` first, here and in all processes below; it is unpacked where it is not there."""
    if not site.is_dir():
        unpack(kit, site)
    sys.path.insert(0, str(site))


def write_records(work: Path, out: Path) -> None:
    """Write what tells of the runs in ``work`` to one archive, ``out``."""
    new = out.with_name(out.name + ".new")
    with tarfile.open(new, "w:gz") as archive:
        for path in sorted(work.rglob("*")):
            name = path.relative_to(work)
            if path.suffix not in RECORDED or name.parts[0] == "site" or "hf" in name.parts or not path.is_file():
                continue
            member = archive.gettarinfo(path, str(name))
            with path.open("rb") as file:
                member.size = min(member.size, RECORDED_BYTES)
                file.seek(-member.size, 2)
                archive.addfile(member, file)
    new.replace(out)
