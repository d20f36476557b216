"""Real training of reward models, against transformers' classifier on the same rows: experts split over two processes.

Of pairs with margins, weights and a centre; and of numbers and of outcomes.
"""

from __future__ import annotations

import asyncio
import json
import math
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import logsigmoid
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import mcore_rl
from mcore_rl.config.compose import compose
from mcore_rl.config.reward_training import RewardTrainingConfig
from mcore_rl.config.role import Head
from mcore_rl.controller.lifecycle.model_checks import demand_weights
from mcore_rl.controller.programs.reward import REWARD
from mcore_rl.data.arithmetic import Split, generate
from mcore_rl.ground.errors import CheckpointError, ConfigError, McoreRLError
from tests.support import prompt_files
from tests.support.crash_runs import launch, nothing_survives
from tests.support.run_task import nothing_left, write_task

BATCH, STEPS, CENTRE = 4, 2, 0.05
# Two implementations in float32: scores of about 1, each right to 1e-6.
TOLERANCE = 1e-5
Row = dict[str, Any]


@dataclass
class Observed:
    """Of one run: its directory, and metrics by step."""

    directory: Path
    metrics: dict[int, dict[str, float]]


def rows_of(split: Split, count: int) -> list[Row]:
    """The right sum against a wrong one; one wrong answer is empty."""
    rows = list[Row]()
    for number, each in enumerate(generate(1, count, 0, split)):
        right, wrong = each.solution, each.solution.replace(each.answer, str(int(each.answer) + 1 + number))
        rows.append({"prompt": each.question, "chosen": right, "rejected": "" if number == 1 else wrong})
        rows[-1] |= {"margin": 0.25 * number, "weight": 1.0 + number}
    return rows


def with_an_equal_pair(rows: list[Row]) -> list[Row]:
    """Its two answers are one text, which a run leaves out: nothing is preferred."""
    return [*rows[:2], rows[2] | {"rejected": rows[2]["chosen"]}, *rows[2:]]


def labelled(rows: list[Row]) -> list[Row]:
    """Each answer by itself: whether it is right, and a number."""
    return [
        {"prompt": row["prompt"], "completion": row[key], "outcome": key == "chosen", "number": 0.5 * number - 1.0}
        for number, row in enumerate(rows)
        for key in ("chosen", "rejected")
    ]


def stepped(rows: list[Row]) -> list[Row]:
    """Each answer by its lines; of a wrong one every line is wrong, or half wrong."""
    return [
        {"prompt": row["prompt"], "completion": row[key].splitlines(), "weight": row["weight"]}
        | {"labels": [1.0 if key == "chosen" else 0.5 * at for at, _ in enumerate(row[key].splitlines())]}
        for row in rows
        for key in ("chosen", "rejected")
        if row[key]
    ]


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_task(tmp_path_factory.mktemp("task"))
    train, val = rows_of(Split.train, STEPS * BATCH), rows_of(Split.validation, 5)
    for name, rows in (("pairs-train", train), ("pairs-val", val)):
        prompt_files.write(directory / f"{name}.parquet", with_an_equal_pair(rows))
        prompt_files.write(directory / f"labels-{name[6:]}.parquet", labelled(rows))
        prompt_files.write(directory / f"steps-{name[6:]}.parquet", stepped(rows))
    return directory


def overrides(task: Path, directory: Path, *more: str) -> list[str]:
    return [
        f"model.path={task}/model",
        f"data.train_files=[{task}/pairs-train.parquet]",
        f"data.val_files=[{task}/pairs-val.parquet]",
        f"data.train_batch_size={BATCH}",
        "data.shuffle=false",
        "data.max_length=128",
        "data.weight_key=weight",
        "actor.parallel.ep=2",
        "actor.precision=float32",
        "actor.microbatch_tokens=256",
        "actor.optim.lr=3e-3",
        "actor.optim.weight_decay=0.0",
        "trainer.n_gpus_per_node=2",
        "trainer.device=cpu",
        "trainer.logger=[]",
        f"trainer.total_training_steps={STEPS}",
        f"trainer.test_freq={STEPS}",
        "trainer.save_freq=1",
        f"trainer.default_local_dir={directory}",
        *more,
    ]


PAIRS = ("data.margin_key=margin", f"actor.reward.centering_coef={CENTRE}")


def labels_of(task: Path, loss: str, column: str) -> list[str]:
    files = [f"data.{name}_files=[{task}/labels-{name}.parquet]" for name in ("train", "val")]
    return [*files, f"actor.reward.loss={loss}", f"data.label_key={column}", "data.weight_key=null"]


