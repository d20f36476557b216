"""The loop on the real GSM8K: from its authors' jsonl files to two steps of every kind of algorithm and parallelism.

Tiny random models cannot calculate, so that rewards are 0 and what moves the weights is the entropy bonus; what is
looked at is whether every part means the same thing.  Each case is a start of all processes.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from mcore_rl.config.compose import compose
from mcore_rl.config.run import RunConfig
from mcore_rl.controller.programs.train import run_training
from tests.house.source import ROOT
from tests.support.run_task import nothing_left
from tests.support.skips import NOT_INSTALLED
from tests.support.vllm_device import ON_VLLM_DEVICE

GSM8K = ROOT.parent / "shared" / "data" / "gsm8k"
REASON = f"{NOT_INSTALLED}put train.jsonl and test.jsonl of GSM8K's authors into {GSM8K.relative_to(ROOT.parent)}"
pytestmark = [pytest.mark.skipif(not GSM8K.is_dir(), reason=REASON), pytest.mark.timeout(600)]

CASES = {
    "ppo, dense, tp=2": (
        "qwen2",
        "algorithm=ppo",
        "actor.parallel.tp=2",
        "critic.parallel.tp=2",
        "critic.microbatch_tokens=1024",
    ),
    "grpo, experts, ep=2": ("mixtral", "algorithm=grpo", "actor.parallel.ep=2", "actor.kl_loss_type=full"),
    "rloo, dense, pp=2, lr=0": (
        "qwen2",
        "algorithm=rloo",
        "actor.loss_mode=ppo_clip",
        "actor.parallel.pp=2",
        "actor.optim.lr=0",
    ),
    "grpo, dense, cp=2": ("qwen2", "algorithm=grpo", "actor.parallel.cp=2"),
}
PROMPTS, SAMPLES, STEPS = 4, 2, 2


@dataclass
class Observed:
    """Of one case.  model: what it began with.  metrics: of the steps."""

    model: Path
    directory: Path
    metrics: list[dict[str, float]]

    def rollouts(self, step: int) -> list[dict[str, Any]]:
        return pq.read_table(self.directory / "rollouts" / f"step_{step}.parquet").to_pylist()


def tool(name: str, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / name), *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``data`` with both splits, and a model of each family over a vocabulary of their texts."""
    directory = tmp_path_factory.mktemp("gsm8k")
    tool("prepare_data.py", "gsm8k", "--source", str(GSM8K), "--out", str(directory / "data"))
    for family in ("qwen2", "mixtral"):
        arguments = ["--vocab-size", "2048", "--family", family, "--out", str(directory / family)]
        tool("make_tiny_model.py", "--data", str(directory / "data"), *arguments)
    return directory


QUICK = "ppo, dense, tp=2"  # where minutes count; the others with ``pytest --tier=full tests/e2e``


@pytest.fixture(
    scope="module",
    params=[name if name == QUICK else pytest.param(name, marks=pytest.mark.tier("full")) for name in CASES],
)
def observed(
    request: pytest.FixtureRequest, task: Path, tmp_path_factory: pytest.TempPathFactory, fast_ray: None
) -> Observed:
    family, *overrides = CASES[request.param]
    directory = tmp_path_factory.mktemp("run")
    settings = [
        f"model.path={task / family}",
        f"data.train_files=[{task}/data/train.parquet]",
        f"data.val_files=[{task}/data/test.parquet]",
        "data.val_max_samples=4",
        f"data.train_batch_size={PROMPTS}",
        "data.max_prompt_length=200",
        "data.filter_overlong_prompts=true",
        "data.max_response_length=24",
        f"rollout.n={SAMPLES}",
        "rollout.max_num_seqs=16",
        "rollout.kv_cache_memory_bytes=33554432",
        "rollout.enforce_eager=true",
        f"actor.ppo_mini_batch_size={PROMPTS // 2}",
        "actor.precision=float32",
        "actor.microbatch_tokens=1024",
        "actor.optim.lr=1e-3",
        "actor.entropy_coeff=0.01",
        "actor.use_kl_loss=true",
        "algorithm.use_kl_in_reward=true",
        "reward.num_workers=1",
        "trainer.n_gpus_per_node=2",
        ON_VLLM_DEVICE["trainer"],
        "trainer.logger=[]",
        "trainer.val_before_train=false",
        f"trainer.total_training_steps={STEPS}",
        f"trainer.test_freq={STEPS}",
        f"trainer.default_local_dir={directory}",
        *overrides,
    ]  # fmt: skip
    with nothing_left():
        assert asyncio.run(run_training(compose(RunConfig, "train", settings))) == 0
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return Observed(task / family, directory, [json.loads(line) for line in lines])


def test_the_numbers_of_the_steps_are_sane(observed: Observed) -> None:
    still = observed.metrics[0]["actor/lr"] == 0
    assert [metrics["step"] for metrics in observed.metrics] == [1, 2]
    for metrics in observed.metrics:
        # Two implementations in float32 over 4 layers and a vocabulary of 2,048; a wrong weight makes 0.01 and more.
        assert metrics["rollout/logprob_diff_max"] < 1e-4
        assert metrics["actor/ratio_first"] == pytest.approx(1.0, abs=1e-5)
        assert metrics["actor/grad_norm"] > 0
        assert metrics["actor/skipped_updates"] == 0
        assert 0 <= metrics["reward/mean"] <= 1
        assert metrics["actor/kl_k3"] == 0 if still else metrics["actor/kl_k3"] > 0
    first, second = observed.metrics
    assert first["kl/reward"] == 0, "the policy is the reference before it is trained"
    assert (second["kl/reward"] == second["kl/loss"] == 0) is still
    assert "val/openai/gsm8k/accuracy" in second


def test_prompts_are_the_published_questions(observed: Observed) -> None:
    published = {json.loads(line)["question"] for line in (GSM8K / "train.jsonl").read_text("utf-8").splitlines()}
    seen = set()
    for step in (1, 2):
        rows = observed.rollouts(step)
        assert len(rows) == PROMPTS * SAMPLES and {row["data_source"] for row in rows} == {"openai/gsm8k"}
        assert {row["error"] for row in rows} == {None}
        asked = {question for row in rows for question in published if question in row["prompt"]}
        assert len(asked) == PROMPTS
        seen |= asked
    assert len(seen) == STEPS * PROMPTS, "no question comes twice"


def test_weights_are_trained_and_without_a_rate_bit_for_bit_the_same(observed: Observed) -> None:
    before, after = (
        {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
        for folder in (observed.model, observed.directory / "hf" / "final")
    )
    assert before.keys() == after.keys()
    same = [torch.equal(tensor, after[name]) for name, tensor in before.items()]
    assert all(same) if observed.metrics[0]["actor/lr"] == 0 else not any(same)
