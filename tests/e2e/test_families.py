"""Families whose engines need settings of their own, from the command line to an export that transformers reads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from mcore_rl.checkpoints.hf_directory import HfCheckpoint
from tests.support import prompt_files, tiny_models
from tests.support.run_task import overrides, write_task

pytestmark = [pytest.mark.timeout(900), pytest.mark.tier("full"), pytest.mark.usefixtures("processes")]


# (family, the trainer's precision, the engines'): neither side's numbers are the other's.
@pytest.mark.parametrize(
    ("family", "precision", "dtype"), [("qwen3_next", "float32", "bfloat16"), ("gpt_oss", "bfloat16", "float32")]
)
def test_a_run_trains_and_exports(family: str, precision: str, dtype: str, tmp_path: Path) -> None:
    task, directory, model = write_task(tmp_path / "task"), tmp_path / "run", tmp_path / family
    tokenizer = prompt_files.tokenizer()
    tiny_models.save(family, model, vocab_size=len(tokenizer))
    tokenizer.save_pretrained(model)
    given = overrides(
        task, directory, f"model.path={model}", f"actor.precision={precision}", f"rollout.dtype={dtype}",
        "actor.parallel.tp=2", "trainer.total_training_steps=2", "trainer.test_freq=0", "trainer.save_freq=0",
        "trainer.guards.check_weights_freq=1",
    )  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "mcore_rl.cli", "train", *given],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "actor/grad_norm" in row]
    assert len(steps) == 2
    for row in steps:
        assert row["actor/grad_norm"] > 0
        assert 0 < row["rollout/logprob_diff_mean"] < 0.2, "bfloat16 beside float32, and no more"
    before, after = HfCheckpoint.open(model), HfCheckpoint.open(directory / "hf" / "final")
    assert after.tensors.keys() == before.tensors.keys()
    moved = [name for name in before.tensors if not torch.equal(before.read(name).float(), after.read(name).float())]
    assert len(moved) > len(before.tensors) // 2
    read = AutoModelForCausalLM.from_pretrained(directory / "hf" / "final")
    assert torch.isfinite(read(torch.tensor([[3, 4, 5]])).logits).all()
