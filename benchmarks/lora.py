"""Adapters beside whole weights and beside PEFT, on this machine: steps, memory and weight updates.

    python benchmarks/lora.py [--rank 32] [--steps 5] [--only steps|updates] [--json FILE]

Steps: one process each and one dense model of 1 GB in float32 for a full step of the engine, the same with adapters on
all linear layers, and PEFT on transformers with torch's AdamW; all compute as many tokens.  A step is forward,
backward and optimizer; the median of ``--steps``, each of which all three take in turn.  Memory is a process's peak in
such a step (VmHWM), also above what it held when it was built; the plan's is ``planning.memory.process_peak``.
Updates: one training rank and a vLLM engine of the same model that applies the adapters; from pausing the engine until
it may generate, after the first update, which brings the base.

Targets: a step with adapters is no slower than a full one; its process's peak is within 5 % of the plan's; an update
takes at most 50 ms.  Exits with 1 where one is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table as Lines

from benchmarks.plan import batch_of, loss
from benchmarks.sync import write_model
from mcore_rl.config.engine import Device, LayerSpec, OptimizerConfig, Precision
from mcore_rl.config.lora import LoraConfig
from mcore_rl.config.parallel import ParallelConfig
from mcore_rl.config.roles import ActorConfig
from mcore_rl.config.rollout import RolloutConfig, RolloutLayout
from mcore_rl.families.registry import model_of
from mcore_rl.parallel.device import detect, device_of, memory, num_cores, reset_peak_memory
from mcore_rl.parallel.launch import HOST, Rank, run_ranks
from mcore_rl.parallel.layout import Layout
from mcore_rl.parallel.secret_store import SecretStore, StoreServer
from mcore_rl.planning.memory import process_peak
from mcore_rl.planning.training import RolePlan, Work
from mcore_rl.rollout.vllm.engine.process import EngineProcess, start_engine
from mcore_rl.rollout.vllm.worker_methods import WEIGHT_RECEIVER, WeightReceiverMethods, answer_of
from mcore_rl.sync.members import Address
from mcore_rl.sync.publish import Publisher
from mcore_rl.sync.shared_memory import SharedMemoryTransport
from mcore_rl.weights.adapter_table import AdapterTable
from mcore_rl.weights.rollout_adapters import RolloutAdapterTable
from mcore_rl.weights.rollout_table import RolloutTable
from mcore_rl.weights.table import Table

FULL = "whole weights"
ADAPTERS = "adapters"
PEFT = "PEFT"
SEQUENCES = 2
LENGTH = 256
UPDATES = 30
MAX_RATIO = 1.0
MEMORY_TOLERANCE = 0.05
MAX_UPDATE_S = 0.05


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Of one way to train.  extra: bytes of a step's peak above the built base.  predicted: None: nobody plans it."""

    kind: str
    seconds: list[float]
    peak: int
    extra: int
    predicted: int | None


def lora_of(rank: int) -> LoraConfig:
    return LoraConfig(rank=rank, alpha=float(rank))


def config_of(lora: LoraConfig | None) -> ActorConfig:
    return ActorConfig(
        device=Device.cpu,
        precision=Precision.float32,
        layer_spec=LayerSpec.local,
        microbatch_tokens=SEQUENCES * LENGTH,
        optim=OptimizerConfig(lr=1e-5),
        lora=lora or LoraConfig(),
    )


def engine_steps(directory: Path, lora: LoraConfig | None) -> Any:
    """(what takes a step, the plan's peak of this process)."""
    from mcore_rl.parallel.groups import init_groups
    from mcore_rl.training.engine import Engine

    platform = detect(Device.cpu)
    family, model = model_of(json.loads((directory / "config.json").read_text()))
    groups = init_groups(Layout.of(ParallelConfig(), 1), platform, device_of(platform, 0), seed=1)
    adapters = AdapterTable(Table(family, model), lora) if lora else None
    config = config_of(lora)
    engine = Engine("actor", model, ParallelConfig(), config, groups, platform, adapters=adapters)
    batch, counts = batch_of(model, SEQUENCES, LENGTH)
    work = Work(sequences=SEQUENCES, longest=LENGTH, mean=LENGTH)
    plan = RolePlan("actor", model, config, ParallelConfig(), 1, work, accelerator=False)
    return partial(engine.train_step, batch, loss, counts), process_peak(plan, 0)


