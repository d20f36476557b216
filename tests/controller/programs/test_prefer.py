"""Real learning from preferences, against transformers on the same rows: two processes, experts split over them.

Of DPO, and of losses that take other ways: KTO with rows of both kinds, and ORPO, which has no reference.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM, AutoTokenizer

from mcore_rl.config.compose import compose
from mcore_rl.config.prefer import PreferConfig
from mcore_rl.controller.programs.prefer import PREFER, mismatched, with_answer_of
from mcore_rl.data.arithmetic import Split, generate
from mcore_rl.data.conversations import Conversation
from mcore_rl.data.preferences import PreferredAnswers
from mcore_rl.ground.errors import ConfigError, McoreRLError
from tests.support import prompt_files
from tests.support.run_task import nothing_left, write_task

BATCH, STEPS, BETA = 4, 2, 0.5
# Two implementations in float32: sums of ten log-probs, each right to 1e-6, times beta.
TOLERANCE = 1e-5
Row = dict[str, Any]


@dataclass
class Observed:
    """Of one run: its directory, and metrics by step."""

    directory: Path
    metrics: dict[int, dict[str, float]]


def rows_of(split: Split, count: int) -> list[Row]:
    """The right sum against a wrong one: texts, messages, a whole conversation, and an empty answer."""
    rows = []
    for number, each in enumerate(generate(1, count, 0, split)):
        right, wrong = each.solution, each.solution.replace(each.answer, str(int(each.answer) + 1 + number))
        rows.append({"prompt": each.question, "chosen": right, "rejected": "" if number == 1 else wrong})
        rows[-1] |= {"margin": 0.25 * number, "weight": 1.0 + number}
    return rows


def as_messages(row: Row) -> Row:
    """Whole conversations, as UltraFeedback has them."""
    asked = {"role": "user", "content": row["prompt"]}
    sides = {key: [asked, {"role": "assistant", "content": row[key]}] for key in ("chosen", "rejected")}
    return {"prompt": row["prompt"]} | sides | {key: row[key] for key in ("margin", "weight")}


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_task(tmp_path_factory.mktemp("task"))
    train, val = rows_of(Split.train, STEPS * BATCH), rows_of(Split.validation, 3)
    prompt_files.write(directory / "pairs-train.parquet", train)
    prompt_files.write(directory / "pairs-val.parquet", [as_messages(row) for row in val])
    answers = [
        (row, key) for number, row in enumerate(train) for key in ("chosen", "rejected") if number % 3 or key[0] == "c"
    ]
    labelled = [
        {"prompt": row["prompt"], "completion": row[key], "label": key == "chosen", "weight": row["weight"]}
        for row, key in answers
    ]
    prompt_files.write(directory / "labels-train.parquet", labelled)
    return directory


def settings(task: Path, directory: Path, *more: str) -> PreferConfig:
    overrides = [
        f"model.path={task}/model",
        f"data.train_files=[{task}/pairs-train.parquet]",
        f"data.val_files=[{task}/pairs-val.parquet]",
        f"data.train_batch_size={BATCH}",
        "data.shuffle=false",
        "data.max_length=128",
        "data.margin_key=margin",
        "data.weight_key=weight",
        f"actor.preference.beta={BETA}",
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
    ]
    return compose(PreferConfig, "prefer", [*overrides, *more])


def run(task: Path, directory: Path, *more: str) -> Observed:
    with nothing_left():
        assert asyncio.run(PREFER.train(settings(task, directory, *more))) == 0
    return observed(directory)


def observed(directory: Path) -> Observed:
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return Observed(directory, {line.pop("step"): line for line in lines})


@pytest.fixture(scope="module")
def dpo(task: Path, tmp_path_factory: pytest.TempPathFactory, fast_ray: None) -> Observed:
    return run(task, tmp_path_factory.mktemp("dpo"))


class Answers:
    """By transformers, one at a time: an answer's log-prob and length, by the first weights and by others."""

    def __init__(self, task: Path, model: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(task / "model")
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

    def tokens(self, prompt: str, answer: str) -> tuple[list[int], list[int]]:
        end = self.tokenizer.convert_tokens_to_ids(str(self.tokenizer.eos_token))
        asked = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False
        )
        return asked, [*self.tokenizer.encode(answer, add_special_tokens=False), end]

    def logprob(self, asked: list[int], said: list[int]) -> float:
        with torch.no_grad():
            logits = self.model(torch.tensor([[*asked, *said]])).logits[0].double()
        chosen = torch.log_softmax(logits, dim=-1)[len(asked) - 1 : -1].gather(1, torch.tensor(said)[:, None])
        return float(chosen.sum())

    def of(self, prompt: str, answer: str) -> float:
        return self.logprob(*self.tokens(prompt, answer))


