"""What the controller itself costs at the size of a cluster; its share of small steps is in controller_share.py.

    python benchmarks/controller.py [--sequences 8192] [--tokens 8192] [--ranks 1024] [--algorithms grpo,ppo]
        [--repetitions 3] [--json results.json]

``controller.loop.train_step`` itself, unchanged, on a simulated step: sequences of 8,192 tokens on average, a
prompt of 1,024 each, 8 samples of a prompt, a minibatch of 256 prompts, 1,024 data-parallel ranks.  Shards really go
to Ray's store and calls to an actor, which stands for all ranks and answers with scores of the right size; the time
that it works, and would share with nobody on a cluster, is not counted, nor is generation.  Everything else is:
assembly, samples for people (a thread makes and writes them), balance, shards, calls, answers, advantages, updates,
metrics.  Target: at most 3 s.

Seconds are those of the wall; beside them the processor time of the controller's process.  Exits with 1 where a target
is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import pickle
import resource
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import ray
import torch
from controller_share import Result, machine, made, result_table  # stands beside this file
from rich.console import Console
from transformers import AutoTokenizer

from mcore_rl.algorithms.kl import KlController
from mcore_rl.checkpoints.convert import read_model
from mcore_rl.config.compose import compose
from mcore_rl.config.engine import Device
from mcore_rl.config.parallel import ParallelConfig
from mcore_rl.config.run import RunConfig
from mcore_rl.config.stages import StepStage, is_field
from mcore_rl.config.step_plan import step_plan
from mcore_rl.config.trainer import Placement
from mcore_rl.controller import loop
from mcore_rl.controller.lifecycle.device_sharing import DeviceSharing
from mcore_rl.controller.lifecycle.fault_tolerance import EngineRestarter
from mcore_rl.controller.lifecycle.weight_sync import WeightSync
from mcore_rl.controller.run import Run
from mcore_rl.controller.step import updates
from mcore_rl.controller.step.preemption import Preemption
from mcore_rl.controller.step.rollout_collection import RolloutBatch
from mcore_rl.controller.step.samples import sample_rows
from mcore_rl.data.prompts import PromptRow
from mcore_rl.ground.types import SequenceScores, StepResult
from mcore_rl.parallel.device import detect, memory
from mcore_rl.parallel.layout import Layout
from mcore_rl.rewards.score import Score
from mcore_rl.rollout.episodes import Author, Episode, FinishReason, Segment, prompt_segment
from mcore_rl.rollout.protocol import EngineMemory, Pause
from mcore_rl.runtime.answers import Answer, message_of
from mcore_rl.runtime.shard import Portion, Shard
from mcore_rl.runtime.train_group import TrainGroup
from mcore_rl.runtime.train_worker import TrainWorker
from mcore_rl.runtime.watchdog import Watchdog
from mcore_rl.runtime.worker_values import TrainResults
from mcore_rl.tracking.clock import Clock
from mcore_rl.tracking.samples import write_samples

SECONDS = 3.0
PROMPT = 1_024
GROUP = 8
PER_NODE = 8
GIB = 2**30
STORE_BYTES = 4 << 30


@dataclass
class Ledger:
    """Seconds by name, without those that were spent waiting for the stand-in."""

    rows: dict[str, list[float]] = field(default_factory=dict)
    away: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def now(self) -> tuple[float, float]:
        return time.perf_counter() - self.away[0], time.process_time() - self.away[1]

    @contextmanager
    def waiting(self) -> Iterator[None]:
        begin = time.perf_counter(), time.process_time()
        yield
        self.away[0] += time.perf_counter() - begin[0]
        self.away[1] += time.process_time() - begin[1]

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        begin = self.now()
        yield
        end = self.now()
        row = self.rows.setdefault(name, [0.0, 0.0])
        row[0] += end[0] - begin[0]
        row[1] += end[1] - begin[1]

    def timed(self, name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            with self(name):
                return fn(*args, **options)

        return call

    def timed_async(self, name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        async def call(*args: Any, **options: Any) -> Any:
            with self(name):
                return await fn(*args, **options)

        return call


@ray.remote(num_cpus=0)
class StandIn:
    """Answers for every rank."""

    def call(self, message: bytes) -> Answer:
        """What a worker would answer, as large as that."""
        return Answer()

    @ray.method(num_returns=2)
    def call_on(self, message: bytes, portion: bytes, *shards: Shard) -> tuple[Answer, Shard | None]:
        """As ``call``; what is kept is as large as a worker's."""
        method, args, _ = pickle.loads(message)
        wanted: Portion[Any] = pickle.loads(portion)
        batches = wanted.join(shards)
        if method == "score":
            (batch,), (makes, *_) = batches, args
            entropy_S = torch.tensor(batch.lengths_S, dtype=torch.float64)
            scores = torch.full((len(batch.tokens_T),), -0.7)
            sums = SequenceScores(sums_S=-entropy_S, entropy_S=entropy_S if "entropy_S" in makes else None)
            return Answer(value=sums), Shard.of(batch.lengths_S, **{makes[0]: scores})
        if method == "on_ranks":
            function, *more = args
            made = function(batches[0], wanted.payload, *more)
            fields = {name: made.pop(name) for name in [*made] if is_field(name)}
            return Answer(value=made), Shard.of(batches[0].lengths_S, **fields)
        assert method == "train" and len(wanted.payload) == len(batches)
        names = ("returns", "returns_squared", "errors", "errors_squared", "vf_clip_fraction", "values")
        metrics = {f"critic/{name}": 1.0 for name in names} | {"actor/ratio": 1.0, "actor/approx_kl": 0.0}
        result = StepResult(loss=0.1, grad_norm=1.0, lr=1e-6, skipped=None, metrics=metrics)
        return Answer(value=TrainResults([result] * len(batches), [memory(detect(Device.cpu))])), None