def peft_steps(directory: Path, lora: LoraConfig) -> Any:
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    wrapped = get_peft_model(model, PeftConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules="all-linear"))
    optimizer = torch.optim.AdamW([each for each in wrapped.parameters() if each.requires_grad], lr=1e-5)
    tokens = torch.randint(model.config.vocab_size, (SEQUENCES, LENGTH))

    def step() -> None:
        logits = wrapped(tokens).logits[:, :-1].float()
        total = -torch.log_softmax(logits, -1).gather(-1, tokens[:, 1:, None]).mean()
        total.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, None


def take_steps(kind: str, directory: Path, lora: LoraConfig, orders: Connection) -> None:
    """A process: takes a step and tells of it whenever it is asked; the first one makes Adam's moments."""
    torch.set_num_threads(num_cores())
    platform = detect(Device.cpu)
    if kind == PEFT:
        step, predicted = peft_steps(directory, lora)
    else:
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group(platform.backend, store=store, rank=0, world_size=1)
        step, predicted = engine_steps(directory, lora if kind == ADAPTERS else None)
    built = memory(platform).allocated_bytes
    step()
    while orders.recv():
        reset_peak_memory(platform)
        begun = time.perf_counter()
        step()
        peak = memory(platform).peak_bytes
        orders.send((time.perf_counter() - begun, peak, peak - built, predicted))


def measure_steps(directory: Path, lora: LoraConfig, num_steps: int) -> list[Steps]:
    """All three, which take their steps in turn."""
    context = get_context("spawn")
    running = []
    for kind in (FULL, ADAPTERS, PEFT):
        ours, theirs = context.Pipe()
        process = context.Process(target=take_steps, args=(kind, directory, lora, theirs))
        process.start()
        running.append((kind, process, ours))
    taken: dict[str, list[Any]] = {kind: [] for kind, _, _ in running}
    for _ in range(num_steps):
        for kind, _, orders in running:
            orders.send(True)
            taken[kind].append(orders.recv())
    for _, process, orders in running:
        orders.send(False)
        process.join()
    return [
        Steps(
            kind=kind,
            seconds=[each[0] for each in steps],
            peak=max(each[1] for each in steps),
            extra=max(each[2] for each in steps),
            predicted=steps[0][3],
        )
        for kind, steps in taken.items()
    ]


def publish(rank: Rank, directory: Path, lora: LoraConfig, transport: SharedMemoryTransport) -> int:
    """The training rank: publishes every update; the bytes of one that brings adapters alone."""
    from mcore_rl.checkpoints.hf_directory import HfCheckpoint
    from mcore_rl.checkpoints.load import load_hf
    from mcore_rl.parallel.groups import init_groups
    from mcore_rl.training.engine import Engine

    platform = detect(Device.cpu)
    torch.set_num_threads(1)
    rank.init_process_group(platform)
    groups = init_groups(Layout.of(ParallelConfig(), 1), platform, device_of(platform, 0), seed=1)
    family, model = model_of(json.loads((directory / "config.json").read_text()))
    table = Table(family, model)
    adapters = AdapterTable(table, lora)
    engine = Engine(
        "actor", model, ParallelConfig(), config_of(lora), groups, platform, trainable=False, adapters=adapters
    )
    with HfCheckpoint.open(directory) as checkpoint:
        engine.load_weights(partial(load_hf, checkpoint=checkpoint, table=table, rank=0))
    target = RolloutTable(family, model, RolloutLayout())
    publisher = Publisher(engine.models, table, target, 0, transport, dtype=torch.float32, adapters=adapters)
    store = SecretStore(transport.address.store)
    store.set("opening", publisher.opening())
    publisher.open()
    return [publisher.publish(version).num_bytes for version in range(UPDATES)][-1]