def dpo_loss(rows: list[Row], now: Answers, first: Answers) -> tuple[float, float]:
    """(loss, accuracy) with margins and weights."""
    losses, right = [], []
    for row in rows:
        gain = [now.of(row["prompt"], row[key]) - first.of(row["prompt"], row[key]) for key in ("chosen", "rejected")]
        h = torch.tensor(BETA * (gain[0] - gain[1]) - row["margin"], dtype=torch.float64)
        losses.append(-float(logsigmoid(h)) * row["weight"])
        right.append((gain[0] > gain[1]) + 0.5 * (gain[0] == gain[1]))
    return sum(losses) / len(losses), sum(right) / len(right)


def test_before_training_nothing_is_preferred_and_every_loss_is_that_of_the_margin(task: Path, dpo: Observed) -> None:
    rows = rows_of(Split.validation, 3)
    expected = sum(-float(logsigmoid(torch.tensor(-row["margin"]).double())) * row["weight"] for row in rows) / 3
    assert dpo.metrics[0]["prefer/val_loss"] == pytest.approx(expected, rel=TOLERANCE)
    assert dpo.metrics[0]["prefer/val_accuracy"] == 0.5 and dpo.metrics[0]["prefer/val_margin"] == 0
    first = Answers(task, task / "model")
    mean = sum(first.of(row["prompt"], row["chosen"]) for row in rows) / 3
    assert dpo.metrics[0]["prefer/val_chosen_logprob"] == pytest.approx(mean, rel=TOLERANCE)


def test_losses_after_training_are_those_of_transformers(task: Path, dpo: Observed) -> None:
    first, now = Answers(task, task / "model"), Answers(task, dpo.directory / "hf" / "final")
    loss, accuracy = dpo_loss(rows_of(Split.validation, 3), now, first)
    last = dpo.metrics[STEPS]
    assert last["prefer/val_loss"] == pytest.approx(loss, rel=20 * TOLERANCE)
    assert last["prefer/val_accuracy"] == pytest.approx(accuracy)
    assert last["prefer/val_loss"] < dpo.metrics[0]["prefer/val_loss"]


@pytest.mark.tier("full")
def test_the_second_steps_loss_is_that_of_the_weights_after_the_first(
    task: Path, dpo: Observed, tmp_path: Path, fast_ray: None
) -> None:
    """A run of one step leaves these weights; and the whole run goes on from its checkpoint with the same bits."""
    one = run(task, tmp_path / "one", "trainer.total_training_steps=1", "trainer.val_before_train=false")
    first, then = Answers(task, task / "model"), Answers(task, one.directory / "hf" / "final")
    rows = rows_of(Split.train, STEPS * BATCH)
    loss, accuracy = dpo_loss(rows[BATCH:], then, first)
    assert dpo.metrics[2]["prefer/loss"] == pytest.approx(loss, rel=20 * TOLERANCE)
    assert dpo.metrics[2]["prefer/accuracy"] == pytest.approx(accuracy)
    alike = {key: value for key, value in dpo.metrics[1].items() if key.startswith("prefer/") and "val" not in key}
    assert {key: one.metrics[1][key] for key in alike} == alike
    again = run(task, tmp_path / "one")
    for key, value in dpo.metrics[2].items():
        if not key.startswith(("time/", "perf/")):
            assert again.metrics[2][key] == value, key


