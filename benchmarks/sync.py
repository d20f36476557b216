"""A weight update of a model of 1 GB on the CPU, against a plain copy of the same bytes over the same transport.

    python benchmarks/sync.py [--training tp=2] [--rollout tp=1] [--transport shared|staged|separate] [--json FILE]

Two training ranks and one vLLM engine, all real, float32.  Staged: as colocated ranks of two nodes, over gloo to the
rank on the engine's "device", and through memory that both map; separate: over gloo to the engine; shared: as a run on
one CPU host.  The plain copy sends the same bytes by the same stages between the same processes, out of ordinary memory
of all their size into ordinary memory of all their size, both of which were there and touched before: what the
transport takes by itself.  Direct is the update along the reshard plan, until the engine may generate; landed is the
same without vLLM's own packing of layers for its CPU kernels, until the weights are in the parameters; packing is that
packing, of weights that are there.  Memory is each process's peak in any of its updates, above what it held before the
first.

The limit of direct: all CPU seconds of the plain copy and of packing, evenly on all cores, and no less than either.

Targets: landed at most 1.25 times the plain copy, 1.00 of the least bytes there are, at most two buckets of memory.
Direct, with vLLM's packing, which accelerators do not have, is told beside its limit.
Exits with 1 where one is missed.
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
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table as Lines
from vllm.model_executor.model_loader.reload.layerwise import _place_kernel_tensors

from mcore_rl.config.engine import Device, EngineConfig, LayerSpec, Precision
from mcore_rl.config.parallel import parse_layout
from mcore_rl.config.rollout import RolloutConfig, parse_rollout_layout
from mcore_rl.families.registry import model_of
from mcore_rl.parallel.device import detect, device_of, memory, num_cores, reset_peak_memory
from mcore_rl.parallel.launch import HOST, Rank, run_ranks
from mcore_rl.parallel.layout import Layout
from mcore_rl.parallel.secret_store import SecretStore, StoreServer
from mcore_rl.rollout.vllm.engine.process import EngineProcess, start_engine
from mcore_rl.rollout.vllm.receiver import live_weights
from mcore_rl.rollout.vllm.receiver.receive_memory import freed_memory_kept
from mcore_rl.rollout.vllm.worker_methods import Answer, answer_of
from mcore_rl.sync.members import Address
from mcore_rl.sync.publish import Publisher
from mcore_rl.sync.receiver import SyncReceiver
from mcore_rl.sync.routed import RoutedTransport
from mcore_rl.sync.shared_memory import SharedMemoryTransport
from mcore_rl.sync.transport import Transport
from mcore_rl.weights.messages import MessagePart
from mcore_rl.weights.rollout_table import RolloutTable
from mcore_rl.weights.sites import Sites
from mcore_rl.weights.table import Table
from mcore_rl.weights.tensor_slice import TensorSlice

NUM_TRAINERS = 2
BUCKET_BYTES = 256 << 20
MAX_RATIO = 1.25
MAX_BUCKETS = 2.0
PLAIN = "plain"
LANDED = "landed"
PACKING = "packing"
DIRECT = "direct"
WARM_UP = [DIRECT, DIRECT, PLAIN, DIRECT]  # not timed; memory is new to the process here
ROUNDS = [*WARM_UP, *([PLAIN, LANDED, PACKING, DIRECT] * 8)]


class TimedReceiver(SyncReceiver):
    """Workers of the benchmark."""

    def timed_prepare(self) -> Answer[None]:
        """Get and touch the memory of ``timed_plain``."""
        sizes = [message.num_bytes for message in self._sync_channel().plan.messages]
        self.timed_places = torch.ones(sum(sizes), dtype=torch.uint8).split(sizes)
        return {"result": None}

    def timed_plain(self) -> Answer[None]:
        """Receive all messages of an update into plain memory, one behind the other."""
        updates = self._sync_channel()
        places = self.timed_places
        updates.incoming.begin(0)
        wanted = [(message.source_rank, message.num_bytes) for message in updates.plan.messages]
        for place, message in zip(places, updates.incoming.messages(wanted, updates.plan.rounds), strict=True):
            place.copy_(message)
        updates.incoming.finish()
        return {"result": None}

    def timed_landed(self, version: int) -> Answer[None]:
        """Receive an update into the parameters, and process none of them: vLLM's modules stay as they were."""
        live = self._sync_channel().live
        packed = {each: each.cpu_linear for each in live.model.modules() if hasattr(each, "cpu_linear")}
        with patch.object(live_weights, "_layerwise_process", _put_back):
            answer = self.sync_receive(version)
        for module, cpu_linear in packed.items():
            module.cpu_linear = cpu_linear
        return answer

    def timed_packing(self) -> Answer[None]:
        """Make of all modules what is executed, of whatever lies where they wait: a direct update must follow."""
        live = self._sync_channel().live
        with freed_memory_kept():
            live.start()
            for module, name in {place.module: name for name, place in live.places.items()}.items():
                live._view(name, None, TensorSlice.whole(live.table.shape(live.stored[name])))
                live.process(module)
            live.finish()
        return {"result": None}

    def timed_memory(self, reset: bool = False) -> list[float]:
        """[resident, peak since the last reset], bytes, and the seconds of CPU that this process has had."""
        platform = detect(Device.cpu)
        if reset:
            reset_peak_memory(platform)
        now = memory(platform)
        return [now.allocated_bytes, now.peak_bytes, time.process_time()]


