"""A reward model learns to tell right answers of a policy from its wrong ones, and the policy learns from it alone.

The tiny mixture of ``make train``.  A policy that is fine-tuned a little answers; the graders pair its right answers
with its wrong ones (``mcore-rl evaluate pairs=``); engines serve what is trained on the pairs.  Held-out questions.
"""

from __future__ import annotations

import asyncio
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from subprocess import run

import pyarrow.parquet as pq
import pytest
import torch
from torch.nn.functional import logsigmoid
from transformers import AutoTokenizer

from mcore_rl.tracking.jsonl import read_metrics
from tests.support import reward_models
from tests.support.forked import start_engine
from tests.support.vllm_device import ON_VLLM_DEVICE

pytestmark = [pytest.mark.tier("full"), pytest.mark.timeout(3600), pytest.mark.usefixtures("processes")]
TOLD = 0.95  # of held-out pairs, at least
LIFT = 0.05  # of held-out accuracy, by rewards of the reward model alone
ATOL = 1e-4  # of an engine's scores, as in tests/rollout/vllm/engine/test_vllm_engine_classifier.py
SFT_STEPS, EARLY_STEPS, STEPS, RL_STEPS = 200, 80, 400, 80
TUNING = (
    "recipe=arithmetic_sft", "model.path=model", "data.train_files=[data/train.parquet]",
    "data.val_files=[data/val.parquet]", f"trainer.total_training_steps={SFT_STEPS}", "trainer.test_freq=0",
    "actor.optim.lr_schedule=cosine", "trainer.default_local_dir=sft", ON_VLLM_DEVICE["trainer"],
)  # fmt: skip
SCORING = (
    "model.path=sft/hf/final", "data.train_files=[pairs.parquet]", "data.val_files=[held_out.parquet]",
    "data.train_batch_size=64", "data.max_length=64", "actor.precision=float32", "actor.microbatch_tokens=8192",
    "actor.parallel.ep=2", "actor.optim.lr=1e-3", "actor.optim.lr_schedule=cosine", "actor.optim.weight_decay=0.0",
    f"trainer.total_training_steps={STEPS}", "trainer.test_freq=100", "trainer.n_gpus_per_node=2",
    "trainer.default_local_dir=reward", ON_VLLM_DEVICE["trainer"],
)  # fmt: skip
ANSWERING = (
    "model.path=early/hf/final", "data.max_prompt_length=40", "data.max_response_length=24", "rollout.n=8",
    "rollout.max_num_seqs=256", "rollout.kv_cache_memory_bytes=67108864", ON_VLLM_DEVICE["rollout"],
)  # fmt: skip
# Groups of right answers alone have scores that differ, too, and so have wrong ones: they count little where the reward
# is bounded and nothing divides by the deviation of a group.
LEARNING = (
    "recipe=arithmetic_grpo", "algorithm=dr_grpo", "model.path=early/hf/final",
    "actor.use_kl_loss=true", "actor.kl_loss_coef=0.05", "data.train_files=[unlabelled.parquet]",
    "data.val_files=[data/val.parquet]", "reward_model.enable=true", "reward_model.model.path=reward/hf/final",
    "reward_model.transform=sigmoid", "reward_model.max_length=80", "reward_model.dtype=float32",
    "reward_model.kv_cache_memory_bytes=16777216",
    f"trainer.total_training_steps={RL_STEPS}", f"trainer.test_freq={RL_STEPS}", "trainer.save_freq=0",
    "trainer.default_local_dir=policy", ON_VLLM_DEVICE["trainer"], ON_VLLM_DEVICE["reward_model"],
)  # fmt: skip


