"""An algorithm in one file of a user's own, from the command line to the weights: nothing else knows of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support import self_distillation, vapo, verifier
from tests.support.own_algorithm import LOSS, MEDIAN
from tests.support.run_task import overrides, write_task

pytestmark = [pytest.mark.timeout(600), pytest.mark.tier("full"), pytest.mark.usefixtures("processes")]


HINT = " The answer is {answer}."


def train(folder: Path, given: list[str]) -> None:
    """Runs ``mcore-rl train`` in ``folder``."""
    command = [sys.executable, "-m", "mcore_rl.cli", "train", *given]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_run_trains_with_the_algorithm_of_a_file(tmp_path: Path) -> None:
    task, directory, own = write_task(tmp_path / "task"), tmp_path / "run", tmp_path / "own.py"
    own.write_text(MEDIAN + LOSS)
    given = overrides(
        task, directory, f"algorithm={own}", f"actor.loss_mode={own}:median", "actor.ppo_mini_batch_size=8",
        "actor.use_kl_loss=false", "trainer.total_training_steps=2", "trainer.test_freq=0", "trainer.save_freq=0",
    )  # fmt: skip
    train(tmp_path, given)
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "actor/grad_norm" in row]
    assert len(steps) == 2
    for row in steps:
        assert row["actor/grad_norm"] > 0 and row["advantage/max"] > 0
        assert row["actor/loss"] != 0 and "actor/clip_fraction_high" not in row, "the loss is the file's"
        assert "kl/reward" not in row and "kl/loss" not in row, "its KL is none, so that there is no reference"
    kept = yaml.safe_load((directory / "config.yaml").read_text())
    assert kept["algorithm"]["adv_estimator"] == kept["actor"]["loss_mode"] == f"{own}:median"


def test_two_lambdas_an_outcome_in_the_loss_and_two_keys_are_one_file(tmp_path: Path) -> None:
    """Right answers are imitated: of two runs of one step, the one with outcomes in its loss has another gradient."""
    task, own = write_task(tmp_path / "task"), tmp_path / "vapo.py"
    norms = {}
    own.write_text(Path(vapo.__file__).read_text())
    for mu in (0.1, 0.0):
        directory = tmp_path / f"run-{mu}"
        given = overrides(
            task, directory, f"algorithm={own}", f"actor.loss_mode={own}:vapo", "critic.path=null",
            f"actor.imitation_coef={mu}",
            "trainer.total_training_steps=1", "trainer.test_freq=0", "trainer.save_freq=0",
            "actor.ppo_mini_batch_size=8",
        )  # fmt: skip
        train(tmp_path, given)
        (row,) = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()][-1:]
        assert row["critic/grad_norm"] > 0 and row["return/mean"] != 0
        assert row["actor/imitation_loss"] > 0, "a metric of the file's loss"
        norms[mu] = (row["critic/grad_norm"], row["actor/grad_norm"], row["advantage/max"])
    with_it, without = norms[0.1], norms[0.0]
    assert with_it[0] == without[0] and with_it[2] == without[2], "the same samples, values and advantages"
    assert with_it[1] != without[1]


def test_a_trained_role_with_a_frozen_copy_that_rewards_tokens_is_one_file(tmp_path: Path) -> None:
    """Stopped after two steps and resumed: the third step is that of a run that never stopped."""
    task, own = write_task(tmp_path / "task"), tmp_path / "verifier.py"
    own.write_text(Path(verifier.__file__).read_text())
    given = [
        f"algorithm={own}", "verifier.path=null", "verifier.optim.lr=1e-3", "verifier.beta=0.5",
        "actor.use_kl_loss=false", "actor.loss_agg_mode=token_mean", "trainer.test_freq=0", "trainer.save_freq=2",
    ]  # fmt: skip
    rows = {}
    for name, lengths in {"whole": (3,), "halves": (2, 3)}.items():
        for steps in lengths:
            train(tmp_path, overrides(task, tmp_path / name, *given, f"trainer.total_training_steps={steps}"))
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        rows[name] = {row["step"]: row for row in map(json.loads, lines) if "actor/grad_norm" in row}
    for row in rows["whole"].values():
        assert row["verifier/grad_norm"] > 0 and row["time/verifier_scores"] > 0
        assert row["verifier/says_right"] > 0, "a metric of the role's loss"
    first, *later = rows["whole"].values()
    assert later[0]["verifier/loss"] != first["verifier/loss"] and later[0]["advantage/max"] > 0
    kept = yaml.safe_load((tmp_path / "whole" / "config.yaml").read_text())
    assert kept["verifier"]["beta"] == 0.5 and not {"critic", "teacher", "process_reward"} & kept.keys()
    names = ("actor/grad_norm", "verifier/grad_norm", "verifier/loss", "actor/loss", "advantage/max")
    assert [rows["halves"][3][name] for name in names] == [rows["whole"][3][name] for name in names]


def test_a_teacher_that_is_the_policy_with_more_context_is_one_file(tmp_path: Path) -> None:
    """Transformers scores the recorded tokens behind both prompts, and finds the run's advantages."""
    task, own, directory = write_task(tmp_path / "task"), tmp_path / "own.py", tmp_path / "run"
    own.write_text(Path(self_distillation.__file__).read_text())
    settings = [
        f"algorithm={own}", "actor.use_kl_loss=false", "trainer.test_freq=0", "trainer.save_freq=0",
        "actor.ppo_mini_batch_size=8", "rollout.temperature=1",
    ]  # fmt: skip
    given = [*settings, f"algorithm.hint='{HINT}'", "trainer.total_training_steps=2", "trainer.record_rollouts=true"]
    train(tmp_path, overrides(task, directory, *given))
    first, second = _steps(directory)
    assert first["self_teacher/in_context"] == second["self_teacher/in_context"] == 1
    assert first["time/self_teacher_scores"] > 0 and first["actor/grad_norm"] > 0
    added = torch.cat(_added_by_hints(task, directory))
    assert first["advantage/max"] == pytest.approx(float(added.max()), abs=2e-5)
    assert first["advantage/min"] == pytest.approx(float(added.min()), abs=2e-5)
    assert first["advantage/mean"] == pytest.approx(float(added.mean()), abs=2e-6)
    assert added.abs().mean() > 1e-3, "the hint says something"

    train(
        tmp_path, overrides(task, tmp_path / "none", *settings, "algorithm.hint=null", "trainer.total_training_steps=1")
    )
    (row,) = _steps(tmp_path / "none")
    assert row["self_teacher/in_context"] == 0
    assert row["advantage/max"] == row["advantage/min"] == 0, "without a hint the teacher says what the policy says"
    assert first["perf/tflop_logprobs"] > row["perf/tflop_logprobs"], "the hints are tokens too"


