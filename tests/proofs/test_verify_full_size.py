"""The proof at full size: every rank's real modules, every Hugging Face tensor, the whole plan.

About 45 s of computing in all, most of it Megatron building some 300 ranks on the meta device.
"""

from __future__ import annotations

import pytest

from mcore_rl.config.parallel import parse_layout
from mcore_rl.config.rollout import parse_rollout_layout
from mcore_rl.families.registry import model_of
from mcore_rl.parallel.layout import balanced_layers
from mcore_rl.proofs.tracer import trace
from mcore_rl.proofs.verify import verify
from mcore_rl.training.meta import meta_rank
from mcore_rl.weights.rollout_table import RolloutTable
from mcore_rl.weights.table import Table
from tests.support.published import FACTS

FULL = pytest.mark.tier("full")


@pytest.mark.tier("ci")
@pytest.mark.parametrize(
    ("name", "training", "world_size", "rollout", "parameters"),
    [
        ("mistralai/Mixtral-8x22B-Instruct-v0.1", "tp=8,pp=4,ep=8", 64, "tp=8", 140_630_071_296),
        pytest.param("Qwen/Qwen2.5-72B-Instruct", "tp=8,pp=4", 32, "tp=16", 72_706_203_648, marks=FULL),
        ("meta-llama/Llama-3.1-8B-Instruct", "tp=16", 16, "tp=8", 8_030_261_248),  # 8 key/value heads
        pytest.param("Qwen/Qwen3-235B-A22B", "tp=4,pp=4,ep=16", 64, "tp=4,dp=4,ep=16", 235_093_634_560, marks=FULL),
        pytest.param("deepseek-ai/DeepSeek-V3", "tp=8,pp=8,ep=16", 128, "tp=8,dp=4,ep=32", 671_026_419_200, marks=FULL),
    ],
)
def test_full_size(name: str, training: str, world_size: int, rollout: str, parameters: int) -> None:
    (family, model), parallel, target = model_of(FACTS[name]), parse_layout(training), parse_rollout_layout(rollout)
    if model.num_layers % parallel.pp:
        parallel.pipeline_layers = balanced_layers(model.num_layers, parallel.pp)
    table = Table(family, model, parallel, world_size)
    report = verify(
        table,
        RolloutTable(family, model, target),
        lambda rank: meta_rank(model, parallel, world_size, rank),
    )
    assert [failure for check in report.checks for failure in check.failures] == []
    assert report.traffic is not None and report.traffic.total == report.traffic.bound
    # Of the model as published: 141B, 72.7B, 235B, 671B without the multi-token prediction.
    assert report.checks[2].found.startswith(f"{parameters:,} elements")
    parallel.pipeline_layers = None  # two layers a stage
    _, failures = trace(FACTS[name], parallel, world_size, target)
    assert failures == []
