"""PRIME from the command line: transformers gives the numbers of its steps, and a killed run goes on bit for bit.

The process reward model is another model than the policy, in another layout.  Its weights after each step are read from
the checkpoints, the responses from the record of the run; everything is computed again from these, in float64.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from signal import SIGKILL
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

from mcore_rl.cli import main
from mcore_rl.controller.rollouts.recording import record_file
from mcore_rl.tracking.jsonl import read_metrics
from mcore_rl.tracking.ledger import audit
from tests.algorithms.test_process_rewards import Step, by_hand
from tests.e2e.test_learning import REWARD, SETTINGS
from tests.e2e.test_roles import write_dense
from tests.support.crash_runs import bits_of, doing, nothing_survives, start
from tests.support.run_task import AGREEMENT, SPEED, overrides, write_task
from tests.support.settings import algorithm_config

STEPS, BETA = 3, 0.05
LIFT = 0.1  # of the share that the reward is
RECORD = "trainer.record_rollouts=true"
CONFIG = algorithm_config(adv_estimator="prime", process_coef=5.0, outcome_coef=5.0)


def of_prime(task: Path, *more: str) -> list[str]:
    return [
        "algorithm=prime",
        "algorithm.filter_groups.enable=false",
        "actor.use_kl_loss=false",
        f"process_reward.path={task / 'dense'}",
        "process_reward.parallel.tp=2",
        "process_reward.ppo_mini_batch_size=8",
        "process_reward.microbatch_tokens=512",
        "process_reward.optim.lr=1e-3",
        *more,
    ]


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_task(tmp_path_factory.mktemp("task"))
    write_dense(directory / "dense", directory / "model", 1)
    return directory


@pytest.fixture(scope="module")
def whole(task: Path, tmp_path_factory: pytest.TempPathFactory, processes: None) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    with nothing_survives(folder) as traces:
        run = start(task, folder / "run", traces, *of_prime(task, RECORD), steps=STEPS)
        assert run.finish() == 0, run.said()
    return folder / "run"


def lines(directory: Path) -> dict[int, dict[str, float]]:
    return {int(line["step"]): dict(line) for line in read_metrics(directory / "metrics.jsonl")}


def weights(run: Path, step: int, task: Path) -> Path:
    """The reward model after ``step`` as a Hugging Face checkpoint."""
    if step == 0:
        return task / "dense"
    out = run.parent / f"{run.name}-process-{step}"
    if not out.exists():
        saved = run / "checkpoints" / f"step_{step}" / "process_reward"
        assert main(["convert", "to-hf", "--run", str(saved), "--out", str(out), "--dtype", "fp32"]) == 0
    return out


@torch.no_grad()
def logprobs(checkpoint: Path, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
    """Of each token given those before it, by transformers in float64; 0 of the first."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64).eval()
    rows = []
    for tokens in sequences:
        ids = torch.tensor([list(tokens)])
        scores = torch.log_softmax(model(ids).logits[0, :-1], dim=-1)
        rows.append([0.0, *scores.gather(1, ids[0, 1:, None])[:, 0].tolist()])
    return rows


def drawn(run: Path, step: int) -> tuple[list[Any], Step]:
    """(tokens of each response with its prompt, the step without log-ratios)."""
    rows = pq.read_table(record_file(run, step)).to_pylist()
    rests = [json.loads(row["rest"]) for row in rows]
    masks = [[each["trained"] for each in rest["segments"] for _ in range(each["tokens"])] for rest in rests]
    scores = [rest["score"]["value"] for rest in rests]
    ratios: list[list[float]] = [[0.0] * len(mask) for mask in masks]
    return [row["tokens"] for row in rows], Step(
        [row["group"] for row in rows], scores, masks, ratios, [False] * len(rows)
    )


