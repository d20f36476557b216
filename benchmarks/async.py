"""How much faster drawing and training at the same time is, on two cores: one trains, one draws.

    python benchmarks/async.py [--staleness 1,2,4] [--steps 6] [--rounds 1] [--json results.json]

Real runs of ``mcore-rl train`` with trainer.placement=separate, in turns: trainer.mode=sync, and async with each bound.
The controller and the trainer are on the first core that this process may use, the engine is on the second.  The model
is a Llama of 3 M parameters with random weights; a step is of 16 prompts with 4 responses each.  Responses have the
lognormal lengths of ``planning/lengths.py`` (the 99th percentile is ten times the median), 48 tokens on average and 256
at most: the end token is ignored, and every request has a limit of its own, drawn from its name, so that all modes see
the same lengths.  Nothing else of the run is changed.

Counted are the steps after the first ones, in which the buffer fills, and before the last ones, for which nothing is
drawn any more.  The costs that the simulation needs are then taken from the sync run (of a decode step, by the times at
which responses ended; of a prompt's token, by prompts of two lengths before it; of training and of an update, by
metrics.jsonl), and what it foretells of the other runs (``planning/simulation.py``) is shown beside them.

Target: samples a second of the best bound at least 1.4 times those of sync.  Exits with 1 where it is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Any

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from mcore_rl.planning.lengths import Lognormal
from mcore_rl.planning.simulated_engine import EngineCosts
from mcore_rl.planning.simulation import (
    SYNC_SEPARATE,
    SimulatedMode,
    TrainerCosts,
    Workload,
    asynchronous,
    simulate,
)
from mcore_rl.tracking.jsonl import read_metrics

ROOT = Path(__file__).resolve().parents[1]
TARGET = 1.4
PROMPTS = 16
RESPONSES = 4
LENGTHS = Lognormal(48.0, 256)
WARM_UP = 2  # steps, and as many as the bound, before those that count
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
ENDED = "ended.jsonl"  # when responses ended: [begin of the call, (tokens, seconds) ...]
PROMPT_S = "prompt_s"  # beside it: seconds of a prompt's token
TIMED_PROMPTS, SHORT, LONG = 8, 16, 256  # tokens


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Of one run.

    step_s: median seconds of the steps that count.  samples_per_s: of all of them.  engine_idle, trainer_idle: shares.
    staleness: mean.  load: of the machine at the end of the run, over one minute.
    """

    name: str
    step_s: float
    samples_per_s: float
    engine_idle: float
    trainer_idle: float
    staleness: float
    load: float


def write_task(folder: Path) -> None:
    """``data`` and ``model`` in ``folder``."""
    for words in (
        ("prepare", "arithmetic", "--difficulty", 1, "--train", 600, "--val", 16, "--out", folder / "data"),
        ("prepare", "tiny-model", "--data", folder / "data", "--out", folder / "tiny"),
    ):
        program = Path(sys.executable).with_name("mcore-rl")
        subprocess.run([str(program), *map(str, words)], check=True, stdout=subprocess.DEVNULL)
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(folder / "tiny")
    torch.manual_seed(1)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    LlamaForCausalLM(LlamaConfig(**SIZES, **ends)).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")


def overrides(folder: Path, run: Path, bound: int, steps: int) -> list[str]:
    """Of a run with the bound; 0: sync."""
    mode = ["trainer.mode=async", f"async.max_staleness={bound}"] if bound else ["trainer.mode=sync"]
    return [
        f"model.path={folder / 'model'}",
        f"data.train_files=[{folder / 'data' / 'train.parquet'}]",
        "algorithm=grpo",
        f"data.train_batch_size={PROMPTS}",
        f"rollout.n={RESPONSES}",
        "data.max_prompt_length=64",
        f"data.max_response_length={LENGTHS.longest}",
        f"actor.ppo_mini_batch_size={PROMPTS}",
        "actor.precision=float32",
        "actor.microbatch_tokens=2048",
        "actor.layer_spec=local",
        "actor.use_kl_loss=false",
        "actor.optim.lr=1e-5",
        "trainer.n_gpus_per_node=1",
        "trainer.placement=separate",
        "rollout.ignore_eos=true",
        "rollout.enforce_eager=true",
        "rollout.kv_cache_memory_bytes=134217728",
        f"rollout.max_num_seqs={PROMPTS * RESPONSES}",
        "trainer.val_before_train=false",
        "trainer.test_freq=0",
        "trainer.save_freq=0",
        "trainer.save_rollouts=false",
        f"trainer.total_training_steps={steps}",
        "trainer.resume_mode=off",
        "trainer.logger=[]",
        f"trainer.default_local_dir={run}",
        *mode,
    ]


