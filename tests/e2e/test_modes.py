"""What a step may be made of is the same in every ``trainer.mode``, from the command line, with real engines.

Groups without a signal that are replaced, a reward model, two updates a step and validation after each, in one run;
greedy rollouts in another.  Oracles: transformers' scores of the same texts, and what graders wrote down.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoTokenizer

from mcore_rl.cli import main
from mcore_rl.tracking.ledger import audit
from tests.support import reward_models
from tests.support.ahead_runs import APART, lines, prompts, staleness
from tests.support.run_task import nothing_left, overrides, write_task

pytestmark = [pytest.mark.tier("full"), pytest.mark.timeout(1200), pytest.mark.usefixtures("processes", "fast_ray")]

STEPS, BOUND, BATCH, SAMPLES = 4, 2, 4, 4
ATOL = 1e-4  # of a reward model's scores, which are about 10
MODES = {
    "one_step_off": ("trainer.mode=one_step_off", *APART),
    "async": ("trainer.mode=async", f"async.max_staleness={BOUND}", *APART),
    "partial": (
        *("rollout.partial=true", "rollout.over_sampling=0.5", f"async.max_staleness={BOUND}"),
        *("trainer.n_gpus_per_node=1", "actor.parallel.ep=1"),
    ),
}
MOST = {"one_step_off": 1, "async": BOUND, "partial": BOUND}
# Every fourth row has no signal, every other one is the reward model's.
FLAT = "flat"
GRADER = f'''"""Writes down what it graded."""

import json


def compute_score(data_source, solution_str, ground_truth, extra_info):
    score = 1.0 if ground_truth == "{FLAT}" else sum(map(ord, solution_str)) % 5 / 4
    with open(__file__ + ".calls", "a") as file:
        file.write(json.dumps([extra_info["index"], solution_str, score]) + "\\n")
    return score
'''


def write_rows(task: Path, *, judged: bool) -> None:
    """The task's rows with a number each; if ``judged``, with a reward model and rows without a signal."""
    (task / "grader.py").write_text(GRADER)
    for name in ("train", "val"):
        rows = pq.read_table(task / f"{name}.parquet").to_pylist()
        for number, row in enumerate(rows):
            row["extra_info"] = {"index": number if name == "train" else -1 - number}
            if judged and number % 2 == 0:
                row["reward_model"] = {"style": "model", "ground_truth": None}
            elif judged and number % 4 == 1:
                row["reward_model"] = {"style": "rule", "ground_truth": FLAT}
        reward_models.write_rows(task / f"{name}.parquet", rows)


def run(task: Path, directory: Path, *more: str) -> list[dict[str, Any]]:
    """A run of ``STEPS`` steps, whose engine draws eight responses at once; returns the lines of its metrics."""
    settings = [
        f"data.train_batch_size={BATCH}", f"rollout.n={SAMPLES}", "rollout.max_num_seqs=8", "trainer.test_freq=1",
        f"trainer.total_training_steps={STEPS}", f"custom_reward_function.path={task}/grader.py", *more,
    ]  # fmt: skip
    with nothing_left():
        assert main(["train", *overrides(task, directory, *settings)]) == 0
    assert audit(directory).violations == ()
    return lines(directory)


def rollouts(directory: Path, step: int) -> list[dict[str, Any]]:
    """The responses that ``step`` trained."""
    rows: list[dict[str, Any]] = pq.read_table(directory / "rollouts" / f"step_{step}.parquet").to_pylist()
    assert len(rows) == BATCH * SAMPLES
    return rows


def number_of(row: dict[str, Any]) -> int:
    """Of the data's row that a response answers."""
    return int(row["prompt_id"].rpartition(":")[2])


