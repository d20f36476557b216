"""Load and export of Hugging Face checkpoints beside plain copies of the same bytes, and beside other converters.

    python benchmarks/convert.py [--directory DIR] [--repetitions 3] [--bridges FOLDER] [--json results.json]

Two models of about a billion parameters in bfloat16, made on the spot in a temporary folder (``--directory``: where),
one process, page cache warm, the fastest of the repetitions; ours and the copy take turns.  Bytes that must move: to
load, every byte of the tensors once, from the page cache into a parameter that is there; to export, every byte once,
from the parameter into the page cache, and from there to the disk.  So the limits are

- load: ``preadv`` of each tensor of the file into a new tensor, which is dropped before the next;
- save: ``write`` of each tensor into one new file on the same disk.  Both wait for the disk (``fsync``);
- stream: ``clone`` of each parameter, dropped before the next (a bucket is a copy).

Targets: load and save at least 0.8 of the limit; while loading no more than 512 MiB beside the parameters; while
streaming the bucket (512 MiB), while saving nothing (32 MiB are the allocator's).  Memory is the highest resident set
(VmHWM) of the phase.  "beside" is that less the parameters and what the process held before (Python, torch, Megatron);
VmHWM itself is printed too.

--bridges: where mbridge 0.15.1 and megatron-bridge 0.3.1 are, installed with ``--no-deps --target``; the folder that
``tools/set_up.sh`` makes on the CPU rung, unless given.  Where it is, both do the same on the same files, as
benchmarks/converters/bridges.py says, and ours is held against them by processor time, which a busy machine changes
less: load at least 10 times faster, save at least 1.3 times.

Exits with 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table as Rows
from torch import Tensor

from mcore_rl.checkpoints.export import BUCKET_BYTES, export_stream, save_hf
from mcore_rl.checkpoints.hf_directory import HfCheckpoint
from mcore_rl.checkpoints.load import load_hf
from mcore_rl.checkpoints.safetensors import TensorSpec, tensor_bytes
from mcore_rl.checkpoints.sharded_writer import ShardedWriter
from mcore_rl.config.engine import Device, EngineConfig, LayerSpec, Precision
from mcore_rl.config.parallel import ParallelConfig
from mcore_rl.families.registry import model_of
from mcore_rl.parallel.device import Platform, detect, device_of, memory, reset_peak_memory
from mcore_rl.parallel.groups import init_groups
from mcore_rl.parallel.launch import Rank, run_ranks
from mcore_rl.parallel.layout import Layout
from mcore_rl.training.engine import Engine
from mcore_rl.weights.table import Table

RATIO = 0.8
FASTER = {"load": 10.0, "save": 1.3}  # than any other converter, by processor time
OTHERS = {"mbridge": ("llama", "mixtral"), "megatron-bridge": ("llama",)}  # 0.3.1 has no bridge for Mixtral
BESIDE_BYTES = 512 << 20
SLACK_BYTES = 32 << 20  # of the allocator
SHARD_BYTES = 1_000_000_000
POOL = 1 << 22  # random numbers, of which every tensor is a rotation
SHARED: dict[str, Any] = {
    "dtype": "bfloat16",
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "vocab_size": 32_000,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": SHARED
    | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 20,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
    },
    "mixtral": SHARED
    | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 11,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One direction of one converter.

    processor_s: of all threads.  limit_s: the copy.  beside_bytes, peak_bytes: memory, as the module says.
    """

    model: str
    what: str
    num_bytes: int
    seconds: float
    processor_s: float
    limit_s: float | None = None
    beside_bytes: int = 0
    peak_bytes: int = 0
    allowed_bytes: int | None = None

    @property
    def ratio(self) -> float | None:
        """Throughput over that of the copy."""
        return None if self.limit_s is None else self.limit_s / self.seconds

    @property
    def passed(self) -> bool:
        """Whether what was promised holds; the stream promises no speed."""
        slow = self.what in ("load", "save") and self.ratio is not None and self.ratio < RATIO
        return not slow and (self.allowed_bytes is None or self.beside_bytes <= self.allowed_bytes)


def described(directory: Path) -> Table:
    """The table of the checkpoint in ``directory``."""
    return Table(*model_of(json.loads((directory / "config.json").read_text())))


