"""Real runs, from configuration to weights: what a step must say of itself, resuming bit for bit, and deaths.

Two starts for all of it: a run of three steps, of which the engine is killed at the end, and one that goes on from the
second step's checkpoint, of which the engine is stopped and then a training worker killed.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from mcore_rl.config.compose import compose
from mcore_rl.config.run import RunConfig
from mcore_rl.config.trainer import WatchdogConfig
from mcore_rl.controller.lifecycle.run_checkpoints import complete_checkpoints
from mcore_rl.controller.loop import train
from mcore_rl.controller.programs.start import open_run
from mcore_rl.controller.run import Run
from mcore_rl.ground.errors import DeadEngineError, WorkerError
from mcore_rl.rollout.vllm.engine.process_group import is_helper
from mcore_rl.runtime.engine_client import EngineClient
from mcore_rl.runtime.watchdog import Watchdog
from mcore_rl.tracking.clock import read_timeline
from tests.support import prompt_files
from tests.support.run_task import AGREEMENT, SPEED, holders_of, is_in, nothing_left, overrides, write_task

pytestmark = pytest.mark.tier("test")
STEPS, SAVED, PROFILED = 3, 2, 1
SAVE = {"perf/checkpoint_s", "perf/checkpoint_gib"}  # in the step in which it gets its name
ALWAYS = {
    "reward/mean", "reward/std", "reward/min", "reward/max",
    "response/length_mean", "response/length_min", "response/length_max", "response/clip_share",
    "prompt/length_mean", "prompt/length_max",
    "dropped/groups", "dropped/generation_batches", "dropped/grader_errors",
    "rollout/staleness_mean", "rollout/staleness_max", "rollout/stale_token_share", "rollout/resumed_share",
    "rollout/versions_max", "rollout/prefix_hit_share",
    "rollout/logprob_diff_mean", "rollout/logprob_diff_max", "rollout/kl", "rollout/kl_k1",
    "rollout/ratio_mean", "rollout/ratio_max", "rollout/ratio_min", "rollout/effective_sample_size",
    "advantage/mean", "advantage/std", "advantage/min", "advantage/max",
    "kl/reward", "kl/reward_per_token", "kl/loss", "kl/coef",
    "actor/loss", "actor/entropy", "actor/kl_k1", "actor/kl_k3", "actor/ratio_first",
    "actor/ratio_mean", "actor/ratio_max", "actor/ratio_min", "actor/grad_norm", "actor/lr",
    "actor/skipped_updates", "actor/clip_fraction_low", "actor/clip_fraction_high",
    "router/load_max", "router/load_min", "router/load_entropy",
    "perf/draw_s", "perf/generated_tokens_per_s", "perf/trained_tokens_per_s", "perf/memory_host_gib", "perf/balance",
    "perf/host_cpu_share", "perf/host_memory_share",
    "perf/tflop_updates", "perf/tflop_logprobs", "perf/tflops_per_device", "perf/tflops_per_device_logprobs",
    "perf/overhead_share", "progress/epoch",
    "time/step", "time/generate", "time/sync", "time/logprobs", "time/reference", "time/advantages",
    "time/update_actor",
}  # fmt: skip


@dataclass
class Observed:
    """Of one run.  checksums: of the actor's ranks, at the end.  death: what was raised when a process was killed."""

    directory: Path
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    checksums: list[int] = field(default_factory=list)
    death: BaseException | None = None

    def rollouts(self, step: int) -> list[dict[str, Any]]:
        return pq.read_table(self.directory / "rollouts" / f"step_{step}.parquet").to_pylist()

    def read(self) -> None:
        lines = (self.directory / "metrics.jsonl").read_text().splitlines()
        self.metrics = {line.pop("step"): line for line in map(json.loads, lines)}


def config(task: Path, directory: Path) -> RunConfig:
    steps = [
        f"trainer.total_training_steps={STEPS}",
        f"trainer.save_freq={SAVED}",
        f"trainer.profile_steps=[{PROFILED}]",
        "trainer.max_restarts=0",
    ]
    return compose(RunConfig, "train", overrides(task, directory, *steps, f"trainer.test_freq={STEPS}"))


async def kill_the_engine(run: Run) -> None:
    """And ask it for samples."""
    for each in holders_of(run.directory / "logs" / "engine-0.log"):
        each.kill()
    with pytest.raises(DeadEngineError):
        await run.devices.to_engines(STEPS)
    await run.collector.collect(STEPS + 1, run.next_rows, run.reporting("drawing"))


class Impatient(Watchdog):
    """Of an engine that is meant to hang: what it does at once, it must within 5 s."""

    def limit_s(self, method: str) -> float:
        return 5.0 if method in ("wake", "start_update") else float("inf")


async def stop_the_engine(run: Run) -> DeadEngineError:
    """And wake it."""
    (engine,) = run.devices._weights._updater.engines.values()
    assert isinstance(engine, EngineClient)
    engine.hang_watch.watchdog = Impatient(WatchdogConfig())
    for each in holders_of(run.directory / "logs" / "engine-0.log"):
        if not is_helper(each):
            each.send_signal(signal.SIGSTOP)
    with pytest.raises(DeadEngineError) as hang:
        await run.devices.to_engines(STEPS + 1)
    return hang.value


