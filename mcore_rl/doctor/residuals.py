"""The check of what processes take beside tensors: of the host, and of a device by its context and its communicators.

A training process of a tiny mixture of experts takes one step in the layout that has most groups.  On an accelerator a
second process on each device says how much of it was free before: only then is a context, which is made by the first
call, seen from outside.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from mcore_rl.config.engine import LayerSpec, Precision
from mcore_rl.doctor.checks import Diagnosis, HealthCheck, Subject, Verdict
from mcore_rl.doctor.layers import loaded_engine, sample_batch
from mcore_rl.doctor.tiny_task import write_model
from mcore_rl.ground.types import Denominators, LossInputs, LossSums
from mcore_rl.parallel.device import Platform, empty_cache, memory, set_device, synchronize, trim_heap
from mcore_rl.parallel.launch import Rank, run_ranks
from mcore_rl.parallel.meeting import join_group
from mcore_rl.parallel.phase import phase
from mcore_rl.parallel.secret_store import SecretStore
from mcore_rl.planning.overheads import COLLECTIVE_BYTES, CONTEXT_BYTES, CPU_PROCESS_BYTES, HOST_PROCESS_BYTES

MIB = 2**20
TIMEOUT_S = 120.0
MATRIX = 2048  # of the product that loads the matrix library and its workspace
# Of what the planner assumes, before the file must be given to it: its plans of the CPU err by up to a tenth.
MORE = 1.1


@dataclass(frozen=True, kw_only=True)
class ProcessResiduals:
    """What one training process takes beside its tensors, bytes; context and collectives are 0 on the CPU.

    host: with its share of the libraries that the training processes map together.
    """

    host: int
    context: int = 0
    collectives: int = 0


def host_bytes(processes: Sequence[psutil.Process]) -> int:
    """Host memory of ``processes``: what each has for itself, and once what they share, which is mostly libraries.

    Not proportional set sizes: these fall with every other program of the machine that maps the same libraries.
    """
    whole = [process.memory_full_info() for process in processes]
    return sum(each.uss for each in whole) + max(each.rss - each.uss for each in whole)


def layout_of(num_ranks: int) -> str:
    """The layout of a tiny mixture that communicates over most axes."""
    axes = [("tp", 2), ("ep", 2)] if num_ranks % 2 == 0 else []
    axes += [("pp", 2)] if num_ranks % 4 == 0 else []
    return ",".join(f"{name}={size}" for name, size in axes)


def measure_process(rank: Rank, platform: Platform, directory: Path, num_trainers: int) -> ProcessResiduals | None:
    """What a training process takes.  Ranks from ``num_trainers`` on watch the devices of the first; None of them."""
    store = SecretStore(rank.store, TIMEOUT_S)
    if rank.rank >= num_trainers:
        _watch(platform, store, rank.rank - num_trainers)
        return None
    free = None
    if platform.is_accelerator:
        with phase("waiting for who watches the device"):
            free = int(store.get(f"free {rank.rank}"))
    context = _context(platform, rank.rank, free)
    with phase("training a tiny model", ranks=num_trainers):
        join_group(rank.store, "trainers", platform, rank.rank, num_trainers, TIMEOUT_S)
        counted = _train(platform, directory, num_trainers, rank.rank)
    gc.collect()
    trim_heap()
    own = psutil.Process().memory_full_info()
    host = own.uss + (own.rss - own.uss) // num_trainers - (0 if platform.is_accelerator else counted)
    collectives = 0 if free is None else free - memory(platform).free_bytes - memory(platform).reserved_bytes - context
    store.set(f"measured {rank.rank}", b"")
    return ProcessResiduals(host=host, context=context, collectives=max(0, collectives))


def _watch(platform: Platform, store: SecretStore, device: int) -> None:
    """Says how much of ``device`` is free, and keeps its own context until that was used."""
    set_device(platform, device)
    torch.ones(1, device=platform.device_type)
    synchronize(platform)
    store.set(f"free {device}", str(memory(platform).free_bytes).encode())
    with phase("watching a device"):
        store.get(f"measured {device}")


def _context(platform: Platform, local_rank: int, free: int | None) -> int:
    """Bytes of the device that this process takes with its first kernels, beside what torch's allocator reserves."""
    if free is None:
        return 0
    device = set_device(platform, local_rank)
    matrix = torch.ones(MATRIX, MATRIX, dtype=torch.bfloat16, device=device)
    matrix = matrix @ matrix
    synchronize(platform)
    return max(0, free - memory(platform).free_bytes - memory(platform).reserved_bytes)


def _train(platform: Platform, directory: Path, num_ranks: int, rank: int) -> int:
    """One step of the tiny model.  Returns the bytes of its tensors, which live on."""
    precision = Precision.bfloat16 if platform.is_accelerator else Precision.float32
    engine = loaded_engine(
        rank, num_ranks, platform, directory, layout_of(num_ranks), precision, LayerSpec.local, trainable=True
    )
    batch = sample_batch(engine.model.vocab_size)
    num_tokens = int(batch.mask_T.sum())
    engine.train_step(batch, _likelihood, Denominators(loss=float(num_tokens), tokens=num_tokens, sequences=6))
    counted = sum(engine.memory.offload().num_bytes.values())
    engine.memory.onload()
    empty_cache(platform)
    _kept.append(engine)
    return counted


_kept: list[object] = []  # engines whose groups must outlive the measurement


def _likelihood(inputs: LossInputs) -> LossSums:
    assert inputs.logprobs_N is not None
    return LossSums(total=-(inputs.logprobs_N * inputs.mask_N).sum(), metrics={})


def residual_diagnosis(measured: Sequence[ProcessResiduals], platform: Platform) -> Diagnosis:
    """The largest of all processes, beside what the planner assumes; more than that is WARN."""
    rows = [("host", "host_trainer", HOST_PROCESS_BYTES if platform.is_accelerator else CPU_PROCESS_BYTES)]
    if platform.is_accelerator:
        rows += [("context", "device_context", CONTEXT_BYTES)]
        rows += [("collectives", "device_collectives", COLLECTIVE_BYTES)] if len(measured) > 1 else []
    numbers = {}
    words = []
    assumed = []
    more = []
    for name, key, expected in rows:
        largest = max(getattr(each, name) for each in measured)
        numbers[f"{key}_mib"] = round(largest / MIB, 3)
        words.append(f"{name} {largest / MIB:,.0f}")
        assumed.append(f"{expected / MIB:,.0f}")
        if largest > MORE * expected:
            more.append(name)
    return Diagnosis(
        check="process memory",
        verdict=Verdict.WARN if more else Verdict.PASS,
        measured=f"MiB of a training process beside its tensors: {', '.join(words)}",
        expected=f"at most what the planner assumes: {', '.join(assumed)}",
        remedy="Plan with this file (cluster.measured=doctor.json): without it a plan is too small" if more else "",
        numbers=numbers,
    )


def _residuals(subject: Subject, limit_s: float) -> Iterator[Diagnosis]:
    directory = write_model(subject.directory / "process_memory")
    trainers = subject.num_ranks
    world = 2 * trainers if subject.platform.is_accelerator else trainers
    measured = run_ranks(measure_process, world, (subject.platform, directory, trainers), timeout_s=limit_s)
    yield residual_diagnosis([each for each in measured if each is not None], subject.platform)


CHECKS = (
    HealthCheck(
        name="process memory",
        about="what training processes take of host and device beside their tensors",
        limit_s=180,
        run=_residuals,
    ),
)