def _put_back(module: torch.nn.Module, info: Any) -> None:
    """Instead of vLLM's processing: the module is as it was before the update."""
    _place_kernel_tensors(module, info)
    info.reset()


@dataclass(frozen=True, kw_only=True)
class Round:
    """One update.

    cpu_seconds: that all of its processes had together.  trainer_buckets, worker_buckets: of memory, of the training
    rank and of the worker that took most.
    """

    kind: str
    seconds: float
    cpu_seconds: float
    gigabytes: float
    over_bound: float
    trainer_buckets: float
    worker_buckets: float


class PlainParts:
    """Instead of ``Publisher.live``: parts in plain memory, one behind the other."""

    def __init__(self, publisher: Publisher) -> None:
        blocks = (block for each in publisher.rounds for leg in each.legs for block in leg)
        parts = [part for message in publisher.sent for part in message.parts]
        parts += [part for block in blocks if block.sender == publisher.rank for part in block.parts]
        sizes = [part.num_bytes for part in parts]
        places = torch.ones(sum(sizes), dtype=torch.uint8).split(sizes)
        self.places = {_name(part): place for part, place in zip(parts, places, strict=True)}

    def __call__(self, part: MessagePart) -> torch.Tensor:
        return self.places[_name(part)].view(torch.float32).view(part.target_slice.shape)


def _name(part: MessagePart) -> tuple[object, ...]:
    return part.chunk, part.source, part.source_slice


