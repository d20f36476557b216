"""A real run with a reward model on two engines: what is trained on are transformers' scores of the same texts.

One start for all of it; at its end one of the reward model's engines is stopped, and in its place another one scores.
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoTokenizer

from mcore_rl.config.compose import compose
from mcore_rl.config.run import RunConfig
from mcore_rl.config.trainer import WatchdogConfig
from mcore_rl.controller.lifecycle import fixed_engines
from mcore_rl.controller.lifecycle.fixed_engines import FixedEngines
from mcore_rl.controller.loop import train
from mcore_rl.controller.programs.start import open_run
from mcore_rl.controller.run import Run
from mcore_rl.rollout.vllm.engine.process_group import is_helper
from mcore_rl.runtime.engine_client import EngineClient
from mcore_rl.runtime.engine_watch import WORK
from mcore_rl.runtime.watchdog import Watchdog
from tests.support import reward_models
from tests.support.run_task import holders_of, nothing_left, overrides, write_task

STEPS = 2
ATOL = 1e-4  # as of the engines by themselves; scores are about 10


def score_rows(task: Path) -> None:
    """The even rows of both files are for the reward model, and have no ground truth."""
    for name in ("train", "val"):
        rows = pq.read_table(task / f"{name}.parquet").to_pylist()
        for row in rows[::2]:
            row["reward_model"] = {"style": "model", "ground_truth": None}
        reward_models.write_rows(task / f"{name}.parquet", rows)


class Impatient(Watchdog):
    """Of an engine that is meant to hang: scores must come within 10 s, all else may take its time."""

    def limit_s(self, method: str) -> float:
        return 10.0 if method == WORK else float("inf")


async def stop_an_engine(run: Run) -> None:
    """And ask for samples."""
    assert run.collector._reward_model is not None
    engines = run.collector._reward_model._engines
    assert isinstance(engines, FixedEngines)
    engine = engines.engines[0]
    assert isinstance(engine, EngineClient)
    engine.hang_watch.watchdog = Impatient(WatchdogConfig())
    for each in holders_of(run.directory / "logs" / "reward-engine-0.log"):
        if not is_helper(each):
            each.send_signal(signal.SIGSTOP)
    batch = await run.collector.collect(STEPS + 1, run.next_rows, run.reporting("drawing"))
    run.keep_rollouts(STEPS + 1, batch, 1)


class Ran:
    """Of the run.  phases: what the reward model's engines were told, in order.  said: on the screen."""

    def __init__(self, task: Path, directory: Path) -> None:
        self.task, self.directory = task, directory
        self.phases: list[str] = []
        self.said: list[str] = []
        tokenizer = AutoTokenizer.from_pretrained(task / "judge")
        model = reward_models.load(task / "judge")

        def score(messages: list[dict[str, str]], response: str) -> float:
            told = [*messages, {"role": "assistant", "content": response}]
            text = tokenizer.apply_chat_template(told, tokenize=False)
            with torch.no_grad():
                return float(model(torch.tensor([tokenizer.encode(text, add_special_tokens=False)])).logits[0, 0])

        self.score: Callable[[list[dict[str, str]], str], float] = score

    def metrics(self) -> dict[int, dict[str, float]]:
        lines = (self.directory / "metrics.jsonl").read_text().splitlines()
        return {line.pop("step"): line for line in map(json.loads, lines)}

    def expected(self, name: str, kept: dict[str, Any]) -> float:
        """Of a row that was kept: by transformers, or by the task's function."""
        row = pq.read_table(self.task / f"{name}.parquet").to_pylist()[int(kept["prompt_id"].rpartition(":")[2])]
        if row["reward_model"]["style"] == "rule":
            return sum(map(ord, kept["response"])) % 5 / 4
        return self.score(row["prompt"], kept["response"])


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, fast_ray: None) -> Ran:
    task = write_task(tmp_path_factory.mktemp("task"))
    reward_models.write_judge(task / "judge")
    score_rows(task)
    finished = Ran(task, tmp_path_factory.mktemp("run"))
    asked = [
        "reward_model.enable=true",
        f"reward_model.model.path={task}/judge",
        "reward_model.dp=2",
        "reward_model.kv_cache_memory_bytes=16777216",
        "reward_model.max_num_seqs=32",
        "reward_model.max_length=200",
        f"trainer.total_training_steps={STEPS}",
        f"trainer.test_freq={STEPS}",
    ]
    settings = compose(RunConfig, "train", overrides(task, finished.directory, *asked))

    async def observe() -> None:
        async with open_run(settings) as run:
            await train(run)
            await stop_an_engine(run)

    with pytest.MonkeyPatch.context() as patched, nothing_left():
        for verb in ("sleep", "wake", "classify"):
            patched.setattr(FixedEngines, verb, noting(finished.phases, verb))
        patched.setattr(fixed_engines, "warn", finished.said.append)
        asyncio.run(observe())
    return finished