class StandInGroup(TrainGroup):
    """Waits, uncounted, until the stand-in has done the work of all ranks."""

    ledger: Ledger

    async def _collect(self, method: str, calls: Sequence[Any], ranks: Sequence[int] | None = None) -> list[Any]:
        with self.ledger.waiting():
            ray.wait(list(calls), num_returns=len(calls), fetch_local=False)
        return await super()._collect(method, calls, ranks)


def rollouts_of(num_sequences: int, tokens: int) -> RolloutBatch:
    """Graded episodes of one turn: of ``tokens`` tokens on average, the prompt included."""
    draw = np.random.default_rng(0)
    letters = draw.integers(97, 123, 1 << 20, dtype=np.uint8).tobytes().decode()
    prompts = []
    episodes = []
    for number in range(num_sequences // GROUP):
        prompt = tuple(draw.integers(4, 400, PROMPT).tolist())
        row = PromptRow(f"train.parquet:{number}", prompt, [], "math", "42", {}, {})
        prompts.append((row, prompt_segment(row)))
    spread = (tokens - PROMPT) // 2
    for index in range(num_sequences):
        length = tokens - PROMPT + int(draw.integers(-spread, spread + 1))
        start = int(draw.integers(0, 1 << 19))
        answer = Segment(
            author=Author.model,
            tokens=draw.integers(4, 400, length, dtype=np.int32),
            trained=True,
            logprobs=np.full(length, -0.7, dtype=np.float32),
            text=(letters[start:] + letters)[: 3 * length],
        )
        row, prompt = prompts[index // GROUP]
        episode = Episode(
            row=row,
            prompt_id=row.id,
            group=index // GROUP,
            index=index % GROUP,
            segments=(prompt, answer),
            end=FinishReason.stop,
            score=Score(float(draw.integers(0, 2)), {"format": 1.0}, correct=1.0),
        )
        episodes.append(episode)
    return RolloutBatch(episodes=episodes, greedy=None, num_batches=1, seconds=1.0)


def large_config(algorithm: str, num_sequences: int, tokens: int) -> RunConfig:
    num_prompts = num_sequences // GROUP
    overrides = [
        f"algorithm={algorithm}",
        f"rollout.n={GROUP}",
        f"data.train_batch_size={num_prompts}",
        f"actor.ppo_mini_batch_size={num_prompts // 4}",
        f"data.max_prompt_length={PROMPT}",
        f"data.max_response_length={2 * tokens}",
    ]
    if algorithm == "ppo":
        overrides += ["algorithm.use_kl_in_reward=true", "algorithm.off_policy=decoupled"]
    return compose(RunConfig, "train", overrides)


class Nothing:
    """Engines and weight updates that take no time; the trainers' part of an update is asked for."""

    def __init__(self, group: TrainGroup | None = None) -> None:
        self._group = group

    async def sleep(self, level: int) -> None: ...

    async def wake(self, memory: EngineMemory | None = None) -> None: ...

    death = None

    @asynccontextmanager
    async def held(self, mode: Pause) -> AsyncIterator[None]:
        yield

    async def update(self, version: int) -> None:
        if self._group is not None:
            await self._group.publish(version)


class BareRun(Run):
    """Of a ``Run`` what a step calls, over workers that answer at once."""

    @property
    def epoch(self) -> float:
        return 0.0

    def plan(self, step: int) -> tuple[StepStage, ...]:
        return step_plan(self.config)


def simulated_run(
    config: RunConfig, rollouts: RolloutBatch, num_ranks: int, stand_in: Any, ledger: Ledger, folder: Path, model: Path
) -> Any:
    """What ``train_step`` needs of a ``Run``."""
    layout = Layout.of(ParallelConfig(), num_ranks)
    places, watchdog = [Path(os.devnull)] * num_ranks, Watchdog(config.trainer.watchdog)
    hosts = [f"node{rank // PER_NODE}" for rank in range(num_ranks)]

    def group_of(role: str) -> TrainGroup:
        group = StandInGroup(role, [stand_in] * num_ranks, layout, hosts, places, watchdog)
        group.ledger = ledger
        return group

    groups = {role.name: group_of(role.name) for role in config.group_rows}
    tokenizer = AutoTokenizer.from_pretrained(model)

    writer = ThreadPoolExecutor(1)  # as in a run: a thread makes and writes them while workers score

    def keep_rollouts(step: int, rollouts: RolloutBatch, num_tokens: int) -> dict[str, Any]:
        writer.submit(lambda: write_samples(folder, step, "rollouts", sample_rows(step, rollouts.episodes, tokenizer)))
        return {"num_prompts": 0, "epoch": 0, "position": 0, "again": []}

    async def end(step: int) -> None:
        """Nothing is recorded for a replay."""

    async def next_rollouts(*_: Any) -> RolloutBatch:
        return rollouts

    async def settle(*_: Any) -> None:
        """Nothing is drawn ahead."""

    (folder / "rollouts").mkdir(exist_ok=True)
    nothing = Nothing()
    restarter = EngineRestarter([], nothing, 0, warn=print)
    weights = WeightSync(Nothing(groups[config.policy.name]), restarter, nothing)
    run: Any = object.__new__(BareRun)
    vars(run).update(
        config=config,
        clock=Clock(),
        tracker=SimpleNamespace(now=lambda *_: None, schedule=lambda *_: None),
        groups=groups,
        rollouts=SimpleNamespace(next=next_rollouts, settle=settle),
        keep_rollouts=keep_rollouts,
        recorder=SimpleNamespace(end=end),
        preemption=Preemption(),
        prepared=SimpleNamespace(models=dict.fromkeys(groups, read_model(model)[2]), settings_sum=""),
        kl=KlController(config.algorithm.kl_ctrl),
        losses={role.name: config.loss_of(role) for role in config.trained_rows},
        on_accelerator=False,
        devices=DeviceSharing(Placement.colocated, groups[config.policy.name], nothing, weights, restarter),
    )
    return run


PARTS = {
    "assemble": "assemble",
    "sample_metrics": "metrics",
    "score_metrics": "metrics",
    "update_metrics": "metrics",
    "memory_metrics": "metrics",
}
SCORES = "scores: shards, calls, answers"
ADVANTAGES = "advantages: call, answers, groups, whitening"
SHARING = "device sharing and weight sync: calls"
ASYNC_PARTS = {"run_pass": SCORES, "update": "updates: calls, answers"}


async def large(algorithm: str, options: argparse.Namespace, folder: Path, model: Path) -> list[Result]:
    """The best of some steps."""
    config = large_config(algorithm, options.sequences, options.tokens)
    rollouts = rollouts_of(options.sequences, options.tokens)
    stand_in = StandIn.remote()
    ray.get(stand_in.call.remote(message_of(TrainWorker.host, (), {})))
    # Functions that a step calls, where it looks them up.
    originals = {name: getattr(loop, name) for name in (*PARTS, "estimate_step")}
    gc.freeze()  # as ``loop.train``
    best: tuple[tuple[float, float], Ledger] | None = None
    for step in range(1, options.repetitions + 1):
        ledger = Ledger()
        for name, title in PARTS.items():
            setattr(loop, name, ledger.timed(title, originals[name]))
        wrapped: dict[str, Any] = {
            name: ledger.timed_async(title, getattr(updates, name)) for name, title in ASYNC_PARTS.items()
        }
        wrapped["send"] = ledger.timed(SCORES, updates.send)
        loop.estimate_step = ledger.timed_async(ADVANTAGES, originals["estimate_step"])
        timed = SimpleNamespace(**wrapped, minibatches=updates.minibatches, Updated=updates.Updated)
        loop.updates = timed  # type: ignore[assignment]
        run = simulated_run(config, rollouts, options.ranks, stand_in, ledger, folder, model)
        for name in ("to_engines", "to_trainer"):
            setattr(run.devices, name, ledger.timed_async(SHARING, getattr(run.devices, name)))
        begin = ledger.now()
        try:
            await loop.train_step(run, step)
        finally:
            for name, original in originals.items():
                setattr(loop, name, original)
            loop.updates = updates
        end = ledger.now()
        whole = (end[0] - begin[0], end[1] - begin[1])
        if best is None or whole < best[0]:
            best = whole, ledger
    assert best is not None
    whole, ledger = best
    rows = [Result(what=f"{algorithm}: {name}", wall_s=row[0], cpu_s=row[1]) for name, row in ledger.rows.items()]
    rest = [whole[i] - sum(row[i] for row in ledger.rows.values()) for i in (0, 1)]
    rows.append(Result(what=f"{algorithm}: the rest", wall_s=rest[0], cpu_s=rest[1]))
    rows.append(Result(what=f"{algorithm}: a step", wall_s=whole[0], cpu_s=whole[1], passed=whole[0] <= SECONDS))
    return rows


def touch_store() -> None:
    """Every page of Ray's store was written before, as after the first steps of a run: each costs 1 to 5 us then."""
    chunk = np.zeros(256 << 20, dtype=np.uint8)
    written = [ray.put(chunk) for _ in range((STORE_BYTES >> 28) - 1)]
    del written


def large_all(options: argparse.Namespace) -> list[Result]:
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as folder:
        model, _ = made(Path(folder))
        ray.init(
            address="local", num_cpus=1, object_store_memory=STORE_BYTES, include_dashboard=False, logging_level="ERROR"
        )
        try:
            touch_store()
            for algorithm in options.algorithms.split(","):
                results += asyncio.run(large(algorithm, options, Path(folder), model))
        finally:
            ray.shutdown()
    return results


def main() -> int:
    """Exit status: 1 where a target is missed."""
    parser = argparse.ArgumentParser(description="what the controller costs beside workers and engines")
    parser.add_argument("--sequences", type=int, default=8_192)
    parser.add_argument("--tokens", type=int, default=8_192, help="of a sequence, on average")
    parser.add_argument("--ranks", type=int, default=1_024, help="data-parallel")
    parser.add_argument("--algorithms", default="grpo,ppo")
    parser.add_argument("--repetitions", type=int, default=3, help="the best counts")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)  # as in a run
    console = Console(width=max(Console().width, 110))
    console.print(machine())
    results = large_all(options)
    shape = f"{options.sequences:,} x {options.tokens:,} tokens over {options.ranks:,} ranks"
    console.print(result_table(f"{shape} (target: <= {SECONDS:.0f} s)", results))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
    console.print(f"peak resident memory of the controller: {peak:.2f} GiB, Ray's store where mapped included")
    console.print(machine())
    if options.json is not None:
        options.json.write_text(json.dumps([vars(result) for result in results], indent=2) + "\n")
    return 0 if all(result.passed is not False for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