def write_model(directory: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=1536,
        intermediate_size=6144,
        num_hidden_layers=6,
        num_attention_heads=12,
        num_key_value_heads=4,
        head_dim=128,
        vocab_size=16000,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(directory)


def train(rank: Rank, directory: Path, training: str, rollout: str, transport: Transport) -> list[dict[str, Any]]:
    """One training rank: publishes every round.  Megatron is imported in these processes only."""
    from mcore_rl.checkpoints.hf_directory import HfCheckpoint
    from mcore_rl.checkpoints.load import load_hf
    from mcore_rl.parallel.groups import init_groups
    from mcore_rl.training.engine import Engine

    platform = detect(Device.cpu)
    torch.set_num_threads(1)
    rank.init_process_group(platform)
    parallel = parse_layout(training)
    groups = init_groups(Layout.of(parallel, NUM_TRAINERS), platform, device_of(platform, rank.rank), seed=1)
    family, model = model_of(json.loads((directory / "config.json").read_text()))
    settings = EngineConfig(
        device=Device.cpu, precision=Precision.float32, layer_spec=LayerSpec.local, microbatch_tokens=64
    )
    engine = Engine("actor", model, parallel, settings, groups, platform, trainable=False)
    table = Table(family, model, parallel, NUM_TRAINERS)
    with HfCheckpoint.open(directory) as checkpoint:
        engine.load_weights(partial(load_hf, checkpoint=checkpoint, table=table, rank=rank.rank))
    target = RolloutTable(family, model, parse_rollout_layout(rollout))
    publisher = Publisher(
        engine.models, table, target, rank.rank, transport, dtype=torch.float32, bucket_bytes=BUCKET_BYTES
    )
    store = SecretStore(transport.address.store)
    if rank.rank == 0:
        store.set("opening", publisher.opening())
    publisher.open()
    plain = PlainParts(publisher)
    measured = []
    at_first = memory(platform).allocated_bytes
    for version, kind in enumerate(ROUNDS):
        if kind == PACKING:
            measured.append({"gigabytes": 0.0, "over_bound": 0.0, "extra": 0, "cpu": 0.0})
            continue
        if kind == PLAIN:
            publisher.live = plain  # type: ignore[method-assign]
        else:
            publisher.__dict__.pop("live", None)
        reset_peak_memory(platform)
        cpu_before = time.process_time()
        published = publisher.publish(version)
        measured.append(
            {
                "gigabytes": published.num_bytes / 1e9,
                "over_bound": published.bytes_over_bound,
                "extra": memory(platform).peak_bytes - at_first,
                "cpu": time.process_time() - cpu_before,
            }
        )
    return measured


async def receive(engine: EngineProcess, store: SecretStore) -> list[tuple[float, float, float]]:
    """(seconds, CPU seconds of all workers, extra bytes of the worker that took most) of each round."""
    while not store.check(["opening"]):
        await asyncio.sleep(0.05)
    for answer in await engine.call_workers(TimedReceiver.sync_open, store.get("opening")):
        answer_of(answer)
    await engine.call_workers(TimedReceiver.timed_prepare)
    measured = []
    at_first = await engine.call_workers(TimedReceiver.timed_memory)
    for version, kind in enumerate(ROUNDS):
        before = await engine.call_workers(TimedReceiver.timed_memory, reset=True)
        begun = time.perf_counter()
        if kind == PLAIN:
            answers = await engine.call_workers(TimedReceiver.timed_plain)
        elif kind == LANDED:
            answers = await engine.call_workers(TimedReceiver.timed_landed, version)
        elif kind == PACKING:
            answers = await engine.call_workers(TimedReceiver.timed_packing)
        else:
            answers = await engine.call_workers(TimedReceiver.sync_receive, version)
        for answer in answers:
            answer_of(answer)
        seconds = time.perf_counter() - begun
        each = list(zip(await engine.call_workers(TimedReceiver.timed_memory), before, strict=True))
        cpu_seconds = sum(after[2] - start[2] for after, start in each)
        extra = max(after[1] - start[0] for (after, _), start in zip(each, at_first, strict=True))
        measured.append((seconds, cpu_seconds, extra))
    return measured


def measure(directory: Path, training: str, rollout: str, over: str) -> list[Round]:
    """All rounds, in order."""
    write_model(directory)
    server = StoreServer(HOST)
    store = SecretStore(server.access)
    layout, platform = parse_rollout_layout(rollout), detect(Device.cpu)
    address = Address(
        store=server.access,
        name="benchmark",
        num_trainers=NUM_TRAINERS,
        num_rollout=layout.world_size,
        timeout_s=60.0,
        join_timeout_s=120.0,
    )
    hosts = tuple(rank % NUM_TRAINERS for rank in range(layout.world_size))
    transport: Transport = {
        "shared": SharedMemoryTransport(address=address),
        "staged": RoutedTransport(
            address=address, platform=platform, sites=Sites(tuple(range(NUM_TRAINERS)), hosts, hosts)
        ),
        "separate": RoutedTransport(
            address=address, platform=platform, sites=Sites((0,) * NUM_TRAINERS, (1,) * layout.world_size)
        ),
    }[over]
    config = RolloutConfig(
        tp=layout.tp,
        device=Device.cpu,
        dtype=Precision.float32,
        max_prompt_length=32,
        max_response_length=32,
        kv_cache_memory_bytes=1 << 26,
    )
    with start_engine("engine", directory, config, extension=f"{Path(__file__).stem}.TimedReceiver") as engine:
        trained: list[list[dict[str, Any]]] = []
        arguments = (directory, training, rollout, transport)
        thread = threading.Thread(target=lambda: trained.extend(run_ranks(train, NUM_TRAINERS, arguments)))
        thread.start()
        received = asyncio.run(receive(engine, store))
        thread.join()
    return [
        Round(
            kind=kind,
            seconds=seconds,
            cpu_seconds=cpu_seconds + sum(rank[index]["cpu"] for rank in trained),
            gigabytes=sum(rank[index]["gigabytes"] for rank in trained),
            over_bound=trained[0][index]["over_bound"],
            trainer_buckets=max(rank[index]["extra"] for rank in trained) / BUCKET_BYTES,
            worker_buckets=extra / BUCKET_BYTES,
        )
        for index, (kind, (seconds, cpu_seconds, extra)) in enumerate(zip(ROUNDS, received, strict=True))
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--training", default="tp=2", help="layout of the two training ranks")
    parser.add_argument("--rollout", default="tp=1", help="layout of the engine")
    parser.add_argument(
        "--transport", default="shared", choices=("shared", "staged", "separate"), help="see above (default: shared)"
    )
    parser.add_argument("--json", type=Path, help="also write the results there")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rounds = measure(Path(folder), arguments.training, arguments.rollout, arguments.transport)
    lines = Lines("", "s (median)", "CPU s", "GB", "GB/s", "bytes over bound", "buckets: trainer", "buckets: worker")
    seconds = {}
    cpu = {}
    for kind in (PLAIN, LANDED, PACKING, DIRECT):
        mine = [one for one in rounds[len(WARM_UP) :] if one.kind == kind]
        seconds[kind] = statistics.median(one.seconds for one in mine)
        cpu[kind] = statistics.median(one.cpu_seconds for one in mine)
        same = [one for one in rounds if one.kind == kind]
        extra = [max(getattr(one, side) for one in same) for side in ("trainer_buckets", "worker_buckets")]
        sent = mine[0].gigabytes
        over_bound = mine[0].over_bound
        figures = (f"{sent:.2f}", f"{sent / seconds[kind]:.2f}", f"{over_bound:.2f}") if sent else ("", "", "")
        lines.add_row(kind, f"{seconds[kind]:.2f}", f"{cpu[kind]:.2f}", *figures, *(f"{one:.2f}" for one in extra))
    console = Console()
    console.print(lines)
    direct = [one for one in rounds if one.kind == DIRECT]
    ratio = seconds[LANDED] / seconds[PLAIN]
    limit = max(seconds[PLAIN], seconds[PACKING], (cpu[PLAIN] + cpu[PACKING]) / num_cores())
    buckets = max(max(one.trainer_buckets, one.worker_buckets) for one in direct)
    console.print(
        f"landed over plain: {ratio:.2f} (at most {MAX_RATIO}), of CPU seconds {cpu[LANDED] / cpu[PLAIN]:.2f}; "
        f"direct over plain: {seconds[DIRECT] / seconds[PLAIN]:.2f}, of CPU seconds {cpu[DIRECT] / cpu[PLAIN]:.2f}, "
        f"over its limit on {num_cores()} cores: {seconds[DIRECT] / limit:.2f}; "
        f"memory: {buckets:.2f} buckets of {BUCKET_BYTES >> 20} MiB (at most {MAX_BUCKETS:g})"
    )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(one) for one in rounds], indent=2) + "\n")
    kept = ratio <= MAX_RATIO and buckets <= MAX_BUCKETS and all(one.over_bound == 1.0 for one in direct)
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