def ratios_of(run: Path, step: int, of_weights: int, task: Path) -> Step:
    """What the weights after ``of_weights`` say of the responses of ``step``."""
    tokens, step_of = drawn(run, step)
    own, ref = (logprobs(weights(run, each, task), tokens) for each in (of_weights, 0))
    ratios = [[a - b for a, b in zip(*rows, strict=True)] for rows in zip(own, ref, strict=True)]
    return Step(step_of.groups, step_of.scores, step_of.masks, ratios, step_of.truncated)


def rewards(step: Step) -> list[float]:
    return [
        BETA * math.fsum(x for x, kept in zip(row, mask, strict=True) if kept)
        for row, mask in zip(step.ratios, step.masks, strict=True)
    ]


def pair_accuracy(step: Step) -> float:
    of_model, right, total = rewards(step), 0.0, 0.0
    for i, group in enumerate(step.groups):
        for j, other in enumerate(step.groups):
            gap = step.scores[i] - step.scores[j]
            if group == other and gap > 0:
                right, total = right + gap * (of_model[i] > of_model[j]), total + gap
    return right / total


@pytest.mark.tier("full")
def test_rewards_and_advantages_are_those_of_the_updated_model(whole: Path, task: Path) -> None:
    """``update=before``: the weights that reward a step have learned from its outcomes."""
    for step in (1, 2):
        metrics, again = lines(whole)[step], ratios_of(whole, step, step, task)
        own = rewards(again)
        assert metrics["process_reward/reward"] == pytest.approx(sum(own) / len(own), abs=1e-5), step
        assert max(map(abs, own)) > 1e-3, "else nothing is shown"
        assert metrics["process_reward/pair_accuracy"] == pytest.approx(pair_accuracy(again), abs=1e-6)
        advantages = [x for row in by_hand(again, CONFIG, BETA) for x in row if x is not None]
        # Log-ratios are about 0.01 to 0.1, and differ by the rounding of log-probs of a few nats.
        for name, expected in (("min", min(advantages)), ("max", max(advantages))):
            assert metrics[f"advantage/{name}"] == pytest.approx(expected, rel=2e-4), (step, name)


@pytest.mark.tier("full")
def test_the_loss_is_the_cross_entropy_of_the_weights_before(whole: Path, task: Path) -> None:
    metrics = lines(whole)
    assert metrics[1]["process_reward/loss"] == pytest.approx(math.log(2), abs=1e-6), "it is its own reference"
    for step in (2, 3):
        again = ratios_of(whole, step, step - 1, task)
        terms = [
            -outcome * math.log(1 / (1 + math.exp(-x))) - (1 - outcome) * math.log(1 / (1 + math.exp(x)))
            for x, outcome in zip(rewards(again), again.scores, strict=True)
        ]
        assert metrics[step]["process_reward/loss"] == pytest.approx(math.fsum(terms) / len(terms), abs=1e-5)
        told = [(x > 0) == (outcome > 0.5) for x, outcome in zip(rewards(again), again.scores, strict=True)]
        assert metrics[step]["process_reward/accuracy"] == pytest.approx(sum(told) / len(told), abs=1e-6)
        assert metrics[step]["process_reward/lr"] == 1e-3 and metrics[step]["process_reward/grad_norm"] > 0
        assert {"time/process_rewards", "time/update_process_reward"} <= metrics[step].keys()


@pytest.mark.tier("full")
def test_it_is_planned_saved_and_audited(whole: Path) -> None:
    plan = (whole / "plan.json").read_text()
    for part in ("process_reward weights", "process_reward optimizer", "process_reward_copy weights"):
        assert part in plan, part
    assert {path.name for path in (whole / "checkpoints/step_3").iterdir() if path.is_dir()} == {
        "actor",
        "process_reward",
    }
    assert audit(whole).violations == ()


def states(run: Path) -> dict[str, Any]:
    manifest = json.loads((run / "checkpoints" / f"step_{STEPS}" / "manifest.json").read_text())
    return {name: each for name, each in manifest["files"].items() if name.startswith(("actor/", "process_reward/"))}