def train(words: Sequence[str], engine_core: int, ended: Path) -> int:
    """Run it, in a process of its own, on the cores that this one has; the engine moves to ``engine_core``."""
    from mcore_rl.config.compose import compose
    from mcore_rl.config.run import RunConfig
    from mcore_rl.controller.programs import start
    from mcore_rl.controller.programs.train import run_training
    from mcore_rl.rollout.pool import EnginePool
    from mcore_rl.rollout.protocol import Request, Sample, Sampling
    from mcore_rl.runtime.engine_client import EngineClient

    class LimitedPool(EnginePool):
        """Gives every request a limit of its own, and notes when its response ended."""

        timing: asyncio.Task[None] | None = None

        async def time_prompts(self, sampling: Sampling) -> None:
            """Notes the seconds of a prompt's token."""
            ended.with_suffix(f".{PROMPT_S}").write_text(str(await prompt_s(super().generate, sampling)))

        async def generate(self, requests: Sequence[Request], sampling: Sampling) -> AsyncGenerator[Sample]:
            """See ``EnginePool.generate``."""
            if LimitedPool.timing is None:
                LimitedPool.timing = asyncio.create_task(self.time_prompts(sampling))
            await LimitedPool.timing  # of the calls that begin together, all
            finished: asyncio.Queue[Sample | BaseException] = asyncio.Queue()
            begun = time.perf_counter()

            async def draw(request: Request) -> None:
                (limit,) = LENGTHS.group(Random(f"{request.prompt.id} {request.index}"), 1)
                try:
                    async for sample in super(LimitedPool, self).generate(
                        [request], replace(sampling, max_tokens=limit)
                    ):
                        finished.put_nowait(sample)
                except Exception as error:  # noqa: BLE001  raised where the samples are read
                    finished.put_nowait(error)

            tasks = [asyncio.create_task(draw(request)) for request in requests]
            ends = list[tuple[int, float]]()
            try:
                for _ in requests:
                    sample = await finished.get()
                    if isinstance(sample, BaseException):
                        raise sample
                    ends.append((len(sample.tokens), time.perf_counter() - begun))
                    yield sample
                with ended.open("a") as file:
                    file.write(json.dumps([begun, ends]) + "\n")
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    def pool_of(engines: Sequence[EngineClient], rollout: object, *, goes_on: bool = False) -> EnginePool:
        move_engines(engine_core)
        return LimitedPool(engines, PROMPTS * RESPONSES, goes_on=goes_on)

    start.pool_of = pool_of  # type: ignore[assignment]
    return asyncio.run(run_training(compose(RunConfig, "train", list(words))))


async def prompt_s(draw: Callable[..., AsyncIterator[Any]], sampling: Any) -> float:
    """Seconds of a prompt's token: long prompts less short ones, one response token each, none of them cached."""
    from mcore_rl.rollout.protocol import Prompt, Request

    took = dict[int, list[float]]()
    for turn in range(4):
        for length in (SHORT, LONG):
            names = [f"{turn} {length} {number}" for number in range(TIMED_PROMPTS)]
            tokens = [tuple(Random(name).choices(range(100, 400), k=length)) for name in names]
            asked = [Request(prompt=Prompt(id=name, tokens=each)) for name, each in zip(names, tokens, strict=True)]
            begun = time.perf_counter()
            async for _ in draw(asked, replace(sampling, max_tokens=1)):
                pass
            took.setdefault(length, []).append(time.perf_counter() - begun)
    return (min(took[LONG]) - min(took[SHORT])) / (TIMED_PROMPTS * (LONG - SHORT))