def settings(task: Path, directory: Path, *more: str) -> RewardTrainingConfig:
    return compose(RewardTrainingConfig, "reward", overrides(task, directory, *more))


def run(task: Path, directory: Path, *more: str) -> Observed:
    with nothing_left():
        assert asyncio.run(REWARD.train(settings(task, directory, *more))) == 0
    return observed(directory)


def observed(directory: Path) -> Observed:
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return Observed(directory, {line.pop("step"): line for line in lines})


@pytest.fixture(scope="module")
def pairs(task: Path, tmp_path_factory: pytest.TempPathFactory, fast_ray: None) -> Observed:
    return run(task, tmp_path_factory.mktemp("pairs"), *PAIRS)


class Classifier:
    """What transformers' sequence classifier says of an answer, by itself."""

    def __init__(self, directory: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        loaded, said = AutoModelForSequenceClassification.from_pretrained(
            directory, dtype=torch.float32, output_loading_info=True
        )
        assert not said["missing_keys"] and not said["unexpected_keys"]
        assert loaded.config.num_labels == 1 and loaded.config.architectures == ["MixtralForSequenceClassification"]
        self.model = loaded.eval()

    def of(self, prompt: str, answer: str) -> float:
        told = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        tokens = self.tokenizer.apply_chat_template(told, return_dict=False)
        with torch.no_grad():
            return float(self.model(torch.tensor([tokens])).logits[0, 0])


def expected_of_pairs(rows: list[Row], model: Classifier) -> dict[str, float]:
    """The formulas once more, pair by pair."""
    scores = [tuple(model.of(row["prompt"], row[key]) for key in ("chosen", "rejected")) for row in rows]
    losses, sure, right = [], [], []
    for row, (chosen, rejected) in zip(rows, scores, strict=True):
        h = torch.tensor(chosen - rejected - row["margin"], dtype=torch.float64)
        losses.append((-float(logsigmoid(h)) + CENTRE * (chosen + rejected) ** 2) * row["weight"])
        sure.append(float(torch.sigmoid(torch.tensor(abs(chosen - rejected)).double())))
        right.append(chosen > rejected)
    bins = [int(each * 10) for each in sure]
    gaps = [abs(sum(sure[n] - right[n] for n, own in enumerate(bins) if own == each)) for each in set(bins)]
    return {
        "loss": sum(losses) / len(rows),
        "accuracy": sum(right) / len(rows),
        "margin": sum(chosen - rejected for chosen, rejected in scores) / len(rows),
        "chosen_score": sum(chosen for chosen, _ in scores) / len(rows),
        "ece": sum(gaps) / len(rows),
    }


def test_the_export_is_a_classifier_whose_scores_are_those_of_the_run(task: Path, pairs: Observed) -> None:
    """Loss, accuracy and calibration on held-out pairs, from transformers' scores of what the run left."""
    expected = expected_of_pairs(rows_of(Split.validation, 5), Classifier(pairs.directory / "hf" / "final"))
    last = pairs.metrics[STEPS]
    for name, value in expected.items():
        assert last[f"reward/val_{name}"] == pytest.approx(value, abs=TOLERANCE, rel=TOLERANCE), name
    assert last["reward/val_loss"] != pairs.metrics[0]["reward/val_loss"]


@pytest.mark.tier("full")
def test_a_run_of_one_step_goes_on_with_the_same_bits(
    task: Path, pairs: Observed, tmp_path: Path, fast_ray: None
) -> None:
    """It leaves the weights whose loss the second step has; and the whole run goes on from its checkpoint."""
    one = run(task, tmp_path / "one", *PAIRS, "trainer.total_training_steps=1", "trainer.val_before_train=false")
    expected = expected_of_pairs(
        rows_of(Split.train, STEPS * BATCH)[BATCH:], Classifier(one.directory / "hf" / "final")
    )
    second = pairs.metrics[2]
    assert second["reward/loss"] == pytest.approx(expected["loss"], rel=10 * TOLERANCE)
    assert second["reward/train_accuracy"] == pytest.approx(expected["accuracy"])
    assert second["reward/margin"] == pytest.approx(expected["margin"], abs=TOLERANCE)
    alike = {key: value for key, value in pairs.metrics[1].items() if key.startswith("reward/") and "val" not in key}
    assert alike and {key: one.metrics[1][key] for key in alike} == alike
    again = run(task, tmp_path / "one", *PAIRS)
    for key, value in second.items():
        if not key.startswith(("time/", "perf/")):
            assert again.metrics[2][key] == value, key
    first, other = (load_file(each.directory / "hf" / "final" / "model.safetensors") for each in (pairs, again))
    assert first.keys() == other.keys() and all(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.tier("full")
def test_a_reward_model_goes_on_from_its_own_head(task: Path, pairs: Observed, tmp_path: Path, fast_ray: None) -> None:
    """By validation alone: the export, read again, says what it said; and on outcomes, as log-odds.

    It is no policy: there are no logits.
    """
    exported, only = pairs.directory / "hf" / "final", "trainer.val_only=true"
    seen = run(task, tmp_path / "pairs", *PAIRS, f"model.path={exported}", only)
    for name in ("loss", "accuracy", "ece", "chosen_score"):
        key = f"reward/val_{name}"
        assert seen.metrics[0][key] == pytest.approx(pairs.metrics[STEPS][key], rel=TOLERANCE), name
    with pytest.raises(CheckpointError, match=r"tensor score\.weight of shape \(1, 64\) has no place in the model"):
        demand_weights(exported, Head.lm)
    words = overrides(task, tmp_path / "outcomes", *labels_of(task, "bce", "outcome"), f"model.path={exported}", only)
    result = mcore_rl.reward(words)
    assert result.finished
    (first,), model, rows = result.metrics, Classifier(exported), labelled(rows_of(Split.validation, 5))
    scores = [model.of(row["prompt"], row["completion"]) for row in rows]
    said = [1 / (1 + math.exp(-score)) for score in scores]
    outcomes = [float(row["outcome"]) for row in rows]
    likelihood = [p if y else 1 - p for p, y in zip(said, outcomes, strict=True)]
    gaps = [abs(sum(p - y for p, y in zip(said, outcomes, strict=True) if int(p * 10) == bin)) for bin in range(10)]
    expected = {
        "loss": -sum(math.log(p) for p in likelihood) / 10,
        "accuracy": sum(p > 0.5 for p in likelihood) / 10,
        "score": sum(scores) / 10,
        "ece": sum(gaps) / 10,
    }
    for name, value in expected.items():
        assert first[f"reward/val_{name}"] == pytest.approx(value, rel=TOLERANCE, abs=TOLERANCE), name


@pytest.mark.tier("full")
def test_a_killed_run_goes_on_with_the_same_bits(task: Path, pairs: Observed, tmp_path: Path, fast_ray: None) -> None:
    """Its controller dies as soon as there is the first step's checkpoint."""
    directory = tmp_path / "struck" / "run"
    directory.parent.mkdir()
    words = ["reward", *overrides(task, directory, *PAIRS, "trainer.async_save=false")]
    with nothing_survives(directory.parent) as traces:
        started = launch(words, directory, traces)
        started.until(lambda run: (directory / "checkpoints" / "step_1").is_dir())
        started.strike("controller", signal.SIGKILL)
        assert started.finish() != 0
        assert launch(words, directory, traces).finish() == 0
    again = observed(directory)
    assert list(again.metrics) == [0, 1, 2]
    for key, value in pairs.metrics[2].items():
        if not key.startswith(("time/", "perf/")):
            assert again.metrics[2][key] == value, key
    first, other = (load_file(each.directory / "hf" / "final" / "model.safetensors") for each in (pairs, again))
    assert all(torch.equal(first[name], other[name]) for name in first)


def of_steps(rows: list[Row], model: Classifier) -> dict[str, float]:
    """The formulas step by step, of transformers' scores of the tokens up to each step's end."""
    said, labels, losses = list[float](), list[float](), list[float]()
    for row in rows:
        told = [
            {"role": "user", "content": row["prompt"]},
            {"role": "assistant", "content": "\n".join(row["completion"])},
        ]
        tokens = model.tokenizer.apply_chat_template(told, return_dict=False)
        for at, (step, label) in enumerate(zip(row["completion"], row["labels"], strict=True)):
            lines = "\n".join(row["completion"][: at + 1])
            texts = (model.tokenizer.decode(tokens[:end]) for end in range(len(tokens) + 1))
            end = next(end for end, text in enumerate(texts) if text.endswith(lines))
            end = len(tokens) if at == len(row["completion"]) - 1 else end
            with torch.no_grad():
                score = model.model(torch.tensor([tokens[:end]])).logits[0, 0].double()
            said.append(float(torch.sigmoid(score)))
            labels.append(label)
            losses.append(-float(label * logsigmoid(score) + (1 - label) * logsigmoid(-score)) * row["weight"])
            assert step in lines
    gaps = [abs(sum(p - y for p, y in zip(said, labels, strict=True) if int(p * 10) == bin)) for bin in range(10)]
    right = sum(0.5 if y == 0.5 else float((p > 0.5) == (y > 0.5)) for p, y in zip(said, labels, strict=True))
    count = len(labels)
    return {"loss": sum(losses) / count, "accuracy": right / count, "ece": sum(gaps) / count}


def test_steps_are_fitted_and_judged_each_by_its_own_end(task: Path, tmp_path: Path, fast_ray: None) -> None:
    """Of the export, the last validation; and of a run that goes on from it, the loss of the first step."""
    files = [f"data.{name}_files=[{task}/steps-{name}.parquet]" for name in ("train", "val")]
    words = [*files, "actor.reward.loss=bce", "data.step_labels_key=labels"]
    seen = run(task, tmp_path / "run", *words)
    model, last = Classifier(seen.directory / "hf" / "final"), seen.metrics[STEPS]
    train, val = ([*stepped(rows_of(*each))] for each in ((Split.train, STEPS * BATCH), (Split.validation, 5)))
    for name, value in of_steps(val, model).items():
        assert last[f"reward/val_{name}"] == pytest.approx(value, abs=TOLERANCE, rel=TOLERANCE), name
    goes_on = [f"model.path={seen.directory}/hf/final", "trainer.total_training_steps=1", "trainer.test_freq=0"]
    first = run(task, tmp_path / "on", *words, *goes_on).metrics[1]
    expected = of_steps(train[:BATCH], model)
    assert first["reward/loss"] == pytest.approx(expected["loss"], rel=10 * TOLERANCE)
    assert first["reward/train_accuracy"] == pytest.approx(expected["accuracy"])


@pytest.mark.tier("full")
def test_numbers_are_fitted_with_adapters(task: Path, tmp_path: Path, fast_ray: None) -> None:
    words = [*labels_of(task, "regression", "number"), "actor.lora.rank=4"]
    seen = run(task, tmp_path / "run", *words)
    model, rows = Classifier(seen.directory / "hf" / "final"), labelled(rows_of(Split.validation, 5))
    score_N = torch.tensor([model.of(row["prompt"], row["completion"]) for row in rows], dtype=torch.float64)
    label_N = torch.tensor([row["number"] for row in rows], dtype=torch.float64)
    last = seen.metrics[STEPS]
    assert last["reward/val_loss"] == pytest.approx(float((score_N - label_N).square().mean()), rel=10 * TOLERANCE)
    expected = float(torch.corrcoef(torch.stack([score_N, label_N]))[0, 1])
    assert last["reward/val_correlation"] == pytest.approx(expected, abs=10 * TOLERANCE)
    assert "reward/val_accuracy" not in last and "reward/val_ece" not in last


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["actor.reward.loss=bce", "actor.reward.centering_coef=0.1"], "centering_coef=0.1: is not read by bce"),
        (["actor.reward.loss=regression", "data.margin_key=margin"], "data.margin_key=margin: is not read by regress"),
        (["data.label_key=outcome"], "data.label_key=outcome: is not read by bradley_terry.*loss=regression or bce"),
        (["actor.microbatch_sequences=1", "actor.microbatch_tokens=null"], "parts the two sequences of a pair"),
        (["actor.microbatch_tokens=40"], "actor.microbatch_tokens=40: .* rows do not fit"),
        (["actor.reward.loss=bce"], "no column completion; it has prompt, chosen, rejected, margin, weight"),
        (["data.train_files=[{task}/labels-train.parquet]"], "no column chosen; it has prompt, completion"),
        (
            ["actor.reward.loss=bce", "data.train_files=[{task}/labels-train.parquet]", "data.label_key=number",
             "data.weight_key=null"],
            "number is -1.0. Write a number from 0 to 1",
        ),
        (["data.max_length=9"], "have an answer of more than data.max_length=9 tokens"),
        (["trainer.critic_warmup=1"], "reward has no critic"),
        (["data.step_labels_key=labels"], "data.step_labels_key=labels: is not read by bradley_terry.*loss=bce"),
        (
            ["actor.reward.loss=bce", "data.step_labels_key=labels", "data.label_key=outcome"],
            "data.label_key=outcome: is not read with data.step_labels_key",
        ),
    ],
)  # fmt: skip
def test_refusals_name_the_key_and_the_remedy(task: Path, tmp_path: Path, words: list[str], said: str) -> None:
    written = [word.format(task=task) for word in words]
    with pytest.raises((ConfigError, McoreRLError), match=said):
        REWARD.prepare(settings(task, tmp_path / "run", *written))