def _steps(directory: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "advantage/max" in row]


def _added_by_hints(task: Path, directory: Path) -> list[torch.Tensor]:
    """For each episode of the first step, what the hint adds to the log-prob of each token of the response."""
    model = AutoModelForCausalLM.from_pretrained(task / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(task / "model")
    rows = pq.read_table(task / "train.parquet").to_pylist()
    file = directory / "record" / "step_1.parquet"
    table = pq.read_table(file)
    numbers = [each["number"] for each in json.loads(table.schema.metadata[b"mcore_rl.drawn"])["groups"]]
    added = []
    for drawn in table.to_pylist():
        row = rows[numbers[drawn["group"]]]
        hint = HINT.format(answer=row["reward_model"]["ground_truth"])
        response = drawn["tokens"][-len(drawn["logprobs"]) :]
        told, asked = (_logprobs(model, tokenizer, row["prompt"], more, response) for more in (hint, ""))
        added.append(told - asked)
    return added


def _logprobs(model: Any, tokenizer: Any, messages: list[Any], more: str, response: list[int]) -> torch.Tensor:
    *before, question = messages
    told = [*before, {**question, "content": question["content"] + more}]
    prompt = tokenizer.apply_chat_template(told, add_generation_prompt=True, tokenize=True, return_dict=False)
    with torch.no_grad():
        logits_TV = model(torch.tensor([prompt + response])).logits[0]
    logprobs_TV: torch.Tensor = logits_TV[len(prompt) - 1 : -1].log_softmax(-1)
    return logprobs_TV.gather(1, torch.tensor(response)[:, None])[:, 0]
