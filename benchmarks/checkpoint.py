"""What a checkpoint costs a run: how long a step waits for one, and how fast it reaches the disk.

    python benchmarks/checkpoint.py [--device auto] [--directory DIR] [--repetitions 5] [--json results.json]

A dense model of about 60M parameters in bfloat16, one process, after one training step: float32 main weights and two
moments, 12 bytes for each parameter.  By turns, to the disk of DIR, its state is saved at once (the step waits for the
disk), behind the run from the device (it waits for a copy to host memory), and behind the run as a colocated trainer
does between its steps, when its memory is away from the device already (on a CPU nothing is copied then).  The limit is
the same bytes, from memory, written by plain writes of the same size to one file there and flushed by the same fsync;
the checkpoint is summed besides.

Times are the best of the repetitions; that of the first save behind the run, which gets its host memory, is shown by
itself.  Exits with 1 where a step waits for more than 10 % of what it waits for without ``trainer.async_save`` (from
the device: on an accelerator; on a CPU that is a copy within one memory, which a quick disk comes near), where writing
is slower than 0.7 of the limit, or where what is read back is not what was saved.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from offload import trained_engine  # stands beside this file
from rich.console import Console
from rich.table import Table as Rows

from mcore_rl.checkpoints.manifest import BLOCK_BYTES, sum_of
from mcore_rl.checkpoints.rank_state import state_file
from mcore_rl.checkpoints.state_writer import StateWriter, Written
from mcore_rl.config.engine import Device
from mcore_rl.config.model import ModelConfig
from mcore_rl.families.registry import FAMILIES
from mcore_rl.parallel.device import detect
from mcore_rl.parallel.launch import Rank, run_ranks
from mcore_rl.training.run_state import begin_save, load_run_state
from mcore_rl.weights.table import Table

MODEL = ModelConfig(
    num_layers=8,
    hidden_size=640,
    ffn_hidden_size=1_920,
    num_attention_heads=10,
    num_query_groups=5,
    head_dim=64,
    vocab_size=16_000,
    max_position_embeddings=256,
)
MAX_WAIT = 0.10
MIN_SPEED = 0.70


@dataclass(frozen=True, kw_only=True)
class Report:
    """Seconds, the best.  waits_*: of the step.  first_s: the first wait behind the run.  plain_s: the limit.

    written_s: from the begin of a save behind the run until it is on the disk, the copy not counted.  check_s: to read
    and sum it.  load_s: to take it over.
    """

    device_name: str
    is_accelerator: bool
    num_bytes: int
    waits_at_once_s: float
    waits_behind_s: float
    waits_away_s: float
    first_s: float
    written_s: float
    plain_s: float
    check_s: float
    load_s: float
    unchanged: bool

    @property
    def wait_share(self) -> float:
        """Of the wait without ``trainer.async_save``, where the state is on the device."""
        return self.waits_behind_s / self.waits_at_once_s

    @property
    def away_share(self) -> float:
        """The same, where it is away."""
        return self.waits_away_s / self.waits_at_once_s

    @property
    def speed_share(self) -> float:
        """Of plain writes."""
        return self.plain_s / self.written_s

    @property
    def passed(self) -> bool:
        """Whether all three conditions hold."""
        waits = max(self.wait_share, self.away_share) if self.is_accelerator else self.away_share
        return self.unchanged and waits <= MAX_WAIT and self.speed_share >= MIN_SPEED


def timed(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def outcome(writer: StateWriter) -> Written:
    while (written := writer.outcome()) is None:
        time.sleep(0.001)
    assert written.problem is None, written.problem
    return written


def write_plainly(path: Path, memory: memoryview) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for begin in range(0, len(memory), BLOCK_BYTES):
        os.write(file, memory[begin : begin + BLOCK_BYTES])
    os.fsync(file)
    os.close(file)


def measure(rank: Rank, device: Device, directory: Path, repetitions: int) -> Report:
    """What one process sees of all of it."""
    platform = detect(device)
    engine, table = trained_engine(rank, platform, MODEL), Table(FAMILIES["llama"], MODEL)
    writer, path = StateWriter(platform), state_file(directory, 0)
    seconds_of: dict[str, list[float]] = {"at once": [], "behind": [], "away": [], "written": [], "plain": []}

    def save(*, behind: bool) -> None:
        begin_save(engine, table, directory, writer, behind=behind)

    memory = memoryview(b"")
    for _ in range(repetitions + 1):
        for what in ("behind", "at once", "away"):
            path.unlink(missing_ok=True)
            os.sync()
            if what == "away":
                engine.memory.offload()
            seconds_of[what].append(timed(partial(save, behind=what != "at once")))
            written = outcome(writer)
            if what != "at once":
                seconds_of["written"].append(written.seconds)
        engine.memory.onload()
        memory = memory or memoryview(path.read_bytes())
        path.unlink()
        os.sync()
        seconds_of["plain"].append(timed(partial(write_plainly, path, memory)))
    save(behind=True)
    expected = outcome(writer)
    check_s = timed(lambda: sum_of(path))
    before = [tensor.clone() for tensor in engine.optimizer.state_tensors()] if engine.optimizer else []
    load_s = timed(lambda: load_run_state(engine, table, directory))
    after = engine.optimizer.state_tensors() if engine.optimizer else []
    same = all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    best = {what: min(seconds) for what, seconds in seconds_of.items()}
    return Report(
        device_name=platform.device_name,
        is_accelerator=platform.is_accelerator,
        num_bytes=len(memory),
        waits_at_once_s=best["at once"],
        waits_behind_s=best["behind"],
        waits_away_s=best["away"],
        first_s=seconds_of["behind"][0],
        written_s=best["written"],
        plain_s=best["plain"],
        check_s=check_s,
        load_s=load_s,
        unchanged=same and sum_of(path) == expected.sum,
    )


def table_of(report: Report) -> Rows:
    """The report as a table to print."""
    table = Rows(title=f"{report.device_name}: {report.num_bytes / 1e9:.2f} GB of state", show_edge=False)
    table.add_column("what")
    for name in ("ms", "GB/s", "share", "target"):
        table.add_column(name, justify="right")
    on_device = f"<= {MAX_WAIT:.0%}" if report.is_accelerator else ""
    rows = [
        ("a step waits, at once", report.waits_at_once_s, "", ""),
        ("behind the run, from the device", report.waits_behind_s, f"{report.wait_share:.1%}", on_device),
        ("the same, the first time", report.first_s, "", ""),
        ("behind the run, away from it", report.waits_away_s, f"{report.away_share:.1%}", f"<= {MAX_WAIT:.0%}"),
        ("plain writes and fsync", report.plain_s, "", ""),
        ("written, summed, fsync", report.written_s, f"{report.speed_share:.2f}", f">= {MIN_SPEED}"),
        ("checked (read, summed)", report.check_s, "", ""),
        ("taken over", report.load_s, "", ""),
    ]
    for what, seconds, share, target in rows:
        table.add_row(what, f"{1e3 * seconds:.0f}", f"{report.num_bytes / seconds / 1e9:.2f}", share, target)
    return table


def main() -> int:
    """Exit status: 1 where a target was missed or something came back changed."""
    parser = argparse.ArgumentParser(description="saves at once and behind the run against plain writes")
    parser.add_argument("--device", choices=[device.value for device in Device], default=Device.auto.value)
    parser.add_argument("--directory", type=Path, help="on the disk to measure; by default that of temporary files")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        arguments = (Device(options.device), Path(directory), options.repetitions)
        report = run_ranks(measure, 1, arguments)[0]
    console = Console(width=max(Console().width, 110))
    console.print(table_of(report))
    console.print("what was read back is what was saved" if report.unchanged else "[red]something changed[/red]")
    if options.json is not None:
        shares = {"wait_share": report.wait_share, "speed_share": report.speed_share, "passed": report.passed}
        options.json.write_text(json.dumps(asdict(report) | shares, indent=2) + "\n")
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
