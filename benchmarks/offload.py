"""How fast an engine leaves the device and comes back, and how fast a snapshot is taken and swapped in.

    python benchmarks/offload.py [--device auto] [--repetitions 5] [--json results.json]

A dense model of about 100M parameters in bfloat16, after one training step: weights, float32 gradients, and the
optimizer's float32 main weights and moments.  The limit beside each time is a plain copy of the same bytes between
buffers that are in place (page-locked on the host where there is an accelerator), the fastest that this machine does
it; gradients are dropped, not copied, so they have none.  On a CPU "device" and host are one memory: a copy is a copy,
and what offloading costs more is memory that the system hands out anew.

Last, the optimizer's state comes back behind a training step: how much longer the step is for it, and what share of the
way back alone that hides.  A CPU has nobody to copy meanwhile, and hides nothing.

Times are the best of the repetitions.  There is no target; exits with 1 where a weight or a moment came back changed,
or where an accelerator's memory was not freed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mcore_rl.config.engine import Device, EngineConfig, LayerSpec, OptimizerConfig, Precision
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.parallel import ParallelConfig
from mcore_rl.ground.types import Denominators, LossInputs, LossSums, TrainBatch
from mcore_rl.parallel.device import Platform, detect, device_of, memory, pinned_empty_like, synchronize
from mcore_rl.parallel.groups import init_groups
from mcore_rl.parallel.launch import Rank, run_ranks
from mcore_rl.parallel.layout import Layout
from mcore_rl.training.engine import Engine
from mcore_rl.training.offload import OffloadPart

if TYPE_CHECKING:  # benchmarks/gpu.py measures by these functions where no rich is installed
    from rich.table import Table

MODEL = ModelConfig(
    num_layers=12,
    hidden_size=640,
    ffn_hidden_size=1_920,
    num_attention_heads=10,
    num_query_groups=5,
    head_dim=64,
    vocab_size=32_000,
    max_position_embeddings=256,
)


NUM_SEQUENCES = 64  # of the step that hides a way back, on an accelerator: 32 microbatches


@dataclass(frozen=True, kw_only=True)
class Row:
    """One movement.  limit_s: a plain copy of the same bytes; None where nothing is copied."""

    what: str
    num_bytes: int
    seconds: float
    limit_s: float | None


@dataclass(frozen=True, kw_only=True)
class Report:
    """freed_share: of the bytes that the accelerator had in use before; None on a CPU.

    step_s, back_s, hidden_share: see the function of that name.
    """

    device_name: str
    num_parameters: int
    rows: list[Row]
    unchanged: bool
    step_s: float
    back_s: float
    hidden_share: float
    freed_share: float | None

    @property
    def passed(self) -> bool:
        """Whether all came back as it was, and the device was left."""
        return self.unchanged and (self.freed_share is None or self.freed_share > 0.9)


def negative_log_likelihood(inputs: LossInputs) -> LossSums:
    assert inputs.logprobs_N is not None
    return LossSums(total=-(inputs.logprobs_N * inputs.mask_N).sum(), metrics={})


def trained_engine(rank: Rank, platform: Platform, model: ModelConfig = MODEL) -> Engine:
    """An engine of ``model`` after one step, so that the optimizer's moments exist."""
    rank.init_process_group(platform)
    groups = init_groups(Layout.of(ParallelConfig(), 1), platform, device_of(platform, 0), seed=1)
    config = EngineConfig(
        device=platform.kind,
        precision=Precision.bfloat16,
        layer_spec=LayerSpec.local,
        microbatch_tokens=64,
        optim=OptimizerConfig(lr=1e-4),
    )
    engine = Engine("actor", model, ParallelConfig(), config, groups, platform)
    batch, counts = step_of(1)
    engine.train_step(batch, negative_log_likelihood, counts)
    return engine