@pytest.mark.tier("full")
def test_a_killed_run_goes_on_bit_for_bit(whole: Path, task: Path, tmp_path: Path, processes: None) -> None:
    """Killed while the policy is trained, when the reward model has learned from the step already."""
    with nothing_survives(tmp_path) as traces:
        run = start(task, tmp_path / "run", traces, *of_prime(task), steps=STEPS)
        run.strike_at(doing(2, "train_step"), "controller", SIGKILL)
        assert run.finish() == -SIGKILL
        run = start(task, tmp_path / "run", traces, *of_prime(task), steps=STEPS)
        assert run.finish() == 0, run.said()
    one, other = bits_of(whole, STEPS), bits_of(tmp_path / "run", STEPS)
    assert one.metrics == other.metrics and one.rollouts == other.rollouts
    assert states(whole) == states(tmp_path / "run") and len(states(whole)) > 4


@pytest.mark.tier("full")
def test_a_replay_is_the_run_bit_for_bit(whole: Path, task: Path, tmp_path: Path, processes: None) -> None:
    with nothing_survives(tmp_path) as traces:
        run = start(task, tmp_path / "run", traces, *of_prime(task, f"trainer.replay={whole}"), steps=STEPS)
        assert run.finish() == 0, run.said()
    assert states(whole) == states(tmp_path / "run")


@pytest.mark.tier("full")
def test_after_rewards_with_the_weights_before_the_update_and_adapters_may_learn(
    task: Path, tmp_path: Path, processes: None
) -> None:
    more = [
        "process_reward.update=after", "process_reward.lora.rank=4", "process_reward.parallel.tp=1",
        "process_reward.parallel.pp=2", "process_reward.optim.lr=1e-2", RECORD,
    ]  # fmt: skip
    with nothing_survives(tmp_path) as traces:
        run = start(task, tmp_path / "run", traces, *of_prime(task, *more), steps=2)
        assert run.finish() == 0, run.said()
    metrics = lines(tmp_path / "run")
    assert metrics[1]["process_reward/reward"] == 0 and metrics[1]["process_reward/grad_norm"] > 0
    own = rewards(ratios_of(tmp_path / "run", 2, 1, task))
    assert metrics[2]["process_reward/reward"] == pytest.approx(sum(own) / len(own), abs=1e-5)
    assert max(map(abs, own)) > 1e-4
    kept = {key for key in metrics[2] if not key.startswith(SPEED) and key not in AGREEMENT}
    assert {"process_reward/accuracy", "process_reward/pair_accuracy"} <= kept


@pytest.mark.tier("full")
@pytest.mark.timeout(900)
def test_the_policy_learns_from_process_and_outcome_rewards(tmp_path: Path, fast_ray: None) -> None:
    """As published.  The task is that of tests/e2e/test_learning.py.

    The reward model begins as the policy does, and tells nothing; in ten steps its rewards alone lift nobody.
    """
    task = write_task(tmp_path)
    (task / "reward.py").write_text(REWARD)
    more = [
        *SETTINGS, "algorithm=prime", "rollout.n=8", "algorithm.filter_groups.enable=false",
        "process_reward.parallel.ep=2", "process_reward.microbatch_tokens=512", "process_reward.optim.lr=3e-3",
        "process_reward.ppo_mini_batch_size=8",
    ]  # fmt: skip
    assert main(["train", *overrides(task, tmp_path / "run", *more)]) == 0
    metrics = lines(tmp_path / "run")
    steps = max(metrics)
    assert metrics[steps]["val/arithmetic/reward"] > metrics[0]["val/arithmetic/reward"] + LIFT
    told = [metrics[step]["process_reward/pair_accuracy"] for step in range(1, steps + 1)]
    assert sum(told) / len(told) > 0.5, "better than chance"