def noting(phases: list[str], verb: str) -> Any:
    real = getattr(FixedEngines, verb)

    async def told(self: FixedEngines, *args: Any) -> Any:
        if phases[-1:] != [verb]:
            phases.append(verb)
        return await real(self, *args)

    return told


def test_rewards_are_the_scores_of_transformers_and_the_graders_own(ran: Ran) -> None:
    for step in range(1, STEPS + 2):  # the last by an engine that was started in the place of one that hung
        rows = pq.read_table(ran.directory / "rollouts" / f"step_{step}.parquet").to_pylist()
        assert len(rows) == 32 and [row["error"] for row in rows] == [None] * 32
        expected = [ran.expected("train", row) for row in rows]
        assert [row["score"] for row in rows] == pytest.approx(expected, abs=ATOL)
        judged = [row for row in rows if int(row["prompt_id"].rpartition(":")[2]) % 2 == 0]
        assert 0 < len(judged) < 32 and len({round(row["score"], 3) for row in judged}) > len(judged) / 2


def test_metrics_are_of_those_rewards(ran: Ran) -> None:
    for step, metrics in ran.metrics().items():
        rows = pq.read_table(ran.directory / "rollouts" / f"step_{step}.parquet").to_pylist()
        judged = [row["score"] for row in rows if int(row["prompt_id"].rpartition(":")[2]) % 2 == 0]
        assert metrics["reward/mean"] == pytest.approx(fmean(row["score"] for row in rows))
        assert metrics["reward/part/model"] == pytest.approx(fmean(judged))
        assert metrics["dropped/grader_errors"] == 0 and metrics["actor/grad_norm"] > 0
        assert metrics["kl/loss"] >= 0 and metrics["advantage/std"] > 0


def test_validation_is_scored_alike(ran: Ran) -> None:
    rows = pq.read_table(ran.directory / "validation" / f"step_{STEPS}.parquet").to_pylist()
    expected = [ran.expected("val", row) for row in rows]
    assert len(rows) == 6 and [row["score"] for row in rows] == pytest.approx(expected, abs=ATOL)
    assert ran.metrics()[STEPS]["val/arithmetic/reward"] == pytest.approx(fmean(expected), abs=ATOL)


def test_it_sleeps_while_the_trainer_is_at_work(ran: Ran) -> None:
    each = ["wake", "classify", "sleep"]
    validated = [*each, "wake", "classify"]  # in between the best weights are exported; then the step of the death
    assert ran.phases == ["sleep", *each * STEPS, *validated]


def test_an_engine_that_stands_still_is_told_of_and_started_again(ran: Ran) -> None:
    hung, ready = ran.said
    assert re.search(r"reward engine 0 hangs while scoring 1 texts: no progress for \d+ s", hung)
    assert re.search(r"vLLM's process below it, process \d+: stopped \(state T\)", hung)
    assert "reward engine 0: started again, 1 of 3 restarts" in hung and "reward engine 0: ready after" in ready
    (report,) = (ran.directory / "logs").glob("hang_*.txt")
    actor = report.read_text().partition("its Ray actor, process ")[2].split("\n\n")[0]
    assert re.match(r"\d+: (waits \(state S\)|computes \(state R\))\n", actor)  # R: a busy machine lets it wait
    assert "most recent call first" in actor