def move_engines(core: int) -> None:
    """All threads of the processes of engines run on ``core`` from now on."""
    workers = [
        each for each in psutil.Process().children(recursive=True) if "RolloutWorker" in " ".join(each.cmdline())
    ]
    assert workers, "there is an engine"
    for worker in workers:
        for process in (worker, *worker.children(recursive=True)):
            for thread in process.threads():
                os.sched_setaffinity(thread.id, {core})


def measure(folder: Path, bound: int, counted: int, cores: tuple[int, int], number: int) -> tuple[Measured, Path]:
    """One run in a process of its own; returns its directory too."""
    first = WARM_UP + bound
    steps = first + counted + bound
    run = folder / f"run-{bound}-{number}"
    asked = {
        "words": overrides(folder, run, bound, steps),
        "core": cores[1],
        "ended": str(folder / f"{run.name}.{ENDED}"),
    }
    with (folder / f"{run.name}.log").open("w") as log:
        done = subprocess.run(
            [sys.executable, __file__, "--child", json.dumps(asked)],
            stdout=log,
            stderr=subprocess.STDOUT,
            preexec_fn=lambda: os.sched_setaffinity(0, {cores[0]}),
            check=False,
        )
    if done.returncode:
        sys.exit((folder / f"{run.name}.log").read_text()[-4000:])
    rows = [row for row in read_metrics(run / "metrics.jsonl") if first < row["step"] <= first + counted]
    assert len(rows) == counted
    seconds = [row["time/step"] for row in rows]
    return Measured(
        name=f"async, {bound}" if bound else "sync",
        step_s=median(seconds),
        samples_per_s=counted * PROMPTS * RESPONSES / sum(seconds),
        engine_idle=fmean(row["perf/engines_idle_share"] for row in rows),
        trainer_idle=fmean(row["perf/trainer_idle_share"] for row in rows),
        staleness=fmean(row["rollout/staleness_mean"] for row in rows),
        load=os.getloadavg()[0],
    ), run


def costs_of(folder: Path, run: Path) -> tuple[EngineCosts, TrainerCosts, int]:
    """The costs of engine and trainer, and the tokens of a prompt, as the sync run had them.

    A response of L tokens ends when L decode steps were made, and a step with r responses takes a + b r seconds: the
    times of all responses of all steps give a, b and a time before the first step by least squares.
    """
    calls = [json.loads(line) for line in (folder / f"{run.name}.{ENDED}").read_text().splitlines()]
    batches = drawn_together([(begun, ends) for begun, ends in calls])
    table = []
    times = []
    for ends in batches[WARM_UP:]:
        lengths = np.sort([length for length, _ in ends])
        for length, seconds in ends:
            running = np.minimum(lengths, length).sum()  # over the steps until then, responses that run
            table.append((1.0, length, float(running)))
            times.append(seconds)
    (_, fixed, of_each), *_ = np.linalg.lstsq(np.array(table), np.array(times), rcond=None)
    rows = [row for row in read_metrics(run / "metrics.jsonl") if row["step"] > WARM_UP]
    prompt = fmean(row["prompt/length_mean"] for row in rows)
    tokens = PROMPTS * RESPONSES * sum(row["response/length_mean"] + row["prompt/length_mean"] for row in rows)
    trains = sum(row["time/step"] - row["time/generate"] - row.get("time/sync", 0.0) for row in rows)
    most = PROMPTS * RESPONSES
    engine = EngineCosts(
        fixed_s=tuple(max(0.0, fixed) + max(0.0, of_each) * running for running in range(most + 1)),
        stream_s=(0.0,) * (most + 1),
        token_s=0.0,
        product_s=0.0,
        prefill_s=float((folder / f"{run.name}.{ENDED}").with_suffix(f".{PROMPT_S}").read_text()),
    )
    trainer = TrainerCosts(fixed_s=0.0, token_s=trains / tokens, publish_s=fmean(row["time/sync"] for row in rows))
    return engine, trainer, round(prompt)


