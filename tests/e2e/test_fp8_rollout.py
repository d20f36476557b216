"""``train`` with engines in fp8, from the command line: weighed by the ratio, and refused where it would fail."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from mcore_rl.cli import main
from tests.support.fp8_blocks import write_in_fp8
from tests.support.fp8_on_cpu import put_on_path
from tests.support.run_task import nothing_left, overrides, write_task
from tests.support.vllm_device import ON_VLLM_DEVICE

IN_FP8 = ("rollout.quantization=fp8_channel", "rollout.dtype=bfloat16")
WEIGHED = "algorithm.off_policy=decoupled"


@pytest.mark.timeout(1800)
def test_a_run_trains_on_what_engines_in_fp8_draw(
    tmp_path: Path, fast_ray: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every update is checked, bytes and scales; what draws is near what is trained, and not it."""
    put_on_path(monkeypatch)
    task, run = write_task(tmp_path), tmp_path / "run"
    more = ("trainer.total_training_steps=2", "trainer.guards.check_weights_freq=1")
    with nothing_left():
        assert main(["train", *overrides(task, run, *IN_FP8, WEIGHED, *more)]) == 0
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    trained = [row for row in rows if "rollout/logprob_diff_mean" in row]
    assert len(trained) == 2
    for row in trained:
        assert 1e-3 < row["rollout/logprob_diff_mean"] < 0.1, "in float32 and without rounding it is below 1e-5"
        assert row["rollout/effective_sample_size"] > 0.9


def test_a_run_that_would_fail_or_mislead_is_refused(
    tmp_path: Path, processes: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a CPU without kernels; and, wherever it is, where nothing weighs what engines in fp8 draw."""
    task = write_task(tmp_path)
    assert main(["train", *overrides(task, tmp_path / "run", *IN_FP8)]) != 0
    said = capsys.readouterr().err
    assert "rollout.quantization=fp8_channel: engines draw from rounded weights" in said
    assert "or insist: rollout.allow_uncorrected=true" in said
    for insisted in (WEIGHED, "rollout.allow_uncorrected=true"):
        assert main(["train", *overrides(task, tmp_path / "run", *IN_FP8, insisted)]) != 0
        assert "rollout.quantization=fp8_channel: vLLM has no kernels for it on a CPU" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_in_fp8_is_not_quantised_once_more(
    tmp_path: Path, processes: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``generate`` reads the files in vLLM, which would refuse them in words of its own."""
    put_on_path(monkeypatch)
    task = write_task(tmp_path)
    write_in_fp8(task / "model", torch.bfloat16)
    asked = [f"data.files=[{task}/val.parquet]", f"out={tmp_path}/answers.parquet", "data.max_prompt_length=64"]
    asked.append("data.max_response_length=16")
    cache = "rollout.kv_cache_memory_bytes=16777216"
    assert main(["generate", f"model.path={task}/model", *asked, cache, ON_VLLM_DEVICE["rollout"], *IN_FP8]) == 2
    said = capsys.readouterr().err
    assert "rollout.quantization=fp8_channel: " in said and "is in fp8 already, and vLLM takes one. " in said
    assert "mcore-rl convert dequantise" in said and not (tmp_path / "answers.parquet").exists()