@pytest.mark.parametrize("mode", MODES)
def test_signals_a_reward_model_two_updates_and_validation(mode: str, tmp_path: Path) -> None:
    (tmp_path / "task").mkdir()
    task, directory = write_task(tmp_path / "task"), tmp_path / "run"
    reward_models.write_judge(task / "judge")
    write_rows(task, judged=True)
    rows = run(
        task, directory, *MODES[mode], "algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=score",
        "reward_model.enable=true", f"reward_model.model.path={task}/judge", "reward_model.max_length=200",
        "reward_model.kv_cache_memory_bytes=16777216", "reward_model.max_num_seqs=32",
        f"actor.ppo_mini_batch_size={BATCH // 2}",
    )  # fmt: skip
    assert 0 < max(most for _, most in staleness(rows)) <= MOST[mode]
    assert len({*prompts(directory, STEPS)}) == BATCH * STEPS
    data = pq.read_table(task / "train.parquet").to_pylist()
    tokenizer, model = AutoTokenizer.from_pretrained(task / "judge"), reward_models.load(task / "judge")
    judged = 0
    for step in range(1, STEPS + 1):
        groups = defaultdict(list)
        for row in rollouts(directory, step):
            groups[number_of(row)].append(row)
        for number, group in groups.items():
            assert number % 4 != 1 and len({row["score"] for row in group}) > 1, "a group without a signal is trained"
            if number % 2 == 0:
                told = [[*data[number]["prompt"], {"role": "assistant", "content": row["response"]}] for row in group]
                texts = [tokenizer.apply_chat_template(each, tokenize=False) for each in told]
                tokens = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
                expected = reward_models.reference(model, tokens)
                assert [row["score"] for row in group] == pytest.approx(expected, abs=ATOL)
                judged += 1
    assert judged > 0
    graded = Counter(number for number, _, _ in calls(task) if number >= 0)
    flat = sum(number % 4 == 1 for number in graded)
    assert flat > 0, "some had no signal"
    assert sum(row["dropped/groups"] for row in rows) <= sum(count == SAMPLES for count in graded.values())
    for row in rows:
        assert "val/arithmetic/reward" in row
        assert abs(row["actor/ratio_first"] - 1) < 1e-4 < row["actor/ratio_max"] - 1, (
            "the second update has another policy"
        )


@pytest.mark.parametrize("mode", MODES)
def test_greedy_rollouts_are_the_baseline(mode: str, tmp_path: Path) -> None:
    """ReMax: the baseline is the response that graders wrote down beside the samples of a prompt."""
    (tmp_path / "task").mkdir()
    task, directory = write_task(tmp_path / "task"), tmp_path / "run"
    write_rows(task, judged=False)
    rows = run(
        task, directory, *MODES[mode], "algorithm=remax", "algorithm.use_kl_in_reward=false", f"rollout.n={SAMPLES}",
        "algorithm.off_policy=decoupled", f"actor.ppo_mini_batch_size={BATCH}", "trainer.test_freq=0",
    )  # fmt: skip
    assert 0 < max(most for _, most in staleness(rows)) <= MOST[mode]
    graded = defaultdict(list)
    for number, response, score in calls(task):
        graded[number].append((response, score))
    for step, metrics in enumerate(rows, 1):
        advantages, tokens = [], []
        groups = defaultdict(list)
        for row in rollouts(directory, step):
            groups[number_of(row)].append(row)
        for number, group in groups.items():
            (greedy,) = (Counter(graded[number]) - Counter((row["response"], row["score"]) for row in group)).elements()
            advantages += [row["score"] - greedy[1] for row in group]
            tokens += [row["num_tokens"] for row in group]
        assert metrics["advantage/max"] == pytest.approx(max(advantages), abs=1e-5)
        assert metrics["advantage/min"] == pytest.approx(min(advantages), abs=1e-5)
        mean = float(torch.tensor(advantages).double() @ torch.tensor(tokens).double()) / sum(tokens)
        assert metrics["advantage/mean"] == pytest.approx(mean, abs=1e-5)


def calls(task: Path) -> list[tuple[int, str, float]]:
    """What the graders wrote down: the row's number, the response and its score."""
    written = (task / "grader.py.calls").read_text().splitlines()
    return [(number, response, score) for number, response, score in map(json.loads, written)]