def drawn_together(calls: Sequence[tuple[float, list[tuple[int, float]]]]) -> list[list[tuple[int, float]]]:
    """The responses of each step of the sync run, with their seconds since the step's draw began."""
    batches: list[list[tuple[int, float]]] = []
    size = PROMPTS * RESPONSES
    ordered = sorted(calls)
    flat = [(begun, length, begun + seconds) for begun, ends in ordered for length, seconds in ends]
    for start in range(0, len(flat) - size + 1, size):
        batch = flat[start : start + size]
        begun = min(each[0] for each in batch)
        batches.append([(length, end - begun) for _, length, end in batch])
    return batches


def foretold(mode: SimulatedMode, engine: EngineCosts, trainer: TrainerCosts, prompt: int) -> float:
    """Samples a second of ``mode``, by simulation."""
    work = Workload(groups=PROMPTS, samples=RESPONSES, prompt=prompt, lengths=LENGTHS)
    return simulate(mode, work, engine, 1, trainer, steps=60).samples_per_s


def main() -> int:
    """Exit status: 1 where the target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--staleness", default="1,2,4", help="bounds of async, comma-separated")
    parser.add_argument("--steps", type=int, default=6, help="that are counted of each run")
    parser.add_argument("--rounds", type=int, default=1, help="of all runs; the best of each mode counts")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        asked = json.loads(options.child)
        return train(asked["words"], asked["core"], Path(asked["ended"]))
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        sys.exit("two cores are needed: one trains, one draws")
    bounds = [0, *map(int, options.staleness.split(","))]
    results = dict[int, list[Measured]]()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        write_task(folder)
        sync = folder
        for number in range(options.rounds):
            for bound in bounds:
                result, run = measure(folder, bound, options.steps, (cores[0], cores[1]), number)
                results.setdefault(bound, []).append(result)
                if not bound and result is max(results[0], key=lambda each: each.samples_per_s):
                    sync = run
        engine, trainer, prompt = costs_of(folder, sync)
    best = {bound: max(of_bound, key=lambda each: each.samples_per_s) for bound, of_bound in results.items()}
    simulated = {
        bound: foretold(asynchronous(bound) if bound else SYNC_SEPARATE, engine, trainer, prompt) for bound in bounds
    }
    shown = Table(
        "mode",
        "step, s",
        "samples/s",
        "times sync",
        "foretold",
        "engine idle",
        "trainer idle",
        "staleness",
        "load",
        box=None,
    )
    for bound, each in best.items():
        shown.add_row(
            each.name,
            f"{each.step_s:.2f}",
            f"{each.samples_per_s:.1f}",
            f"{each.samples_per_s / best[0].samples_per_s:.2f}",
            f"{simulated[bound] / simulated[0]:.2f}",
            f"{each.engine_idle:.0%}",
            f"{each.trainer_idle:.0%}",
            f"{each.staleness:.1f}",
            f"{each.load:.1f}",
        )
    console = Console(width=120)
    console.print(shown)
    costs = f"a decode step {1e3 * engine.fixed_s[1]:.1f} ms of 1 response, {1e3 * engine.fixed_s[-1]:.1f} ms of all, "
    costs += f"a prompt's token {1e3 * engine.prefill_s:.2f} ms"
    console.print(
        f"costs of the sync run: {costs}; training {1e3 * trainer.token_s:.2f} ms a token; "
        f"an update {trainer.publish_s:.2f} s; sync simulated {simulated[0]:.1f} samples/s"
    )
    gained = max(each.samples_per_s for bound, each in best.items() if bound) / best[0].samples_per_s
    console.print(f"the best bound: {gained:.2f} times sync (target: {TARGET})")
    if options.json is not None:
        values = {
            each.name: asdict(each) | {"foretold_samples_per_s": simulated[bound]} for bound, each in best.items()
        }
        options.json.write_text(json.dumps(values, indent=2) + "\n")
    return int(gained < TARGET)


if __name__ == "__main__":
    sys.exit(main())