async def kill_a_worker(run: Run) -> None:
    """While it waits, in a step, for its peer, which cannot come because it is stopped."""
    logs = [run.directory / "logs" / f"actor-rank-{rank}.log" for rank in range(2)]
    peer, killed = (holder for log in logs for holder in holders_of(log))
    peer.send_signal(signal.SIGSTOP)
    step = asyncio.ensure_future(run.policy.save_hf(run.directory / "never", Path(run.config.model.path)))
    try:
        await is_in(logs[1], "save_hf")
        killed.kill()
        await step
    finally:
        if peer.is_running():
            peer.send_signal(signal.SIGCONT)


async def stop_the_engine_and_kill_a_worker(run: Run) -> None:
    """What is raised for the worker has the hang as its cause."""
    hang = await stop_the_engine(run)
    try:
        await kill_a_worker(run)
    except WorkerError as death:
        raise death from hang


async def observe(observed: Observed, settings: RunConfig, kill: Any) -> None:
    async with open_run(settings) as run:
        await train(run)
        await run.devices.to_trainer(keep_weights=True)
        observed.checksums = await run.policy.checksum()
        await kill(run)


def run(task: Path, directory: Path, kill: Any) -> Observed:
    observed = Observed(directory)
    with nothing_left():
        try:
            asyncio.run(observe(observed, config(task, directory), kill))
        except (DeadEngineError, WorkerError) as error:
            observed.death = error
    observed.read()
    return observed


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_task(tmp_path_factory.mktemp("task"))


@pytest.fixture(scope="module")
def whole(task: Path, tmp_path_factory: pytest.TempPathFactory, fast_ray: None) -> Observed:
    return run(task, tmp_path_factory.mktemp("whole"), kill_the_engine)


@pytest.fixture(scope="module")
def resumed(task: Path, whole: Observed, tmp_path_factory: pytest.TempPathFactory) -> Observed:
    """From the checkpoint of ``whole``; steps are only counted on where the directory is told of them."""
    directory = tmp_path_factory.mktemp("resumed")
    shutil.copytree(whole.directory / "checkpoints" / f"step_{SAVED}", directory / "checkpoints" / f"step_{SAVED}")
    return run(task, directory, stop_the_engine_and_kill_a_worker)


def test_every_step_says_all_there_is_to_say(whole: Observed) -> None:
    assert list(whole.metrics) == [1, 2, 3]
    for step, metrics in whole.metrics.items():
        assert ALWAYS <= metrics.keys(), step
        extra = metrics.keys() - ALWAYS - {"router/z_loss", "router/aux_loss"} - (SAVE if step == STEPS else set())
        validated = {f"val/arithmetic/{name}" for name in ("reward", "response_length", "clip_share", "prompts")}
        expected = validated | {"time/validate", "time/save"} if step == STEPS else set()
        assert extra == expected


def test_the_timeline_of_a_step_adds_up_to_its_times(whole: Observed) -> None:
    timeline = read_timeline(whole.directory / "timeline.jsonl")
    assert list(timeline) == list(whole.metrics) and len(timeline) >= STEPS
    for step, metrics in whole.metrics.items():
        seconds: dict[str, float] = defaultdict(float)
        for span in timeline[step]:
            assert span.end <= metrics["time/step"] + 1e-3
            seconds[f"time/{span.phase}"] += span.end - span.start
        timed = {key: value for key, value in metrics.items() if key.startswith("time/") and key != "time/step"}
        assert seconds == pytest.approx(timed, abs=2e-3)  # the file has tenths of a millisecond
    assert json.loads((whole.directory / "environment.json").read_text())["hardware"]["device"] == "cpu"


def test_the_first_minibatch_is_on_policy(whole: Observed) -> None:
    for metrics in whole.metrics.values():
        assert metrics["actor/ratio_first"] == pytest.approx(1.0, abs=1e-6)
        assert metrics["actor/kl_k3"] > 0, "the second is not"


def test_sampler_and_trainer_agree(whole: Observed) -> None:
    # Two implementations in float32, a vocabulary of 400 and two layers: a few units of 1e-6; a wrong weight makes 0.1.
    for metrics in whole.metrics.values():
        assert metrics["rollout/logprob_diff_max"] < 1e-4


def test_the_policy_begins_at_the_reference_and_leaves_it(whole: Observed) -> None:
    assert whole.metrics[1]["kl/reward"] == 0.0
    assert whole.metrics[2]["kl/reward"] != 0.0
    assert whole.metrics[3]["kl/loss"] > 0


def test_rewards_are_those_of_the_texts(whole: Observed) -> None:
    for step, metrics in whole.metrics.items():
        rows = whole.rollouts(step)
        assert len(rows) == 32 and len({row["prompt_id"] for row in rows}) == 8
        expected = [sum(map(ord, row["response"])) % 5 / 4 for row in rows]
        assert [row["score"] for row in rows] == expected
        assert metrics["reward/mean"] == pytest.approx(sum(expected) / 32)
        assert metrics["reward/std"] > 0 and metrics["actor/grad_norm"] > 0


