"""The check of a rollout engine: it starts, sleeps, wakes, holds the weights of its files, and draws the same again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

import psutil

from mcore_rl.config.engine import Precision
from mcore_rl.config.rollout import RolloutConfig
from mcore_rl.doctor.checks import THOROUGH, Diagnosis, HealthCheck, Subject, Verdict
from mcore_rl.doctor.residuals import host_bytes
from mcore_rl.doctor.tiny_task import write_model
from mcore_rl.doctor.vendor_tools import libraries_in
from mcore_rl.parallel.device import Platform, memory, set_device
from mcore_rl.parallel.launch import Rank, run_ranks
from mcore_rl.parallel.phase import phase
from mcore_rl.proofs.differences import worst
from mcore_rl.rollout.protocol import Prompt, Request, Sampling
from mcore_rl.rollout.vllm.engine.process import EngineProcess, start_engine
from mcore_rl.rollout.vllm.worker_methods import HELD_WEIGHTS, HeldWeightsMethods

GREEDY = Sampling(max_tokens=16, temperature=0.0, ignore_eos=True)
KV_CACHE_BYTES = 64 << 20
PROMPTS = (tuple(range(10, 26)), tuple(range(30, 38)), tuple(range(40, 45)))
RELEASED = 0.9  # of the cache, in sleep: context and libraries, most of what a tiny engine takes, stay


@dataclass(frozen=True)
class EngineLife:
    """What one engine did.  Times in seconds; bytes of the device, and of the host by all its processes.

    differing: tensors that are not those of the files.  doubled: libraries of which a process of it has two copies.
    """

    start_s: float
    sleep_s: float
    wake_s: float
    awake_bytes: int
    asleep_bytes: int
    host_bytes: int
    same_tokens: bool
    differing: tuple[str, ...]
    doubled: tuple[str, ...] = ()


def live(rank: Rank, platform: Platform, directory: Path) -> EngineLife:
    """Starts an engine with the weights of ``directory`` and puts it to sleep and awake again."""
    set_device(platform, 0)
    config = RolloutConfig(
        device=platform.kind,
        dtype=Precision.bfloat16 if platform.is_accelerator else Precision.float32,
        max_prompt_length=64,
        max_response_length=GREEDY.max_tokens,
        kv_cache_memory_bytes=KV_CACHE_BYTES,
        max_num_seqs=8,
        enforce_eager=True,
    )
    before = _used(platform)
    begun = time.perf_counter()
    log = directory.parent / "engine.log"
    with (
        phase("starting an engine"),
        start_engine("engine", directory, config, extension=HELD_WEIGHTS, log=log) as engine,
    ):
        return asyncio.run(_live(engine, platform, directory, time.perf_counter() - begun, before))


async def _live(engine: EngineProcess, platform: Platform, directory: Path, start_s: float, before: int) -> EngineLife:
    with phase("drawing"):
        first = await _draw(engine)
    awake = _used(platform) - before
    with phase("sleeping"):
        begun = time.perf_counter()
        await engine.sleep()
        sleep_s = time.perf_counter() - begun
    asleep = _used(platform) - before
    with phase("waking"):
        begun = time.perf_counter()
        await engine.wake()
        wake_s = time.perf_counter() - begun
    with phase("comparing its weights with the files"):
        held = await engine.call_workers(HeldWeightsMethods.held_differences, str(directory), "tp=1")
    with phase("drawing again"):
        again = await _draw(engine)
    root = psutil.Process(engine.pid)
    processes = (root, *root.children(recursive=True))
    return EngineLife(
        start_s=start_s,
        sleep_s=sleep_s,
        wake_s=wake_s,
        awake_bytes=awake,
        asleep_bytes=asleep,
        host_bytes=host_bytes(processes),
        same_tokens=first == again,
        differing=tuple(worst(held)),
        doubled=_doubled(processes, platform),
    )


def _doubled(processes: Sequence[psutil.Process], platform: Platform) -> tuple[str, ...]:
    """Families of a vendor's libraries that any of ``processes`` has loaded from two folders."""
    families = set[str]()
    for process in processes:
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        families |= {name for name, places in libraries_in(maps, platform.kind).items() if len(places) > 1}
    return tuple(sorted(families))


async def _draw(engine: EngineProcess) -> dict[str, list[int]]:
    requests = [Request(prompt=Prompt(id=str(index), tokens=tokens)) for index, tokens in enumerate(PROMPTS)]
    async with aclosing(engine.generate(requests, GREEDY)) as samples:
        return {sample.prompt_id: sample.tokens.tolist() async for sample in samples}


def _used(platform: Platform) -> int:
    """Bytes of the device that are in use, by whomever."""
    if not platform.is_accelerator:
        return 0
    now = memory(platform)
    return now.total_bytes - now.free_bytes


def engine_diagnosis(life: EngineLife, platform: Platform) -> Diagnosis:
    """FAIL where weights or tokens are not what they were; WARN where sleep keeps a device's memory."""
    problems = []
    if life.differing:
        problems.append(f"{len(life.differing)} tensors are not those of the files, {life.differing[0]} first")
    if not life.same_tokens:
        problems.append("greedy draws differ before and after sleep")
    problems += [f"it has loaded two copies of {family}" for family in life.doubled]
    numbers = {"engine_start_s": life.start_s, "engine_sleep_s": life.sleep_s, "engine_wake_s": life.wake_s}
    numbers["host_engine_mib"] = round(life.host_bytes / 2**20, 3)
    if platform.is_accelerator:
        numbers |= {"engine_awake_bytes": float(life.awake_bytes), "engine_asleep_bytes": float(life.asleep_bytes)}
    keeps = platform.is_accelerator and life.awake_bytes - life.asleep_bytes < RELEASED * KV_CACHE_BYTES
    times = f"start {life.start_s:.1f} s, sleep {life.sleep_s:.2f} s, wake {life.wake_s:.2f} s"
    if platform.is_accelerator:
        times += f", {life.awake_bytes / 2**30:.2f} -> {life.asleep_bytes / 2**30:.2f} GiB"
    remedy = "vLLM and the driver disagree: take the versions of constraints.txt, and report it" if problems else ""
    if keeps and not problems:
        remedy = "Sleep frees little: colocated runs need enable_sleep_mode of a vLLM built for this device"
    return Diagnosis(
        check="engine",
        verdict=Verdict.FAIL if problems else Verdict.WARN if keeps else Verdict.PASS,
        measured="; ".join(problems) or times,
        expected="equal weights and equal tokens after sleep",
        remedy=remedy,
        numbers=numbers,
    )


def _engine(subject: Subject, limit_s: float) -> Iterator[Diagnosis]:
    directory = write_model(subject.directory / "engine" / "model")
    life = run_ranks(live, 1, (subject.platform, directory), timeout_s=limit_s)[0]
    yield engine_diagnosis(life, subject.platform)


CHECKS = (
    HealthCheck(
        name="engine",
        about="vLLM starts, draws, sleeps, wakes, and holds the weights of its files",
        limit_s=300,
        run=_engine,
        needs=(THOROUGH,),
    ),
)
