"""vLLM's memory for adapters: every element is sent once, the memory is what vLLM takes, and what it cannot is refused.

Where vLLM itself would put the elements, ``tests/proofs/test_adapter_mutation.py`` says.
"""

from __future__ import annotations

import pytest

from mcore_rl.config.lora import LoraConfig, PublishedLora
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.parallel import parse_layout
from mcore_rl.config.rollout import RolloutConfig, parse_rollout_layout
from mcore_rl.families.registry import FAMILIES
from mcore_rl.proofs.reshard_proof import reshard_failures
from mcore_rl.weights.adapter_table import AdapterTable
from mcore_rl.weights.reshard import plan_reshard
from mcore_rl.weights.rollout_adapters import RolloutAdapterTable, published_form, published_violations
from mcore_rl.weights.rollout_table import RolloutTable
from mcore_rl.weights.table import Table
from tests.support import models

LORA = LoraConfig(rank=3, alpha=6.0)
WITH_HEAD = LoraConfig(rank=3, target_modules=["q_proj", "lm_head"])
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
DENSE = {
    "llama": models.dense(),
    "qwen2": models.dense(tie_output=True, qkv_bias=True, num_query_groups=1),
    "phi3": models.phi3(rope=models.phi3_rope(32), head_dim=32, hidden_size=128),
    "gemma2": models.gemma2(embedding_scale=8.0),
}


@pytest.mark.parametrize("name", list(DENSE))
@pytest.mark.parametrize("layout", ["tp=2", "pp=2", "tp=2,pp=2"])
@pytest.mark.parametrize("rollout", ["tp=1", "tp=2", "tp=2,dp=2"])
def test_every_element_of_every_adapter_arrives_once(name: str, layout: str, rollout: str) -> None:
    parallel = parse_layout(layout)
    table = Table(FAMILIES[name], DENSE[name], parallel, 4)
    base = RolloutTable(FAMILIES[name], DENSE[name], parse_rollout_layout(rollout))
    adapters = AdapterTable(table, LORA)
    plan = plan_reshard(adapters, RolloutAdapterTable(base, adapters))
    assert reshard_failures(plan) == []
    assert len({plan.table.rules[each.source_rule].name for each in plan.geometries}) == len(adapters.rules)


def test_memory_by_hand() -> None:
    """Of a fused layer vLLM has an A and a B for each part, of a rank that it knows, adapted or not."""
    model = models.dense(num_layers=2)
    base = RolloutTable(FAMILIES["llama"], model, parse_rollout_layout("tp=2"))
    adapters = AdapterTable(Table(FAMILIES["llama"], model), LoraConfig(rank=9, target_modules=["q_proj", "down_proj"]))
    held = RolloutAdapterTable(base, adapters)
    assert held.engine_adapters.modules == ("down_proj", "qkv_proj") and held.engine_adapters.held_rank == 16
    hidden, ffn = model.hidden_size, model.ffn_hidden_size
    queries, keys = (heads * model.head_dim for heads in (model.num_attention_heads, model.num_query_groups))
    fused = 3 * 16 * hidden + 16 * (queries + 2 * keys) // 2  # A whole, B by rows
    down = 16 * ffn // 2 + 16 * hidden  # A by columns, B whole
    assert held.held_bytes == 2 * (fused + down)
    of_queries = 9 * hidden + 9 * queries // 2
    assert held.bytes_stored(2).tolist() == [2 * 2 * (of_queries + 9 * ffn // 2 + 9 * hidden)] * 2


@pytest.mark.parametrize(
    ("name", "model", "lora", "problem", "remedy"),
    [
        ("mixtral", models.moe(), LORA, "need Triton", "actor.lora.target_modules=[k_proj,o_proj,q_proj,v_proj]"),
        ("llama", models.dense(), WITH_HEAD, "the output projection has none: lm_head", "rollout.lora=merged"),
        ("llama", models.dense(), LoraConfig(rank=513), "beyond 512", "rollout.lora=merged"),
        ("deepseek_v2", models.deepseek_v2(), LORA, "latent attention", "rollout.lora=merged"),
        ("qwen3_next", models.qwen3_next(), LORA, "linear attention", "rollout.lora=merged"),
        ("qwen3_5_text", models.qwen3_5(), LORA, "linear attention", "rollout.lora=merged"),
    ],
)
def test_what_vllm_cannot_apply_is_refused_by_name(
    name: str, model: object, lora: LoraConfig, problem: str, remedy: str
) -> None:
    table = Table(FAMILIES[name], model)  # type: ignore[arg-type]
    (violation,) = published_violations(lora, table, "actor.lora.")
    assert problem in str(violation) and remedy in str(violation)


@pytest.mark.parametrize(
    ("name", "model", "lora", "expected"),
    [
        ("llama", models.dense(), LORA, PublishedLora.adapter),
        ("mixtral", models.moe(), LoraConfig(rank=3, target_modules=ATTENTION), PublishedLora.adapter),
        ("mixtral", models.moe(), LORA, PublishedLora.merged),
        ("llama", models.dense(), WITH_HEAD, PublishedLora.merged),
        ("llama", models.dense(), LoraConfig(rank=513), PublishedLora.merged),
        ("llama", models.dense(), LoraConfig(rank=0), PublishedLora.merged),
        ("deepseek_v2", models.deepseek_v2(), LORA, PublishedLora.merged),
        ("qwen3_next", models.qwen3_next(), LORA, PublishedLora.merged),
    ],
)
def test_by_default_engines_apply_what_vllm_can(
    name: str, model: ModelConfig, lora: LoraConfig, expected: PublishedLora
) -> None:
    table = Table(FAMILIES[name], model)
    assert published_form(lora, RolloutConfig().lora, table) is expected
    for asked in (PublishedLora.adapter, PublishedLora.merged):
        assert published_form(lora, asked, table) is asked, "what is asked for is refused elsewhere, never changed"


def test_attention_of_a_mixture_is_applied() -> None:
    table = Table(FAMILIES["mixtral"], models.moe())
    assert not list(published_violations(LoraConfig(rank=3, target_modules=ATTENTION), table, "actor.lora."))
