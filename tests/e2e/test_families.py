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
from tests.support import prompt_files, text_parts, tiny_models
from tests.support.run_task import overrides, write_task
from tests.support.text_parts import TEXT

pytestmark = [pytest.mark.timeout(900), pytest.mark.tier("full"), pytest.mark.usefixtures("processes")]


WITH_EXPERTS = tuple(f"{name}ForConditionalGeneration" for name in ("Qwen3VLMoe", "Qwen3_5Moe", "KimiK25"))


# (family, the trainer's precision, the engines'): neither side's numbers are the other's.
@pytest.mark.parametrize(
    ("family", "precision", "dtype"), [("qwen3_next", "float32", "bfloat16"), ("gpt_oss", "bfloat16", "float32")]
)
def test_a_run_trains_and_exports(family: str, precision: str, dtype: str, tmp_path: Path) -> None:
    model, tokenizer = tmp_path / family, prompt_files.tokenizer()
    tiny_models.save(family, model, vocab_size=len(tokenizer))
    tokenizer.save_pretrained(model)
    exported, moved, kept = trained(model, tmp_path, f"actor.precision={precision}", f"rollout.dtype={dtype}")
    assert len(moved) > len(kept)
    read = AutoModelForCausalLM.from_pretrained(exported)
    assert torch.isfinite(read(torch.tensor([[3, 4, 5]])).logits).all()


@pytest.mark.parametrize("architecture", TEXT)
def test_the_text_part_is_trained_and_the_rest_exported_as_it_was(architecture: str, tmp_path: Path) -> None:
    model, tokenizer = tmp_path / "model", prompt_files.tokenizer()
    text_parts.write(architecture, model, vocab_size=len(tokenizer))
    tokenizer.save_pretrained(model)
    ep = 2 if architecture in WITH_EXPERTS else 1
    exported, moved, kept = trained(model, tmp_path, "rollout.dtype=bfloat16", f"actor.parallel.ep={ep}")
    tower = [name for name in kept if any(part in name for part in ("visual", "vision", "projector"))]
    assert tower and not [name for name in moved if "visual" in name or "vision" in name or "projector" in name]
    assert len(moved) > (len(moved) + len(kept) - len(tower)) // 2
    assert (exported / "preprocessor_config.json").read_bytes() == (model / "preprocessor_config.json").read_bytes()


def trained(model: Path, folder: Path, *more: str) -> tuple[Path, list[str], list[str]]:
    """Two steps of GRPO on two ranks, with the check of every weight in the engines.

    Returns the exported checkpoint, and the names of its tensors that moved and that did not.
    """
    directory = folder / "run"
    given = overrides(
        write_task(folder / "task"), directory, f"model.path={model}", "actor.parallel.tp=2", *more,
        "trainer.total_training_steps=2", "trainer.test_freq=0", "trainer.save_freq=0",
        "trainer.guards.check_weights_freq=1",
    )  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "mcore_rl.cli", "train", *given],
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "actor/grad_norm" in row]
    assert len(steps) == 2
    for row in steps:
        assert row["actor/grad_norm"] > 0
        assert 0 < row["rollout/logprob_diff_mean"] < 0.2, "bfloat16 beside float32, and no more"
    exported = directory / "hf" / "final"
    before, after = HfCheckpoint.open(model), HfCheckpoint.open(exported)
    assert after.tensors.keys() == before.tensors.keys()
    same = {name: torch.equal(before.read(name).float(), after.read(name).float()) for name in before.tensors}
    return exported, [name for name in same if not same[name]], [name for name in same if same[name]]
