"""Integers land where they should for every family, and not where a wrong table or a wrong plan sends them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from mcore_rl.config.parallel import parse_layout
from mcore_rl.config.rollout import parse_rollout_layout
from mcore_rl.families.family import Family
from mcore_rl.families.registry import FAMILIES, model_of
from mcore_rl.families.rules import Layers, Range, Rule, ShardRanges, replicated_qkv
from mcore_rl.proofs.tracer import NumberedCheckpoint, Tracer, direct_tensors, reduced_config, trace, training_tensor
from mcore_rl.weights.reshard import ReshardPlan, plan_reshard
from mcore_rl.weights.rollout_table import RolloutTable
from mcore_rl.weights.table import Table
from mcore_rl.weights.tensor_slice import TensorSlice
from tests.support import direct_rollout, models
from tests.support.published import FACTS, TINY

MIXTRAL = models.moe(ffn_hidden_size=64, num_attention_heads=8, num_query_groups=4)
DENSE_LAYOUTS = [("tp=2,pp=2,vpp=2", 8, "tp=4"), ("tp=4,cp=2", 8, "tp=2,dp=2"), ("pp=4", 4, ""), ("tp=8", 8, "tp=4")]
EXPERT_LAYOUTS = [
    ("tp=4,pp=2,ep=8", 16, "tp=4,dp=2,ep=8"),
    ("tp=2,pp=2,ep=2,etp=2", 8, "tp=4"),
    ("tp=2,pp=2,vpp=2,ep=4,etp=1", 8, "tp=2,dp=2,ep=2"),
]


@pytest.mark.parametrize(("training", "world_size", "rollout"), DENSE_LAYOUTS)
@pytest.mark.parametrize("model_type", list(TINY))
def test_every_family_is_traced(model_type: str, training: str, world_size: int, rollout: str) -> None:
    _, failures = trace(TINY[model_type], parse_layout(training), world_size, parse_rollout_layout(rollout))
    assert failures == []


@pytest.mark.parametrize(("training", "world_size", "rollout"), EXPERT_LAYOUTS)
@pytest.mark.parametrize(
    "model_type",
    [
        "mixtral",
        "qwen2_moe",
        "qwen3_moe",
        "deepseek_v3",
        "deepseek_v2",
        "glm4_moe",
        "olmoe",
        "qwen3_next",
        "qwen3_5_moe_text",
        "glm4_moe_lite",
        "minimax_m2",
    ],
)
def test_every_family_with_experts_is_traced(model_type: str, training: str, world_size: int, rollout: str) -> None:
    counts, failures = trace(TINY[model_type], parse_layout(training), world_size, parse_rollout_layout(rollout))
    assert failures == []
    assert counts.endswith(f"{parse_rollout_layout(rollout).world_size} ranks")


@pytest.mark.parametrize("name", [name for name in FACTS if not name.startswith("tiny-")])
def test_a_reduced_model_is_cut_like_the_whole_one(name: str) -> None:
    """Key/value heads fewer than rollout ranks or than heads, ties, biases, experts, dense layers stay."""
    parallel, rollout = parse_layout("tp=2,pp=2"), parse_rollout_layout("tp=4")
    (_, whole), (_, small) = model_of(FACTS[name]), model_of(reduced_config(FACTS[name], parallel, rollout))
    assert small.num_layers == 4
    assert (small.num_query_groups < 4) == (whole.num_query_groups < 4)
    assert (small.num_query_groups < small.num_attention_heads) == (whole.num_query_groups < whole.num_attention_heads)
    if whole.num_attention_heads % rollout.tp == 0:  # else no such layout
        assert whole.num_attention_heads * small.num_query_groups == small.num_attention_heads * whole.num_query_groups
    for field in ("tie_output", "qkv_bias", "qk_norm", "joint_qk_norm", "sandwich_norm"):
        assert getattr(small, field) == getattr(whole, field)
    assert (small.mla is None, small.moe is None) == (whole.mla is None, whole.moe is None)
    if whole.moe and small.moe:
        assert bool(small.moe.dense_layers) == bool(whole.moe.dense_layers)
        assert bool(small.moe.shared_ffn_hidden_size) == bool(whole.moe.shared_ffn_hidden_size)


def test_uneven_placements_are_traced_as_they_are() -> None:
    parallel = parse_layout("tp=1,pp=4")
    parallel.pipeline_layers = [3, 2, 2, 1]
    _, failures = trace(TINY["deepseek_v3"], parallel, 4, parse_rollout_layout("tp=2"))
    assert failures == []
    assert reduced_config(TINY["deepseek_v3"], parallel, parse_rollout_layout(""))["num_hidden_layers"] == 8


def numbered(table: Table) -> NumberedCheckpoint:
    return NumberedCheckpoint({name: info.shape for name, info in table.hf_tensors.items()})


def test_no_integer_stands_twice() -> None:
    table = Table(FAMILIES["mixtral"], MIXTRAL)
    checkpoint = numbered(table)
    everything = np.concatenate([checkpoint.read(name).ravel() for name in checkpoint])
    assert len(np.unique(everything)) == len(everything) == checkpoint.num_elements
    assert 0 not in everything
    whole = checkpoint.read("model.layers.1.self_attn.q_proj.weight")
    region = checkpoint.read("model.layers.1.self_attn.q_proj.weight", TensorSlice((3, 2), (5, 7)))
    assert np.array_equal(region, whole[3:8, 2:9])


def test_a_training_tensor_by_hand() -> None:
    """Rank 1 of 2 of a fused first projection: its half of gate, then of up; and of the vocabulary, with a zero row."""
    table = Table(FAMILIES["llama"], models.dense(), parse_layout("tp=2"))
    checkpoint = numbered(table)
    held = {local.name: training_tensor(table, local, checkpoint) for local in table.tensors(1)}
    gate, up = (checkpoint.read(f"model.layers.2.mlp.{name}_proj.weight") for name in ("gate", "up"))
    expected = np.concatenate([gate[48:], up[48:]])
    assert np.array_equal(held["decoder.layers.2.mlp.linear_fc1.weight"], expected)
    embedding = checkpoint.read("model.embed_tokens.weight")
    assert np.array_equal(held["embedding.word_embeddings.weight"][:50], embedding[51:])
    assert not held["embedding.word_embeddings.weight"][50].any()


def by_hand(plan: ReshardPlan) -> list[str]:
    """Failures against slicing by hand."""
    tracer = Tracer(plan)

    def direct(rank: int) -> dict[str, np.ndarray]:
        read, layout = tracer.checkpoint.read, plan.rollout.layout
        return direct_rollout.llama_like(read, MIXTRAL, layout, rank, mixtral=True)

    return list(tracer.failures(range(plan.rollout.layout.world_size), direct))


def planned(family: Family, rollout: str = "tp=2,dp=2,ep=2") -> ReshardPlan:
    table = Table(family, MIXTRAL, parse_layout("tp=2,pp=2,ep=2"), 8)
    return plan_reshard(table, RolloutTable(family, MIXTRAL, parse_rollout_layout(rollout)))


def changed(end: str, change: Callable[[Rule], Rule]) -> Family:
    """Mixtral with another rollout rule."""
    family = FAMILIES["mixtral"]
    rules = tuple(change(rule) if rule.name.endswith(end) else rule for rule in family.rollout)
    assert rules != family.rollout
    return replace(family, rollout=rules)


def swapped_gate_and_up() -> Family:
    return changed("w13_weight", lambda rule: replace(rule, hf=rule.hf[::-1]))


def dropped_gate() -> Family:
    return changed("w13_weight", lambda rule: replace(rule, hf=rule.hf[:1]))


def wrong_kv_head() -> Family:
    def layout(model, sizes, num_shards, index):  # type: ignore[no-untyped-def]
        right = replicated_qkv(model, sizes, num_shards, index)
        other = replicated_qkv(model, sizes, num_shards, (index + 1) % num_shards)
        key = next(held for held in other.ranges if held.source == 1)
        return ShardRanges.of([Range(1, key.begin, key.end) if held.source == 1 else held for held in right.ranges])

    return changed("qkv_proj.weight", lambda rule: replace(rule, layout=layout))


def lost_layer() -> Family:
    return changed("o_proj.weight", lambda rule: replace(rule, layers=Layers.dense))


@pytest.mark.parametrize(
    ("mutate", "said"),
    [
        (swapped_gate_and_up, "w13_weight"),
        (dropped_gate, "w13_weight: expected shape (2, 128, 48), found (2, 64, 48)"),
        (wrong_kv_head, "qkv_proj.weight"),
        (lost_layer, "o_proj.weight: nothing in the plan writes it"),
    ],
)
def test_a_wrong_rollout_table_shows(mutate: Callable[[], Family], said: str) -> None:
    assert by_hand(planned(FAMILIES["mixtral"])) == []
    assert said in "\n".join(by_hand(planned(mutate())))


def test_a_shifted_layer_and_a_dropped_expert_show() -> None:
    plan = planned(FAMILIES["mixtral"])
    rule, layer, expert = plan.source_ids.decode(plan.source)
    number = next(i for i, r in enumerate(plan.table.rules) if r.name.endswith("linear_fc2.weight"))
    mine = (rule == number) & (plan.target_rank == 1)
    # Layers 0 and 1 are in one stage, so that the shift reads what its rank has.
    (row,), (other,) = (np.flatnonzero(mine & (layer == one) & (expert == 3)) for one in (0, 1))
    source, rank = plan.source.copy(), plan.source_rank.copy()
    source[row], rank[row] = source[other], rank[other]
    shifted = "\n".join(by_hand(replace(plan, source=source, source_rank=rank)))
    assert "rollout rank 1 model.layers.0.block_sparse_moe.experts.routed_experts.w2_weight: 3072 of 6144" in shifted
    kept = np.delete(np.arange(len(plan)), row)
    columns = ("source_rank", "source", "target_rank", "target", "geometry")
    dropped = by_hand(replace(plan, **{name: getattr(plan, name)[kept] for name in columns}))
    assert len(dropped) == 1 and "w2_weight: 3072 of 6144" in dropped[0]


def test_the_table_and_the_hand_agree_without_a_plan() -> None:
    plan = planned(FAMILIES["mixtral"], "tp=4,dp=1,ep=4")
    checkpoint = numbered(plan.table)
    for rank in range(4):
        hand = direct_rollout.llama_like(checkpoint.read, MIXTRAL, plan.rollout.layout, rank, mixtral=True)
        table = direct_tensors(plan.rollout, rank, checkpoint)
        assert table.keys() == hand.keys()
        assert all(np.array_equal(table[name], hand[name]) for name in table)