def test_no_prompt_comes_twice_in_an_epoch(whole: Observed) -> None:
    seen = [row["prompt_id"] for step in (1, 2, 3) for row in whole.rollouts(step) if row["sample"] == 0]
    assert len(set(seen)) == len(seen) == 24
    assert whole.metrics[3]["progress/epoch"] == pytest.approx(24 / 40)


def test_a_resumed_run_goes_on_bit_for_bit(whole: Observed, resumed: Observed) -> None:
    assert list(resumed.metrics) == [STEPS], "the steps before are another directory's"
    assert resumed.rollouts(STEPS) == whole.rollouts(STEPS)
    ours, theirs = (
        {key: value for key, value in each.metrics[STEPS].items() if not key.startswith(SPEED) and key not in AGREEMENT}
        for each in (resumed, whole)
    )
    assert ours == theirs
    assert resumed.checksums == whole.checksums
    assert len(whole.checksums) == 2


def test_operations_are_those_of_the_tokens(whole: Observed) -> None:
    """Of 2 layers: 512 x 64 in attention, 4 columns of the router, 2 experts of 3 x 64 x 96; and the vocabulary."""
    for step, metrics in whole.metrics.items():
        rows, tokenizer = whole.rollouts(step), prompt_files.tokenizer()
        assert metrics["perf/tflop_updates"] == pytest.approx(1.5 * metrics["perf/tflop_logprobs"]), "3 passes and 2"
        num_tokens = 32 * (metrics["prompt/length_mean"] + metrics["response/length_mean"])
        a_layer = 64 * (64 + 2 * 32) + 64 * 64 + 4 * 64 + 2 * 3 * 64 * 96
        matrices = 2 * (2 * a_layer + len(tokenizer) * 64) * num_tokens
        assert len(rows) == 32
        # Attention: 2 layers, 2 heads, 2 x (32 + 32) operations a pair, of which there are half the squares and more.
        operations = metrics["perf/tflop_logprobs"] * 1e12 / 2 - matrices
        least = 2 * 2 * 2 * 64 * 32 * (num_tokens / 32) * (num_tokens / 32 + 1) / 2
        assert least <= operations < 1.5 * least


def test_a_chosen_step_is_traced(whole: Observed) -> None:
    """Every training process, with its phases around the operators, and no other step."""
    assert [path.name for path in (whole.directory / "profiles").iterdir()] == [f"step_{PROFILED}"]
    traces = sorted((whole.directory / "profiles" / f"step_{PROFILED}").iterdir())
    assert [path.name for path in traces] == ["actor-rank-0.json", "actor-rank-1.json"]
    for path in traces:
        events = [each for each in json.loads(path.read_text())["traceEvents"] if each.get("ph") == "X"]
        spans = {each["name"]: each for each in events if each["cat"] == "user_annotation"}
        assert {
            "score", "train", "score, role actor", "train_step, role actor", "forward, microbatch 0",
            "loss, microbatch 0", "optimizer", "publish",
        } <= spans.keys()  # fmt: skip
        around = spans["train"]
        inside = {
            each["name"]
            for each in events
            if around["ts"] <= each["ts"] and each["ts"] + each["dur"] <= around["ts"] + around["dur"]
        }
        assert "aten::mm" in inside and "optimizer" in inside


def test_checkpoints_are_saved_when_they_are_due(whole: Observed) -> None:
    assert [path.name for path in complete_checkpoints(whole.directory)] == [f"step_{SAVED}", f"step_{STEPS}"]


def test_a_killed_engine_ends_the_run_with_its_name(whole: Observed) -> None:
    assert isinstance(whole.death, DeadEngineError)
    assert "engine 0" in str(whole.death)


def test_an_engine_that_stands_still_is_told_of_and_killed(resumed: Observed) -> None:
    assert resumed.death is not None
    hang = resumed.death.__cause__
    assert isinstance(hang, DeadEngineError)
    said = str(hang).splitlines()
    assert said[0] == "engine 0 hangs while waking up: no answer for 5 s (trainer.watchdog says how long is too long)"
    assert re.fullmatch(r"  its server, process \d+: stopped \(state T\): somebody sent it SIGSTOP", said[1])
    assert re.fullmatch(r"  vLLM's process below it, process \d+: stopped \(state T\): .*", said[2])
    assert re.fullmatch(r"  its Ray actor, process \d+: (waits \(state S\)|computes \(state R\))", said[3])


def test_a_killed_worker_ends_the_run_with_its_rank_and_phase(resumed: Observed) -> None:
    assert isinstance(resumed.death, WorkerError)
    assert str(resumed.death).startswith("actor rank 1 (dp1 pp0 tp0 cp0 ep1) failed on ")
    head = str(resumed.death).splitlines()[0]
    assert " in save_hf" in head and "its process died" in head
    assert "actor rank 0 (dp0 pp0 tp0 cp0 ep0): stopped in" in str(resumed.death)
