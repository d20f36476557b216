"""What the controller costs as a share of real steps of a tiny model.

    python benchmarks/controller_share.py [--steps 6] [--json results.json]

A run as ``mcore-rl train`` starts it: a tiny mixture of experts, two training processes (EP 2), one engine, GRPO with
the reference's KL in the loss, on the CPU, 256 sequences a step.  Workers note when they were busy; a generating engine
counts by its own account of the time in which it had samples to draw.  What is left of a step is the controller, data
movement and bookkeeping.  Target: at most 5 % of a step, over all steps after the first.  Exits with 1 where it is
missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from mcore_rl.config.compose import compose
from mcore_rl.config.run import RunConfig
from mcore_rl.controller import loop
from mcore_rl.controller.programs.start import open_run
from mcore_rl.rollout.protocol import RolloutEngine
from mcore_rl.runtime import start as runtime_start
from mcore_rl.runtime.answers import Answer
from mcore_rl.runtime.engine_client import EngineClient
from mcore_rl.runtime.rollout_worker import RolloutWorker
from mcore_rl.runtime.train_worker import TrainWorker

SHARE = 0.05
ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, kw_only=True)
class Result:
    """One line: seconds of the wall and of the processor, or a share of the step."""

    what: str
    wall_s: float
    cpu_s: float | None = None
    share: float | None = None
    passed: bool | None = None


class NotingTrainWorker(TrainWorker):
    """Notes when it was busy: [begin, end), ``time.monotonic``, which all processes of a machine share."""

    def _answer(self, *told: Any) -> tuple[Answer, Any]:
        begin = time.monotonic()
        answer = super()._answer(*told)
        self.__dict__.setdefault("spans", []).append((begin, time.monotonic()))
        return answer

    def busy(self) -> list[tuple[float, float]]:
        """What was noted."""
        return list(self.__dict__.get("spans", []))


class NotingRolloutWorker(RolloutWorker):
    """Notes when an update or another verb of the engine was under way; generation is on the engine's own account."""

    async def perform(self, verb: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Call the engine, and note the time span."""
        begin = time.monotonic()
        answer = await super().perform(verb, args, options)
        if verb != RolloutEngine.statistics.__name__:
            self.__dict__.setdefault("spans", []).append((begin, time.monotonic()))
        return answer

    async def busy(self) -> list[tuple[float, float]]:
        """What was noted."""
        return list(self.__dict__.get("spans", []))


def covered(spans: Sequence[tuple[float, float]], begin: float, end: float) -> float:
    """Seconds of [begin, end) in which at least one of ``spans`` was open."""
    total = 0.0
    reached = begin
    for first, last in sorted(spans):
        first = max(first, reached)
        last = min(last, end)
        if last > first:
            total = total + last - first
            reached = last
    return total


def made(folder: Path) -> tuple[Path, Path]:
    """(model, training data), by the tools of this repository."""
    model = folder / "model"
    data = folder / "data"
    tools = ROOT / "tools"
    wanted = ["--difficulty", "1", "--train", "2000", "--val", "64"]
    for command in (
        [tools / "prepare_data.py", "arithmetic", *wanted, "--out", data],
        [tools / "make_tiny_model.py", "--data", data, "--out", model],
    ):
        subprocess.run([sys.executable, *map(str, command)], check=True, stdout=subprocess.DEVNULL)
    return model, data / "train.parquet"


def live_config(folder: Path, steps: int) -> RunConfig:
    model, train = made(folder)
    return compose(
        RunConfig,
        "train",
        [
            f"model.path={model}",
            f"data.train_files=[{train}]",
            f"trainer.default_local_dir={folder / 'run'}",
            "data.train_batch_size=32",
            "rollout.n=8",
            "data.max_prompt_length=64",
            "data.max_response_length=64",
            "actor.ppo_mini_batch_size=16",
            "actor.precision=float32",
            "actor.microbatch_tokens=4096",
            "actor.use_kl_loss=true",
            "actor.parallel.ep=2",
            "trainer.n_gpus_per_node=2",
            "rollout.ignore_eos=true",
            "rollout.kv_cache_memory_bytes=67108864",
            "rollout.max_num_seqs=256",
            "trainer.val_before_train=false",
            "trainer.test_freq=0",
            "trainer.save_freq=0",
            f"trainer.total_training_steps={steps}",
            "trainer.resume_mode=off",
            "trainer.logger=[]",
        ],
    )


async def busy_s(engines: Sequence[EngineClient]) -> float:
    """Seconds with work of the engine that had most."""
    return max([(await engine.statistics()).busy_s for engine in engines])


async def live(steps: int) -> list[Result]:
    """The share of each step in which no worker and no engine was at work."""
    runtime_start.TrainWorker, runtime_start.RolloutWorker = NotingTrainWorker, NotingRolloutWorker  # type: ignore[misc]
    marks: list[tuple[float, float, float]] = []  # wall, processor, the engines' own busy seconds
    seconds: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        async with open_run(live_config(Path(folder), steps)) as run:
            step_of_clock = run.clock.step

            def noted() -> dict[str, float]:
                seconds.append(step_of_clock())
                return seconds[-1]

            run.clock.step = noted  # type: ignore[method-assign]
            engines = run.devices._restarter._engines
            train_step = loop.train_step

            async def mark() -> None:
                marks.append((time.monotonic(), time.process_time(), await busy_s(engines)))

            async def marked(*args: Any) -> dict[str, float]:
                await mark()
                return await train_step(*args)

            loop.train_step = marked
            try:
                await loop.train(run)
                await mark()
            finally:
                loop.train_step = train_step
            spans = [span for worker in await run.policy.all(NotingTrainWorker.busy) for span in worker]
            for engine in engines:
                spans += await engine._worker.busy.remote()
    shares = []
    walls = []
    cpus = []
    for (begin, cpu, busy), (end, cpu_after, busy_after) in pairwise(marks[1:]):
        idle = end - begin - covered(spans, begin, end) - (busy_after - busy)
        shares.append(idle / (end - begin))
        walls.append(end - begin)
        cpus.append(cpu_after - cpu)
    whole = sum(share * wall for share, wall in zip(shares, walls, strict=True)) / sum(walls)
    results = [
        Result(what="a step", wall_s=statistics.median(walls), cpu_s=statistics.median(cpus)),
        Result(
            what="of it neither workers nor engines at work",
            wall_s=whole * sum(walls) / len(walls),
            share=whole,
            passed=whole <= SHARE,
        ),
    ]
    for name in sorted({name for each in seconds[1:] for name in each if name.startswith("time/")} - {"time/step"}):
        median = statistics.median(each.get(name, 0.0) for each in seconds[1:])
        results.append(Result(what=f"  {name}", wall_s=median, share=median / statistics.median(walls)))
    outside = statistics.fmean(each["perf/overhead_share"] for each in seconds[1:])
    results.append(
        Result(what="  in no phase (perf/overhead_share)", wall_s=outside * results[0].wall_s, share=outside)
    )
    return results


def result_table(title: str, results: Sequence[Result]) -> Table:
    table = Table(title=title)
    for heading in ("what", "wall s", "processor s", "share", "verdict"):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    for result in results:
        table.add_row(
            result.what,
            f"{result.wall_s:.3f}",
            "" if result.cpu_s is None else f"{result.cpu_s:.3f}",
            "" if result.share is None else f"{100 * result.share:.1f} %",
            {True: "[green]pass[/green]", False: "[red]MISSED[/red]", None: ""}[result.passed],
        )
    return table


def machine() -> str:
    """Cores and how busy they are."""
    load = ", ".join(f"{x:.1f}" for x in os.getloadavg())
    return f"{os.cpu_count()} cores, load {load}, torch {torch.__version__}, {torch.get_num_threads()} threads"


def main() -> int:
    """Exit status: 1 where the target is missed."""
    parser = argparse.ArgumentParser(description="the controller's share of real steps")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args()
    console = Console(width=max(Console().width, 110))
    console.print(machine())
    results = asyncio.run(live(options.steps))
    console.print(result_table(f"256 sequences a step, 2 training processes (target: <= {SHARE:.0%})", results))
    console.print(machine())
    if options.json is not None:
        options.json.write_text(json.dumps([vars(result) for result in results], indent=2) + "\n")
    return 0 if all(result.passed is not False for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
