"""Runs of ``mcore-rl`` on one device: sft, GRPO with every weight compared, adapters, an engine that is killed.

Each run is the program itself, in processes of its own; what it wrote stays in the folder of the section's files.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu_sections.section import FAILED, GIB, Bench, Fact, Facts
from mcore_rl.config.engine import Precision
from mcore_rl.doctor.checks import Subject, Verdict
from mcore_rl.doctor.runs import MAX_DIFFERENCE, WatchedRun, run_diagnosis, tiny_run, watched_run
from mcore_rl.parallel.device import memory

POLL_S = 0.25
SPARE_S = 8.0  # of a section's limit: to write down what a run said
SFT_STEPS = 64
GRPO_STEPS = 20
TINY_SFT_STEPS = 8
TINY_GRPO_STEPS = 3
FALLS = 0.95  # of the first loss, where there are enough steps to learn
ADAPTERS = (
    "rollout.lora=adapter",
    "actor.lora.rank=8",
    "actor.lora.alpha=32",
    "actor.lora.target_modules=[q_proj,k_proj,v_proj,o_proj]",
    "actor.optim.lr=1e-2",
)


# ---- the sections ----


def sft(bench: Bench) -> Facts:
    """Data, a tiny mixture of experts, and the warm-up of ``make train``."""
    steps = TINY_SFT_STEPS if bench.tiny else SFT_STEPS
    data = bench.folder / "data"
    sizes = ("--train", "400", "--val", "16") if bench.tiny else ("--train", "4000", "--val", "400")
    prepare(bench, "arithmetic", "--difficulty", "1", *sizes, "--out", str(data))
    prepare(bench, "tiny-model", "--data", str(data), "--out", str(bench.folder / "model"))
    words = ["sft", "recipe=arithmetic_sft", *on_one_device(bench, "model", steps)]
    run = watched(bench, "sft", words, steps)
    done = [each["step"] for each in run.metrics]
    well = run.exit_code == 0 and done == list(range(1, steps + 1))
    yield ending(run, well)
    if run.metrics:
        losses = [float(each["sft/loss"]) for each in run.metrics]
        falls = bench.tiny or losses[-1] < FALLS * losses[0]
        yield Fact(what="loss, last", value=losses[-1], unit="nats", beside=f"first: {losses[0]:.3f}", ok=falls)
        yield from seconds_of_phases(run.metrics)


def grpo(bench: Bench) -> Facts:
    """GRPO, trainer and engine on the same device, weights updated in place, every one compared after each update."""
    steps = TINY_GRPO_STEPS if bench.tiny else GRPO_STEPS
    trained = bench.folder / "sft" / "hf" / "final"
    model = "sft/hf/final" if trained.is_dir() else "model"
    words = [
        "train",
        "recipe=arithmetic_grpo",
        *on_one_device(bench, model, steps),
        *of_engine(bench),
        "trainer.save_freq=0",
    ]
    if bench.tiny:
        words += ["data.train_batch_size=4", "actor.ppo_mini_batch_size=4"]
    with device_watched(bench) as watch:
        run = watched(bench, "grpo", words, steps)
    yield from facts_of(bench, run, watch, bench.folder / "grpo")
    rewards = [float(each["reward/mean"]) for each in run.metrics]
    if rewards:
        yield Fact(what="reward, last step", value=rewards[-1], beside=f"first: {rewards[0]:.3f}; begun from {model}")


def engine_killed(bench: Bench) -> Facts:
    """The engine is killed after the first step; the run must start another, and go on to its end."""
    yield from of_tiny_run(bench, "engine killed", steps=3, kill=True)


def lora(bench: Bench) -> Facts:
    """Adapters of the attention, which the engine applies itself."""
    yield from of_tiny_run(bench, "adapters", steps=2 if bench.tiny else 6, more=ADAPTERS)


# ---- runs ----


def prepare(bench: Bench, *words: str) -> None:
    """``mcore-rl prepare WORDS``; CalledProcessError where it fails, with prepare.log to read."""
    command = [sys.executable, "-m", "mcore_rl.cli", "prepare", *words]
    with (bench.folder / "prepare.log").open("a") as log:
        subprocess.run(command, check=True, stdout=log, stderr=log)


def precision_of(bench: Bench) -> str:
    """The dtype that trainer and engine compute in."""
    return (Precision.bfloat16 if bench.platform.is_accelerator else Precision.float32).value


def on_one_device(bench: Bench, model: str, steps: int) -> list[str]:
    """Overrides of a recipe of ``make train``, which validates at the end alone.  model: below the folder."""
    return [
        f"model.path={bench.folder / model}",
        f"data.train_files=[{bench.folder}/data/train.parquet]",
        f"data.val_files=[{bench.folder}/data/val.parquet]",
        f"actor.precision={precision_of(bench)}",
        "actor.parallel.ep=1",
        "trainer.n_gpus_per_node=1",
        f"trainer.device={bench.platform.kind.value}",
        "trainer.logger=[]",
        "trainer.val_before_train=false",
        f"trainer.test_freq={steps}",
        f"trainer.total_training_steps={steps}",
    ]


def of_engine(bench: Bench) -> list[str]:
    """Overrides of the engine, whose every weight is compared after each update."""
    return [
        f"rollout.dtype={precision_of(bench)}",
        "rollout.gpu_memory_utilization=0.3",
        f"rollout.kv_cache_memory_bytes={(64 << 20) if bench.tiny else (1 << 30)}",
        "rollout.enforce_eager=true",
        "trainer.guards.check_weights_freq=1",
    ]


def watched(bench: Bench, name: str, words: Sequence[str], steps: int) -> WatchedRun:
    """``mcore-rl WORDS`` in the run directory ``name``, ended in time for its section to tell of it."""
    run = bench.folder / name
    words = [*words, f"trainer.default_local_dir={run}"]
    log = bench.folder / f"{name}.log"
    limit_s = bench.limit_s - SPARE_S
    return watched_run(name, words, run, log, limit_s, steps=steps, precision=precision_of(bench))


def of_tiny_run(bench: Bench, name: str, *, steps: int, kill: bool = False, more: Sequence[str] = ()) -> Facts:
    """The doctor's own tiny task, colocated, and what became of it."""
    subject = Subject(platform=bench.platform, directory=bench.folder)
    with device_watched(bench) as watch:
        run = tiny_run(subject, name, "colocated", bench.limit_s - SPARE_S, steps=steps, kill=kill, more=more)
    yield from facts_of(bench, run, watch, bench.folder / name.replace(" ", "_") / "run", restarted=kill)