def write_checkpoint(name: str, directory: Path) -> None:
    """A checkpoint of random weights, no two tensors alike and none with NaN."""
    table = Table(*model_of(CONFIGS[name]))
    specs = [TensorSpec(key, torch.bfloat16, info.shape) for key, info in table.hf_tensors.items()]
    pool = torch.randint(0, 16_000, (POOL,), dtype=torch.int16, generator=torch.Generator().manual_seed(0))
    with ShardedWriter(directory, specs, max_shard_bytes=SHARD_BYTES) as writer:
        for index, spec in enumerate(specs):
            numbers = pool.roll(7_919 * index).repeat(-(-prod(spec.shape) // POOL))[: prod(spec.shape)]
            writer.write(spec.name, numbers.view(torch.bfloat16).view(spec.shape))
        (writer.incomplete / "config.json").write_text(json.dumps(CONFIGS[name]))


def read_all(directory: Path) -> None:
    """The limit of loading."""
    with HfCheckpoint.open(directory) as checkpoint:
        for path in sorted({info.file for info in checkpoint.tensors.values()}):
            with path.open("rb", buffering=0) as file:
                for info in checkpoint.tensors.values():
                    if info.file == path:
                        out = torch.empty(info.shape, dtype=info.dtype)
                        assert os.preadv(file.fileno(), [tensor_bytes(out)], info.begin) == info.num_bytes


def write_all(tensors: list[Tensor], path: Path) -> None:
    """The limit of saving."""
    with path.open("wb", buffering=0) as file:
        for tensor in tensors:
            memory_of = tensor_bytes(tensor.detach())
            assert file.write(memory_of) == len(memory_of)
        os.fsync(file.fileno())


def clone_all(tensors: list[Tensor]) -> None:
    """The limit of streaming."""
    for tensor in tensors:
        tensor.detach().clone()


def seconds_of(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def cheapest(run: Callable[[], object], repetitions: int, before: Callable[[], object]) -> tuple[float, float]:
    """(seconds, processor seconds), the least of each over ``repetitions``; ``before`` each is not counted."""
    times = []
    for _ in range(repetitions):
        before()
        processor = time.process_time()
        times.append((seconds_of(run), time.process_time() - processor))
    return min(each[0] for each in times), min(each[1] for each in times)


@contextmanager
def peak(platform: Platform, sizes: dict[str, int]) -> Iterator[None]:
    """What the block needs beside what the process holds before it, and its highest resident set."""
    before = memory(platform).allocated_bytes
    reset_peak_memory(platform)
    yield
    sizes["peak_bytes"] = memory(platform).peak_bytes
    sizes["beside_bytes"] = max(0, sizes["peak_bytes"] - before)


def removed(scratch: Path) -> None:
    for path in scratch.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def measure(rank: Rank, name: str, directory: Path, scratch: Path, repetitions: int) -> list[Row]:
    """Ours, in its own process."""
    platform = detect(Device.cpu)
    rank.init_process_group(platform)
    groups = init_groups(Layout.of(ParallelConfig(), 1), platform, device_of(platform, 0), seed=1)
    config = EngineConfig(
        device=Device.cpu, precision=Precision.bfloat16, layer_spec=LayerSpec.local, microbatch_tokens=64
    )
    table = described(directory)
    engine = Engine("actor", table.model, ParallelConfig(), config, groups, platform, trainable=False)
    parameters = list(engine.models[0].parameters())
    with torch.no_grad():
        for parameter in parameters:
            parameter.fill_(1.0)  # every page is there
    num_bytes = sum(parameter.nbytes for parameter in parameters)

    def load() -> None:
        with HfCheckpoint.open(directory) as checkpoint:
            engine.load_weights(partial(load_hf, checkpoint=checkpoint, table=table, rank=0))

    def save() -> None:
        save_hf(engine.models, table, 0, scratch / "saved", directory, max_shard_bytes=SHARD_BYTES)

    def stream() -> None:
        for bucket in export_stream(engine.models, table, 0):
            del bucket

    memories: dict[str, dict[str, int]] = {"load": {}, "save": {}, "stream": {}}
    read_all(directory)  # warms the page cache
    rows = []
    for what, run, limit, allowed in (
        ("load", load, partial(read_all, directory), BESIDE_BYTES),
        ("save", save, partial(write_all, parameters, scratch / "copy"), SLACK_BYTES),
        ("stream", stream, partial(clone_all, parameters), BUCKET_BYTES + SLACK_BYTES),
    ):
        with peak(platform, memories[what]):
            run()
        if what == "save":
            same(directory, scratch / "saved")
        ours, limits = list[tuple[float, float]](), list[tuple[float, float]]()
        for _ in range(repetitions):
            limits.append(cheapest(limit, 1, partial(removed, scratch)))
            ours.append(cheapest(run, 1, partial(removed, scratch)))
        removed(scratch)
        rows.append(
            Row(
                model=name,
                what=what,
                num_bytes=num_bytes,
                seconds=min(each[0] for each in ours),
                processor_s=min(each[1] for each in ours),
                limit_s=min(each[0] for each in limits),
                allowed_bytes=allowed,
                **memories[what],
            )
        )
    return rows


def same(one: Path, other: Path) -> None:
    """A fast converter that is wrong is no converter."""
    with HfCheckpoint.open(one) as ours, HfCheckpoint.open(other) as theirs:
        assert ours.tensors.keys() == theirs.tensors.keys()
        for name in ours.tensors:
            assert tensor_bytes(ours.read(name)) == tensor_bytes(theirs.read(name)), f"{name} came out changed"


def other_rows(bridges: Path, name: str, directory: Path, scratch: Path, repetitions: int) -> list[Row]:
    """What other converters take, in a process of their own."""
    rows = []
    for converter in (each for each, models in OTHERS.items() if name in models):
        result = scratch.with_name(f"{name}.json")
        files = [str(path.resolve()) for path in (directory, scratch, result)]
        program = [sys.executable, "-m", "benchmarks.converters.bridges", str(bridges.resolve()), converter, name]
        command = [*program, *files, "--repetitions", str(repetitions)]
        subprocess.run(command, cwd=Path(__file__).parents[1], check=True)
        rows += [Row(**row) for row in json.loads(result.read_text())]
    return rows


def beside_others(rows: list[Row]) -> list[str]:
    """What is missed beside other converters, by processor time; one line each."""
    missed = []
    for row in rows:
        what, _, converter = row.what.partition(", ")
        if converter:
            ours = next(each for each in rows if (each.model, each.what) == (row.model, what))
            times = row.processor_s / ours.processor_s
            if times < FASTER[what]:
                missed.append(
                    f"{row.model}: {what} takes 1/{times:.1f} of {converter}'s processor time, not 1/{FASTER[what]}"
                )
    return missed


def result_table(rows: list[Row]) -> Rows:
    table = Rows(title=f"conversion, bfloat16, one process, torch {torch.__version__} (targets: ratio >= {RATIO})")
    for heading in (
        "model",
        "what",
        "GB",
        "s",
        "cpu s",
        "GB/s",
        "copy GB/s",
        "ratio",
        "beside MiB",
        "VmHWM MiB",
        "verdict",
    ):
        table.add_column(heading, justify="left" if heading in ("model", "what") else "right")
    for row in rows:
        copy = ["", ""]
        if row.limit_s is not None:
            copy = [f"{row.num_bytes / row.limit_s / 1e9:.2f}", f"{row.limit_s / row.seconds:.2f}"]
        speed = f"{row.num_bytes / row.seconds / 1e9:.2f}"
        sizes = [f"{row.beside_bytes / 2**20:.0f}", f"{row.peak_bytes / 2**20:.0f}"]
        verdict = "" if row.allowed_bytes is None else "[green]pass[/green]" if row.passed else "[red]MISSED[/red]"
        table.add_row(
            row.model,
            row.what,
            f"{row.num_bytes / 1e9:.2f}",
            f"{row.seconds:.2f}",
            f"{row.processor_s:.2f}",
            speed,
            *copy,
            *sizes,
            verdict,
        )
    return table


def main() -> int:
    """Exit status: 1 where a target is missed."""
    parser = argparse.ArgumentParser(description="load and export of checkpoints against plain copies")
    parser.add_argument("--directory", type=Path, help="where the temporary folder is made (8 GB)")
    parser.add_argument("--repetitions", type=int, default=3)
    bridges = Path(sys.prefix) / "bridges"
    parser.add_argument("--bridges", type=Path, default=bridges, help="folder with mbridge and megatron-bridge")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        for name in CONFIGS:
            directory = Path(folder) / name
            scratch = Path(folder) / f"{name}-scratch"
            scratch.mkdir()
            write_checkpoint(name, directory)
            rows += run_ranks(measure, 1, (name, directory, scratch, options.repetitions))[0]
            if options.bridges.is_dir():
                rows += other_rows(options.bridges, name, directory, scratch, options.repetitions)
            shutil.rmtree(directory)
    Console(width=max(Console().width, 130)).print(result_table(rows))
    if options.json is not None:
        records = [asdict(row) | {"ratio": row.ratio, "passed": row.passed} for row in rows]
        options.json.write_text(json.dumps(records, indent=2) + "\n")
    missed = beside_others(rows)
    for line in missed:
        Console().print(line, style="red", soft_wrap=True)
    return 0 if all(row.passed for row in rows) and not missed else 1


if __name__ == "__main__":
    sys.exit(main())