def step_of(num_sequences: int) -> tuple[TrainBatch, Denominators]:
    """A batch of sequences of 32 tokens; two of them are a microbatch."""
    tokens_T = torch.arange(32).repeat(num_sequences)
    batch = TrainBatch(lengths_S=(32,) * num_sequences, tokens_T=tokens_T, mask_T=tokens_T > 0)
    return batch, Denominators(loss=31.0 * num_sequences, tokens=32 * num_sequences, sequences=num_sequences)


def best(run: Callable[[], object], platform: Platform, repetitions: int) -> float:
    """Seconds of the fastest run, all its work done."""
    times = []
    for _ in range(repetitions):
        synchronize(platform)
        start = time.perf_counter()
        run()
        synchronize(platform)
        times.append(time.perf_counter() - start)
    return min(times)


def copy_limits(platform: Platform, device: torch.device, num_bytes: int, repetitions: int) -> tuple[float, float]:
    """Seconds to copy so many bytes from the device to host memory, and back, between buffers that are in place."""
    there = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    here = pinned_empty_like(platform, there).fill_(2)
    out = best(lambda: here.copy_(there, non_blocking=True), platform, repetitions)
    back = best(lambda: there.copy_(here, non_blocking=True), platform, repetitions)
    return out, back


def offload_rows(engine: Engine, platform: Platform, repetitions: int) -> list[Row]:
    """Every part out and back, each by itself."""
    rows = []
    for part in OffloadPart:
        trips = [(engine.memory.offload((part,)), engine.memory.onload((part,))) for _ in range(repetitions)]
        num_bytes = trips[0][0].num_bytes[part]
        limits: Sequence[float | None] = (None, None)
        if part is not OffloadPart.gradients:
            limits = copy_limits(platform, engine.groups.device, num_bytes, repetitions)
        for direction, name in enumerate(("out", "back")):
            seconds = min(trip[direction].seconds for trip in trips)
            rows.append(
                Row(what=f"{part.value} {name}", num_bytes=num_bytes, seconds=seconds, limit_s=limits[direction])
            )
    return rows


def hidden_share(
    engine: Engine, platform: Platform, repetitions: int, num_sequences: int
) -> tuple[float, float, float]:
    """(seconds of a step, seconds of the optimizer's way back alone, the share of these that a step hides)."""
    batch, counts = step_of(num_sequences)
    optimizer = (OffloadPart.optimizer,)

    def step() -> None:
        engine.train_step(batch, negative_log_likelihood, counts)

    def away_and_timed(*, behind: bool) -> float:
        engine.memory.offload(optimizer)
        begin = time.perf_counter()
        engine.memory.onload(optimizer, behind=optimizer if behind else ())
        if behind:
            step()
        synchronize(platform)
        return time.perf_counter() - begin

    alone = best(step, platform, repetitions)
    back = min(away_and_timed(behind=False) for _ in range(repetitions))
    both = min(away_and_timed(behind=True) for _ in range(repetitions))
    return alone, back, 1 - (both - alone) / back


def snapshot_rows(engine: Engine, platform: Platform, repetitions: int) -> list[Row]:
    """The first take makes the memory that later ones write into; a swap in keeps the live weights before it copies."""
    snapshots = engine.snapshots
    first = best(lambda: snapshots.take("first"), platform, 1)
    num_bytes = snapshots.num_bytes()
    out, back = copy_limits(platform, engine.groups.device, num_bytes, repetitions)
    again = best(lambda: snapshots.take("first"), platform, repetitions)
    swaps_in = []
    swaps_out = []
    for _ in range(repetitions):
        start = time.perf_counter()
        with snapshots.swapped("first"):
            inside = time.perf_counter()
            swaps_in.append(inside - start)
            inside = time.perf_counter()
        swaps_out.append(time.perf_counter() - inside)
    return [
        Row(what="snapshot, first take", num_bytes=num_bytes, seconds=first, limit_s=out),
        Row(what="snapshot, take again", num_bytes=num_bytes, seconds=again, limit_s=out),
        Row(what="snapshot, swap in", num_bytes=2 * num_bytes, seconds=min(swaps_in), limit_s=out + back),
        Row(what="snapshot, swap out", num_bytes=num_bytes, seconds=min(swaps_out), limit_s=back),
    ]