def command(folder: Path, *words: str) -> None:
    done = run([sys.executable, "-m", "mcore_rl.cli", *words], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


@dataclass
class Learned:
    """The folder of the run, ``reward``, and of its data."""

    folder: Path

    @property
    def exported(self) -> Path:
        return self.folder / "reward" / "hf" / "final"

    def texts(self) -> list[list[int]]:
        """The tokens of the held-out answers, those of a pair together."""
        tokenizer, texts = AutoTokenizer.from_pretrained(self.exported), list[list[int]]()
        for row in pq.read_table(self.folder / "held_out.parquet").to_pylist():
            for key in ("chosen", "rejected"):
                texts.append(list(tokenizer.apply_chat_template(row["prompt"] + row[key], return_dict=False)))
        return texts


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Learned:
    folder = tmp_path_factory.mktemp("reward_training")
    command(folder, "prepare", "arithmetic", "--difficulty", "1", "--train", "4000", "--val", "400", "--out", "data")
    command(folder, "prepare", "tiny-model", "--data", "data", "--out", "model")
    command(folder, "sft", *TUNING)
    early = (f"trainer.total_training_steps={EARLY_STEPS}", "trainer.default_local_dir=early")
    command(folder, "sft", *TUNING, *early)
    for split, pairs in (("train", "pairs"), ("val", "held_out")):
        command(folder, "generate", *ANSWERING, f"data.files=[data/{split}.parquet]", f"out={split}.parquet")
        command(folder, "evaluate", f"path={split}.parquet", f"pairs={pairs}.parquet")
    command(folder, "reward", *SCORING)
    return Learned(folder)


def test_it_tells_right_from_wrong_on_held_out_questions(learned: Learned) -> None:
    metrics = read_metrics(learned.folder / "reward" / "metrics.jsonl")
    first, last = metrics[0], metrics[-1]
    assert first["reward/val_accuracy"] < 0.75 and first["reward/val_loss"] == pytest.approx(math.log(2), abs=0.05)
    assert last["reward/val_accuracy"] >= TOLD and last["reward/val_ece"] < 0.1
    report = (learned.folder / "reward" / "report.html").read_text()
    assert f"and of {last['reward/val_accuracy']:.1%} at step {STEPS}" in report


def test_engines_score_as_transformers_does(learned: Learned) -> None:
    """And as the run did: its last validation is that of transformers' scores."""
    texts, settings = learned.texts(), reward_models.config(learned.exported)
    expected = torch.tensor(reward_models.reference(reward_models.load(learned.exported), texts))
    assert float(expected.max() - expected.min()) > 1, "scores differ: agreement says something"
    log = learned.folder / "engine.log"
    with start_engine("reward engine 0", learned.exported, settings, wait=True, log=log) as engine:
        scores = asyncio.run(engine.classify(texts))
    assert torch.tensor([float(score) for score in scores]) == pytest.approx(expected, abs=ATOL)
    margin_P = expected.view(-1, 2) @ torch.tensor([1.0, -1.0])
    last = read_metrics(learned.folder / "reward" / "metrics.jsonl")[-1]
    assert last["reward/val_accuracy"] == pytest.approx(float((margin_P > 0).double().mean()))
    assert last["reward/val_loss"] == pytest.approx(-float(logsigmoid(margin_P).mean()), abs=1e-5)


def test_a_policy_learns_from_the_reward_model_alone(learned: Learned) -> None:
    """No training row has a ground truth; held-out questions are judged by the grader, which nothing is trained on."""
    rows = pq.read_table(learned.folder / "data" / "train.parquet").to_pylist()
    for row in rows:
        row["reward_model"] = {"style": "model", "ground_truth": None}
    reward_models.write_rows(learned.folder / "unlabelled.parquet", rows)
    command(learned.folder, "train", *LEARNING)
    metrics = read_metrics(learned.folder / "policy" / "metrics.jsonl")
    first, last = metrics[0], metrics[-1]
    assert all("reward/accuracy" not in each for each in metrics), "no grader saw a training sample"
    assert all(0 < each["reward/mean"] < 1 for each in metrics[1:])
    early, late = (sum(each["reward/mean"] for each in part) / 10 for part in (metrics[1:11], metrics[-10:]))
    assert late > early
    assert last["val/arithmetic/accuracy"] >= first["val/arithmetic/accuracy"] + LIFT
