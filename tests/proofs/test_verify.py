"""The proof passes for every family and layout of real modules, and names what is wrong with a wrong table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from mcore_rl.checkpoints.hf_directory import HfCheckpoint
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.parallel import parse_layout
from mcore_rl.config.rollout import parse_rollout_layout
from mcore_rl.families.family import Family
from mcore_rl.families.registry import FAMILIES
from mcore_rl.families.rules import Range, Rule, ShardRanges, Sizes, hf
from mcore_rl.proofs.placement import MegatronRank
from mcore_rl.proofs.verify import ProofReport, cover_problem, verify
from mcore_rl.training.meta import meta_rank
from mcore_rl.weights.rollout_table import RolloutTable
from mcore_rl.weights.table import Table
from mcore_rl.weights.tensor_slice import TensorSlice
from tests.support import checkpoints, models

MIXTRAL = models.moe(ffn_hidden_size=64)
TRAINING, WORLD_SIZE, ROLLOUT = "tp=2,pp=2,ep=2", 8, "tp=4,dp=2"


@cache
def modules(model_name: str, training: str, world_size: int, rank: int) -> MegatronRank:
    return meta_rank(checkpoints.MODELS[model_name], parse_layout(training), world_size, rank)


def proof(family: Family, model: ModelConfig, training: str, world_size: int, rollout: str, name: str) -> ProofReport:
    table = Table(family, model, parse_layout(training), world_size)
    target = RolloutTable(family, model, parse_rollout_layout(rollout))
    return verify(table, target, lambda rank: modules(name, training, world_size, rank))


def failures(report: ProofReport) -> str:
    return "\n".join(f"{check.proves}: {failure}" for check in report.checks for failure in check.failures)


@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize(
    ("training", "world_size", "rollout"),
    [
        ("", 1, ""),
        ("tp=2,pp=2", 8, "tp=2,dp=2"),
        ("pp=2,vpp=2,cp=2", 4, "tp=2"),
        ("tp=2", 2, "tp=4"),
        ("tp=4", 4, "tp=2"),
    ],
)
def test_every_family_is_proven(family: str, training: str, world_size: int, rollout: str) -> None:
    report = proof(FAMILIES[family], checkpoints.MODELS[family], training, world_size, rollout, family)
    assert report.proven, failures(report)
    assert report.traffic is not None and report.traffic.over_bound == 1.0


@pytest.mark.parametrize("family", checkpoints.WITH_EXPERTS)
@pytest.mark.parametrize(
    ("training", "world_size", "rollout"),
    [(TRAINING, WORLD_SIZE, "tp=2,dp=2,ep=2"), ("tp=2,ep=2,etp=2,pp=2", 8, "tp=2,dp=2,ep=4"), ("etp=2", 2, "dp=2")],
)
def test_every_family_with_experts_is_proven(family: str, training: str, world_size: int, rollout: str) -> None:
    if not checkpoints.fits(family, training):
        assert family == "gpt_oss" and "etp=2" in training, "only experts with biases are never cut"
        return
    report = proof(FAMILIES[family], checkpoints.MODELS[family], training, world_size, rollout, family)
    assert report.proven, failures(report)


def with_rule(family: Family, old: str, *new: Rule) -> Family:
    """``family`` with the rules whose name ends in ``old`` replaced by ``new``."""
    kept = tuple(rule for rule in family.weights if not rule.name.endswith(old))
    assert len(kept) < len(family.weights)
    return replace(family, weights=(*kept, *new))


def rule_of(family: Family, end: str) -> Rule:
    return next(rule for rule in family.weights if rule.name.endswith(end))


def no_first_projection(family: Family) -> Family:
    return with_rule(family, "mlp.experts.local_experts.{e}.linear_fc1.weight")


def gate_twice(family: Family) -> Family:
    rule = rule_of(family, "linear_fc1.weight")
    return with_rule(family, rule.name, replace(rule, hf=(rule.hf[0], rule.hf[0])))


def wrong_axis(family: Family) -> Family:
    rule = rule_of(family, "linear_proj.weight")
    return with_rule(family, rule.name, replace(rule, dim=0))


def first_head_for_all(model: ModelConfig, sizes: Sizes, num_shards: int, index: int) -> ShardRanges:
    """As ``grouped_qkv``, but every shard has the key/value heads of shard 0."""
    right = rule_of(FAMILIES["mixtral"], "linear_qkv.weight").layout
    mine, first = right(model, sizes, num_shards, index), right(model, sizes, num_shards, 0)
    ranges = [a if a.source == 0 else b for a, b in zip(mine.ranges, first.ranges, strict=True)]
    return ShardRanges.of([Range(r.source, r.begin, r.end) for r in ranges])


def wrong_kv_head(family: Family) -> Family:
    rule = rule_of(family, "linear_qkv.weight")
    return with_rule(family, rule.name, replace(rule, layout=first_head_for_all))


def two_rules(family: Family) -> Family:
    return replace(family, weights=(*family.weights, rule_of(family, "linear_proj.weight")))


def unknown_rule(family: Family) -> Family:
    extra = Rule("decoder.layers.{l}.extra.weight", (hf("model.layers.{l}.extra.weight", "hidden"),))
    return replace(family, weights=(*family.weights, extra))


@pytest.mark.parametrize(
    ("mutate", "said"),
    [
        (no_first_projection, "is in the modules and no rule speaks of it"),
        (no_first_projection, "block_sparse_moe.experts.routed_experts.w13_weight (expert 0): nothing is sent to it"),
        (gate_twice, "block_sparse_moe.experts.3.w1.weight is consumed 2 times"),
        (wrong_axis, "expected shape (24, 64) and found (48, 32)"),
        (wrong_kv_head, "self_attn.k_proj.weight: 768 of its 1536 elements are held"),
        (two_rules, "decoder.layers.0.self_attention.linear_proj.weight has 2 rules"),
        (unknown_rule, "decoder.layers.1.extra.weight is in the table and not in the modules"),
    ],
)
def test_a_wrong_table_is_named(mutate: Callable[[Family], Family], said: str) -> None:
    report = proof(mutate(FAMILIES["mixtral"]), MIXTRAL, TRAINING, WORLD_SIZE, ROLLOUT, "mixtral")
    assert not report.proven
    assert said in failures(report)
    assert not report.as_json()["proven"]


def test_modules_that_lost_a_tensor_are_named() -> None:
    """A layer of rank 5, an expert of rank 2."""
    table = Table(FAMILIES["mixtral"], MIXTRAL, parse_layout(TRAINING), WORLD_SIZE)

    def damaged(rank: int) -> MegatronRank:
        whole = modules("mixtral", TRAINING, WORLD_SIZE, rank)
        lost = {2: "layers.0.mlp.experts.local_experts.1.", 5: "layers.1."}.get(rank, "nothing")
        return replace(whole, chunks=[{k: v for k, v in chunk.items() if lost not in k} for chunk in whole.chunks])

    said = failures(verify(table, None, damaged))
    assert "rank 2: chunk 0: decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight is in the table" in said
    assert "rank 5: chunk 0: decoder.layers.1.input_layernorm.weight is in the table and not in the modules" in said
    assert "rank 3" not in said


def test_the_checkpoint_is_held_too(tmp_path: Path) -> None:
    """Of Llama's model but with query biases: one is asked for and one more is there."""
    checkpoints.write("qwen2", tmp_path)
    model = checkpoints.MODELS["llama"]
    table = Table(FAMILIES["llama"], model)
    with HfCheckpoint.open(tmp_path) as checkpoint:
        report = verify(table, None, lambda rank: modules("llama", "", 1, rank), checkpoint=checkpoint)
    assert "self_attn.q_proj.bias" in failures(report)
    assert "lm_head.weight of shape (101, 48) is missing" in failures(report)
    assert report.traffic is None and report.rollout is None


@pytest.mark.parametrize(
    ("regions", "problem"),  # of each region, (start, length) per dimension
    [
        ([((0, 4), (0, 6))], None),
        ([((0, 4), (3, 3)), ((0, 4), (0, 3))], None),
        ([((0, 2), (0, 3)), ((2, 2), (0, 3)), ((0, 2), (3, 3)), ((2, 2), (3, 3))], None),
        ([((0, 4), (0, 3))], "12 of its 24 elements are held"),
        ([((0, 4), (0, 4)), ((0, 4), (3, 3))], "some of its elements are held twice"),
        ([((0, 3), (0, 3)), ((2, 2), (0, 6))], "some of its elements are held twice"),
        ([((0, 4), (1, 6))], "a part reaches beyond its shape (4, 6)"),
        ([], "0 of its 24 elements are held"),
    ],
)
def test_exact_cover(regions: list, problem: str | None) -> None:
    slices = [TensorSlice(*map(tuple, zip(*spans, strict=True))) for spans in regions]
    assert cover_problem(slices, (4, 6)) == problem