def everything(engine: Engine) -> Iterable[Tensor]:
    """What must come back bit for bit."""
    assert engine.optimizer is not None
    yield from (parameter.detach() for model in engine.models for parameter in model.parameters())
    yield from engine.optimizer.state_tensors()


def measure(rank: Rank, device: Device, repetitions: int) -> Report:
    """The one process of the benchmark."""
    platform = detect(device)
    engine = trained_engine(rank, platform)
    before = [tensor.to("cpu", copy=True) for tensor in everything(engine)]
    freed_share = None
    if platform.is_accelerator:
        in_use = memory(platform).allocated_bytes
        engine.memory.offload()
        freed_share = 1 - memory(platform).allocated_bytes / in_use
        engine.memory.onload()
    rows = offload_rows(engine, platform, repetitions) + snapshot_rows(engine, platform, repetitions)
    unchanged = all(torch.equal(ours, now.cpu()) for ours, now in zip(before, everything(engine), strict=True))
    sequences = NUM_SEQUENCES if platform.is_accelerator else 2
    step_s, back_s, share = hidden_share(engine, platform, repetitions, sequences)
    return Report(
        device_name=platform.device_name,
        num_parameters=sum(parameter.numel() for parameter in engine.models[0].parameters()),
        rows=rows,
        unchanged=unchanged,
        step_s=step_s,
        back_s=back_s,
        hidden_share=share,
        freed_share=freed_share,
    )


def report_table(report: Report) -> Table:
    """One row a movement."""
    from rich.table import Table

    size = f"{report.num_parameters / 1e6:.0f}M parameters in bfloat16"
    table = Table(title=f"offload and snapshots, {size}\n{report.device_name}, torch {torch.__version__}")
    table.add_column("what")
    for heading in ("MB", "ms", "GB/s", "plain copy ms", "GB/s", "times the limit"):
        table.add_column(heading, justify="right")
    for row in report.rows:
        limit = ["dropped" if "out" in row.what else "zeroed", "", ""]
        if row.limit_s is not None:
            speed = row.num_bytes / row.limit_s / 1e9
            limit = [f"{1e3 * row.limit_s:.1f}", f"{speed:.1f}", f"{row.seconds / row.limit_s:.2f}"]
        speed = row.num_bytes / row.seconds / 1e9
        table.add_row(row.what, f"{row.num_bytes / 1e6:.0f}", f"{1e3 * row.seconds:.1f}", f"{speed:.1f}", *limit)
    return table


def main() -> int:
    """Exit status: 1 where something came back changed or memory was not freed."""
    from rich.console import Console

    parser = argparse.ArgumentParser(description="offload and snapshots against plain copies")
    parser.add_argument("--device", choices=[device.value for device in Device], default=Device.auto.value)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args()
    report = run_ranks(measure, 1, (Device(options.device), options.repetitions))[0]
    console = Console(width=max(Console().width, 120))
    console.print(report_table(report))
    ratios = [row.seconds / row.limit_s for row in report.rows if row.limit_s is not None]
    console.print(f"median of the times over their limits: {statistics.median(ratios):.2f}")
    console.print(
        "every weight and moment came back bit for bit" if report.unchanged else "[red]something changed[/red]"
    )
    console.print(
        f"the optimizer's state came back alone in {1e3 * report.back_s:.0f} ms; "
        f"a step of {1e3 * report.step_s:.0f} ms hid {report.hidden_share:.0%} of that"
    )
    if report.freed_share is not None:
        console.print(f"{report.freed_share:.1%} of the device memory in use was freed")
    if options.json is not None:
        options.json.write_text(json.dumps(asdict(report) | {"passed": report.passed}, indent=2) + "\n")
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