# ---- facts ----


def facts_of(bench: Bench, run: WatchedRun, watch: DeviceWatch, directory: Path, *, restarted: bool = False) -> Facts:
    """Ending, agreement of sampler and trainer, seconds of each phase, speed, and memory against the plan."""
    diagnosis = run_diagnosis(run, restarted=restarted)
    yield ending(run, diagnosis.verdict is Verdict.PASS, diagnosis.measured)
    if not run.metrics:
        return
    worst = max(float(each["rollout/logprob_diff_mean"]) for each in run.metrics)
    largest = max(float(each["rollout/logprob_diff_max"]) for each in run.metrics)
    yield Fact(
        what="log-probs, sampler to trainer, mean of the worst step",
        value=worst,
        unit="nats",
        beside=f"at most {MAX_DIFFERENCE[run.precision]:g} in {run.precision}; largest of a token {largest:.1e}",
    )
    yield from seconds_of_phases(run.metrics)
    for key, unit in (
        ("perf/generated_tokens_per_s", "tokens/s"),
        ("perf/trained_tokens_per_s", "tokens/s"),
        ("perf/mfu", ""),
    ):
        if values := [float(each[key]) for each in run.metrics[1:] or run.metrics if each.get(key) is not None]:
            yield Fact(what=key, value=statistics.median(values), unit=unit, beside="median without the first step")
    yield from memory_against_plan(bench, run, watch, directory / "plan.json")


def ending(run: WatchedRun, well: bool, words: str = "") -> Fact:
    """How the run ended."""
    said = words or f"exit code {run.exit_code} after {len(run.metrics)} of {run.steps} steps, in {run.seconds:.0f} s"
    if not well and run.output:
        said += f"; {run.output.strip().splitlines()[-1][:300]}"
    return Fact(what=f"{run.name}: {run.steps} steps", value="done" if well else FAILED, beside=said, ok=well)


def seconds_of_phases(metrics: Sequence[Mapping[str, Any]]) -> Facts:
    """Median seconds of each phase; the first step, which warms up, stands beside it."""
    later = metrics[1:] or metrics
    for key in sorted({key for each in metrics for key in each if key.startswith("time/") and key.count("/") == 1}):
        values = [float(each[key]) for each in later if each.get(key) is not None]
        first = metrics[0].get(key)
        beside = "" if first is None else f"first step: {float(first):.3g}"
        if values:
            yield Fact(what=key, value=statistics.median(values), unit="s", beside=beside)


@dataclass
class DeviceWatch:
    """The bytes of the device that were taken at most, and before the run."""

    before: int
    most: int


@contextmanager
def device_watched(bench: Bench) -> Iterator[DeviceWatch]:
    """Within: every ``POLL_S``, how much of the device all processes take."""

    def taken() -> int:
        seen = memory(bench.platform)
        return seen.total_bytes - seen.free_bytes

    before = taken()
    watch = DeviceWatch(before, before)
    over = threading.Event()

    def look() -> None:
        while not over.wait(POLL_S):
            watch.most = max(watch.most, taken())

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    try:
        yield watch
    finally:
        over.set()
        looking.join()


def memory_against_plan(bench: Bench, run: WatchedRun, watch: DeviceWatch, plan: Path) -> Facts:
    """Peak of the trainer's allocator; on an accelerator what all processes took, beside the run's own plan."""
    name = "perf/memory_device_gib" if bench.platform.is_accelerator else "perf/memory_host_gib"
    if values := [float(each[name]) for each in run.metrics if name in each]:
        yield Fact(what=name, value=max(values), unit="GiB")
    if not bench.platform.is_accelerator:
        return  # what else the machine does is in its memory too
    planned = "not planned"
    if plan.is_file():
        peaks = [each for each in json.loads(plan.read_text())["peaks"] if each["place"] == "device"]
        largest = max(peaks, key=lambda each: each["num_bytes"])
        planned = f"planned: {largest['num_bytes'] / GIB:.2f}, in {largest['phase']}"
    value = (watch.most - watch.before) / GIB
    yield Fact(what="memory that all of the run took at most", value=value, unit="GiB", beside=planned)
