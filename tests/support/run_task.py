"""A task to start runs with (a tiny mixture of experts, prompts, a reward), and what is left of their processes."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from mcore_rl.data.arithmetic import Split, generate
from mcore_rl.doctor.tiny_task import REWARD, MixtureSizes, task_overrides, write_mixture
from mcore_rl.runtime.answers import last_phase
from tests.support import prompt_files
from tests.support.vllm_device import ON_VLLM_DEVICE

SPEED = ("time/", "perf/")  # metrics that no two runs share
# Of how vLLM happened to batch requests: rounding, of which nothing that is trained depends.
AGREEMENT = (
    "rollout/logprob_diff_mean", "rollout/logprob_diff_max", "rollout/kl", "rollout/kl_k1",
    "rollout/ratio_mean", "rollout/ratio_max", "rollout/ratio_min", "rollout/effective_sample_size",
    "rollout/prefix_hit_share",
)  # fmt: skip
GONE_S = 60.0  # for processes that were told to end, on a busy machine
SIZES = MixtureSizes(hidden=64, ffn=96, head_dim=32, kv_heads=1)


def write_task(directory: Path) -> Path:
    """``model`` with its tokenizer, ``train.parquet`` of 40 prompts, ``val.parquet`` of 6, and ``reward.py``."""
    tokenizer = prompt_files.tokenizer()
    write_mixture(directory / "model", tokenizer, SIZES)
    tokenizer.save_pretrained(directory / "model")
    for name, split, count in (("train", Split.train, 40), ("val", Split.validation, 6)):
        problems = generate(1, count, 0, split)
        rows = [prompt_files.row(each.question, each.answer, data_source="arithmetic") for each in problems]
        prompt_files.write(directory / f"{name}.parquet", rows)
    (directory / "reward.py").write_text(REWARD)
    return directory


def overrides(task: Path, run_dir: Path, *more: str) -> list[str]:
    """Of ``mcore-rl train`` on two processes: 8 prompts with 4 short responses each, two updates a step."""
    sizes = dict(prompts=8, per_node=2, ep=2, precision="float32", cache_bytes=16 << 20)
    own = ["actor.use_kl_loss=true", ON_VLLM_DEVICE["trainer"]]
    return [*task_overrides(task, run_dir, **sizes), *own, *more]  # type: ignore[arg-type]


def descendants(of: int | None = None) -> set[psutil.Process]:
    """Processes below the one with the id ``of``, or below this one."""
    return set(psutil.Process(of).children(recursive=True))


@contextmanager
def nothing_left() -> Iterator[None]:
    """Processes that are started within are gone soon after; some are named where they are not."""
    before = descendants()
    started: set[psutil.Process] = set()
    try:
        yield
    finally:
        started |= descendants() - before
    alive = [f"{each.pid} of {each.ppid()}: {' '.join(each.cmdline())[:160]}" for each in still_alive(started)]
    assert not alive, alive


def still_alive(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that have not ended after ``GONE_S``.  One that nobody has waited for has ended."""
    until, alive = time.monotonic() + GONE_S, list(processes)
    while alive and time.monotonic() < until:
        time.sleep(0.05)
        alive = [each for each in alive if _runs(each)]
    return alive


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def holders_of(log: Path, below: int | None = None) -> list[psutil.Process]:
    """The ``descendants`` whose output goes to ``log``: one of a worker, several of an engine."""
    return [each for each in descendants(below) if any(file.path == str(log) for file in _files(each))]


async def is_in(log: Path, words: str) -> None:
    """Return once the worker that logs to ``log`` is in a phase with ``words``."""
    while words not in last_phase(log):
        await asyncio.sleep(0.002)


def _files(process: psutil.Process) -> list[psutil._ntuples.popenfile]:  # type: ignore[name-defined]
    try:
        return process.open_files() if process.pid != os.getpid() else []
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return []