@pytest.mark.tier("full")
def test_kto_takes_answers_by_themselves(task: Path, tmp_path: Path, fast_ray: None) -> None:
    """At first log-ratios are 0, and so is the KL: each loss is half its weight.  Then both have been learnt from."""
    words = ["actor.preference.loss=kto", f"data.train_files=[{task}/labels-train.parquet]", "data.margin_key=null"]
    seen = run(task, tmp_path / "run", *words, "actor.preference.undesirable_weight=2.0", "data.train_batch_size=6")
    rows = pq.read_table(task / "labels-train.parquet").to_pylist()[:6]
    expected = sum(0.5 * row["weight"] * (1 if row["label"] else 2) for row in rows) / 6
    assert seen.metrics[1]["prefer/loss"] == pytest.approx(expected, rel=TOLERANCE)
    assert seen.metrics[1]["prefer/kl"] == 0 and "prefer/accuracy" not in seen.metrics[1]
    assert seen.metrics[STEPS]["prefer/val_margin"] > seen.metrics[0]["prefer/val_margin"] == 0


def test_orpo_needs_no_reference(task: Path, tmp_path: Path, fast_ray: None) -> None:
    words = [
        "actor.preference.loss=orpo",
        "data.margin_key=null",
        "trainer.total_training_steps=1",
        "trainer.test_freq=1",
    ]
    seen = run(task, tmp_path / "run", *words)
    first, losses = Answers(task, task / "model"), []
    for row in rows_of(Split.train, BATCH):
        means = []
        for key in ("chosen", "rejected"):
            asked, said = first.tokens(row["prompt"], row[key])
            means.append(torch.tensor(first.logprob(asked, said) / len(said), dtype=torch.float64))
        odds = [mean - torch.log1p(-torch.exp(mean)) for mean in means]
        losses.append(float(-means[0] - BETA * logsigmoid(odds[0] - odds[1])) * row["weight"])
    assert seen.metrics[1]["prefer/loss"] == pytest.approx(sum(losses) / BATCH, rel=TOLERANCE)
    assert not any("reference" in key for key in seen.metrics[1])


@pytest.mark.parametrize(
    ("prompts", "others"),
    [
        ([[1], [2], [3]], [1, 2, 0]),
        ([[1], [1], [2]], [2, 2, 0]),  # the next row is of the same prompt
        ([[1], [1]], [1, 0]),
        ([[1]], [0]),
    ],
)
def test_mismatched_answers_are_of_another_prompt(prompts: list[list[int]], others: list[int]) -> None:
    """Of each pair both answers are, not the second alone."""
    mask = (False, True)
    rows = [
        PreferredAnswers(tuple(Conversation("", (*prompt, 10 * n + m), mask) for m in (1, 2)), (1, 0), 0.0, 1.0)
        for n, prompt in enumerate(prompts)
    ]
    told = [(own.tokens, other.tokens) for own, other in mismatched(rows)]
    assert told == [
        (rows[n].answers[m].tokens, rows[other].answers[m].tokens) for n, other in enumerate(others) for m in (0, 1)
    ]


def test_a_prompt_takes_the_answer_of_another_row() -> None:
    own = Conversation("a", (1, 2, 3, 4), (False, False, True, True))
    other = Conversation("b", (5, 6, 7, 8, 9), (False, True, True, False, True))
    mixed = with_answer_of(own, other, 10)
    assert mixed.tokens == (1, 2, 6, 7, 8, 9) and mixed.mask == (False, False, True, True, False, True)
    assert with_answer_of(own, other, 3).tokens == (1, 2, 6)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["actor.preference.gamma=2"], "actor.preference.gamma=2.0: is not read by dpo.*loss=simpo"),
        (["actor.preference.loss=ipo"], "data.margin_key=margin: ipo knows no margins.*dpo or hinge or simpo"),
        (["actor.microbatch_sequences=1", "actor.microbatch_tokens=null"], "parts the two sequences of a pair"),
        (["actor.microbatch_tokens=40"], "actor.microbatch_tokens=40: .* rows do not fit"),
        (["data.margin_key=no"], "no column no"),
        (["data.max_length=9"], "have an answer of more than data.max_length=9 tokens"),
    ],
)
def test_refusals_name_the_key_and_the_remedy(task: Path, tmp_path: Path, words: list[str], said: str) -> None:
    with pytest.raises((ConfigError, McoreRLError), match=said):
        PREFER.prepare(settings(task, tmp_path / "run", *words))
