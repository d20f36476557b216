"""A tiny model learns to use a calculator for products that it cannot work out, by the commands of docs/agents.md.

SFT, Megatron, vLLM's engine and its parser of calls, real calls.  Held-out questions, sampled at temperature 1.
"""

from __future__ import annotations

import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from mcore_rl.cli import main
from mcore_rl.tracking.jsonl import read_metrics
from tests.house.source import ROOT
from tests.support.vllm_device import ON_VLLM_DEVICE

pytestmark = [pytest.mark.tier("full"), pytest.mark.timeout(3600)]
WITHOUT, LEARNED = 0.2, 0.7


def commands() -> list[list[str]]:
    """Of the page's section."""
    section = (ROOT / "docs/agents.md").read_text(encoding="utf-8").partition("## Try it")[2].partition("## Loops")[0]
    lines = re.findall(r"^mcore-rl (.*)$", section, re.MULTILINE)
    assert [line.split()[0] for line in lines] == ["prepare", "prepare", "sft", "train"]
    return [line.split() for line in lines]


def test_a_tiny_model_learns_to_use_a_calculator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: None
) -> None:
    monkeypatch.chdir(tmp_path)
    for words in commands():
        device = [ON_VLLM_DEVICE["trainer"]] if words[0] == "train" else []
        assert main([*words, *device]) == 0
    metrics = read_metrics(tmp_path / "runs/products/grpo/metrics.jsonl")
    held_out = [each["val/products/accuracy"] for each in metrics if "val/products/accuracy" in each]
    assert held_out[0] < WITHOUT and held_out[-1] >= LEARNED
    last = metrics[-1]
    assert last["agent/end/answered"] > 0.9 and last["agent/failed_call_share"] < 0.1

    # The same weights without the tool: what they can work out by themselves.
    rows = pq.read_table("runs/products/data/val.parquet").drop_columns("agent_name")
    pq.write_table(rows, "alone.parquet")
    alone = ["train", "recipe=products_grpo", "model.path=runs/products/grpo/hf/final", "trainer.val_only=true"]
    settings = ["data.val_files=[alone.parquet]", "rollout.agent.tools=[]", "rollout.agent.max_turns=8"]
    assert main([*alone, *settings, "trainer.default_local_dir=runs/alone", ON_VLLM_DEVICE["trainer"]]) == 0
    (without,) = [each["val/products/accuracy"] for each in read_metrics(tmp_path / "runs/alone/metrics.jsonl")]
    assert without < WITHOUT