async def update(engine: EngineProcess, store: SecretStore) -> list[float]:
    """Seconds from pausing the engine until it may generate, of every update but the first."""
    while not store.check(["opening"]):
        await asyncio.sleep(0.05)
    for answer in await engine.call_workers(WeightReceiverMethods.sync_open, store.get("opening")):
        answer_of(answer)
    seconds = []
    for version in range(UPDATES):
        await asyncio.sleep(0.2)  # the publisher waits by then
        begun = time.perf_counter()
        await engine.start_update()
        for received in await engine.call_workers(WeightReceiverMethods.sync_receive, version):
            answer_of(received)
        await engine.finish_update(version)
        seconds.append(time.perf_counter() - begun)
    return seconds[1:]


def measure_updates(directory: Path, lora: LoraConfig) -> tuple[list[float], int]:
    """(seconds of the updates that bring adapters alone, their bytes)."""
    family, model = model_of(json.loads((directory / "config.json").read_text()))
    held = RolloutAdapterTable(RolloutTable(family, model, RolloutLayout()), AdapterTable(Table(family, model), lora))
    config = RolloutConfig(
        device=Device.cpu,
        dtype=Precision.float32,
        max_prompt_length=32,
        max_response_length=32,
        kv_cache_memory_bytes=1 << 26,
    )
    server, published = StoreServer(HOST), list[int]()
    address = Address(
        store=server.access, name="benchmark", num_trainers=1, num_rollout=1, timeout_s=60.0, join_timeout_s=180.0
    )
    arguments = (directory, lora, SharedMemoryTransport(address=address))
    with start_engine(
        "engine", directory, config, extension=WEIGHT_RECEIVER, awaits_weights=True, adapters=held.engine_adapters
    ) as engine:
        thread = threading.Thread(target=lambda: published.extend(run_ranks(publish, 1, arguments)))
        thread.start()
        seconds = asyncio.run(update(engine, SecretStore(server.access)))
        thread.join()
    return seconds, published[0]


def show_steps(console: Console, steps: list[Steps]) -> bool:
    """Prints them; True if they keep the targets."""
    lines = Lines(
        "", "s (median)", "of a full step", "peak GB", "above the base GB", "peak by the plan GB", "plan / peak"
    )
    median = {each.kind: statistics.median(each.seconds) for each in steps}
    for each in steps:
        plan = (
            ("", "") if each.predicted is None else (f"{each.predicted / 1e9:.2f}", f"{each.predicted / each.peak:.3f}")
        )
        ratio = f"{median[each.kind] / median[FULL]:.2f}"
        lines.add_row(
            each.kind, f"{median[each.kind]:.2f}", ratio, f"{each.peak / 1e9:.2f}", f"{each.extra / 1e9:.2f}", *plan
        )
    console.print(lines)
    adapters = next(each for each in steps if each.kind == ADAPTERS)
    assert adapters.predicted is not None
    planned = abs(adapters.predicted / adapters.peak - 1) <= MEMORY_TOLERANCE
    return planned and median[ADAPTERS] <= MAX_RATIO * median[FULL]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=32, help="of the adapters (default: 32)")
    parser.add_argument("--steps", type=int, default=5, help="of each way (default: 5)")
    parser.add_argument("--only", choices=("steps", "updates"), help="measure these alone")
    parser.add_argument("--json", type=Path, help="also write the results there")
    arguments = parser.parse_args()
    console = Console()
    lora = lora_of(arguments.rank)
    kept = True
    paths = dict[str, Any]()
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        if arguments.only != "updates":
            steps = measure_steps(Path(folder), lora, arguments.steps)
            kept &= show_steps(console, steps)
            paths["steps"] = [asdict(each) for each in steps]
        if arguments.only != "steps":
            seconds, num_bytes = measure_updates(Path(folder), lora)
            median = statistics.median(seconds)
            console.print(
                f"an update of {num_bytes / 1e6:.1f} MB: {1e3 * median:.0f} ms until the engine may generate "
                f"(median of {len(seconds)}; fastest {1e3 * min(seconds):.0f}, slowest {1e3 * max(seconds):.0f})"
            )
            kept &= median <= MAX_UPDATE_S
            paths["updates"] = {"seconds": seconds, "bytes": num_bytes}
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(paths, indent=2) + "\n")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
