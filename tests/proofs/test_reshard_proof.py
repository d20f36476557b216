"""The proof of a plan sees every way in which rows can be wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from mcore_rl.config.parallel import parse_layout
from mcore_rl.config.rollout import parse_rollout_layout
from mcore_rl.families.registry import FAMILIES
from mcore_rl.proofs.reshard_proof import reshard_failures, traffic
from mcore_rl.weights.reshard import ReshardPlan, plan_reshard
from mcore_rl.weights.rollout_table import RolloutTable
from mcore_rl.weights.table import Table
from mcore_rl.weights.tensor_slice import TensorSlice
from tests.support import models


@pytest.fixture(scope="module")
def plan() -> ReshardPlan:
    table = Table(FAMILIES["mixtral"], models.moe(ffn_hidden_size=64), parse_layout("tp=2,pp=2,ep=2"), 8)
    return plan_reshard(table, RolloutTable(table.family, table.model, parse_rollout_layout("tp=4,dp=2")))


def rows_to(plan: ReshardPlan, name: str) -> np.ndarray:
    number = next(i for i, rule in enumerate(plan.rollout.rules) if rule.name.endswith(name))
    return np.flatnonzero(plan.target_ids.decode(plan.target)[0] == number)


def changed(plan: ReshardPlan, column: str, rows: np.ndarray, values: object) -> ReshardPlan:
    values_of = getattr(plan, column).copy()
    values_of[rows] = values
    return replace(plan, **{column: values_of})


def without(plan: ReshardPlan, rows: np.ndarray) -> ReshardPlan:
    kept = np.setdiff1d(np.arange(len(plan)), rows)
    return pick(plan, kept)


def pick(plan: ReshardPlan, rows: np.ndarray) -> ReshardPlan:
    names = ("source_rank", "source", "target_rank", "target", "geometry")
    return replace(plan, **{name: getattr(plan, name)[rows] for name in names})


def wrong_shard(plan: ReshardPlan) -> ReshardPlan:
    rows = rows_to(plan, "o_proj.weight")[:1]
    return changed(plan, "source_rank", rows, plan.source_rank[rows] ^ 1)  # its tensor peer


def wrong_stage(plan: ReshardPlan) -> ReshardPlan:
    rows = rows_to(plan, "o_proj.weight")[:1]
    return changed(plan, "source_rank", rows, (plan.source_rank[rows] + 4) % 8)


def wrong_expert_rank(plan: ReshardPlan) -> ReshardPlan:
    rows = rows_to(plan, "w2_weight")[:1]
    layout = plan.table.layout
    at = layout.coords(int(plan.source_rank[rows[0]]))
    other = next(r for r in range(8) if (layout.coords(r).ep, layout.coords(r).pp) == (1 - at.ep, at.pp))
    return changed(plan, "source_rank", rows, other)


def shifted_layer(plan: ReshardPlan) -> ReshardPlan:
    rows = rows_to(plan, "o_proj.weight")
    return changed(plan, "source", rows[:1], plan.source[rows[-1]])


def swapped_experts(plan: ReshardPlan) -> ReshardPlan:
    rows = rows_to(plan, "w13_weight")
    _, layer, expert = plan.target_ids.decode(plan.target[rows])
    one, other = (rows[(layer == 0) & (expert == e)][0] for e in (0, 1))
    return changed(plan, "target", np.array([one, other]), plan.target[[other, one]])


def dropped_expert(plan: ReshardPlan) -> ReshardPlan:
    rows = rows_to(plan, "w2_weight")
    _, layer, expert = plan.target_ids.decode(plan.target[rows])
    return without(plan, rows[(layer == 3) & (expert == 2) & (plan.target_rank[rows] == 5)])


def missing_shard(plan: ReshardPlan) -> ReshardPlan:
    rows = rows_to(plan, "embed_tokens.weight")
    return without(plan, rows[:1])


def sent_twice(plan: ReshardPlan) -> ReshardPlan:
    return pick(plan, np.append(np.arange(len(plan)), rows_to(plan, "qkv_proj.weight")[:1]))


def to_another_rank(plan: ReshardPlan) -> ReshardPlan:
    rows = rows_to(plan, "model.norm.weight")
    return changed(plan, "target_rank", rows[:1], plan.target_rank[rows[1]])


def all_from_one(plan: ReshardPlan) -> ReshardPlan:
    rows = rows_to(plan, "input_layernorm.weight")
    first = plan.source_ids.decode(plan.source[rows])[1] < 2
    return changed(plan, "source_rank", rows[first], plan.source_rank[rows[0]])


def with_parts(plan: ReshardPlan, name: str, change: Callable[[list[tuple]], list[tuple]]) -> ReshardPlan:
    number = int(plan.geometry[rows_to(plan, name)[0]])
    geometries = list(plan.geometries)
    geometries[number] = replace(geometries[number], parts=tuple(change(list(geometries[number].parts))))
    return replace(plan, geometries=tuple(geometries))


def swapped_gate_and_up(plan: ReshardPlan) -> ReshardPlan:
    return with_parts(plan, "w13_weight", lambda parts: [(parts[1][0], parts[0][1]), (parts[0][0], parts[1][1])])


def wrong_kv_head(plan: ReshardPlan) -> ReshardPlan:
    def change(parts: list[tuple]) -> list[tuple]:
        (source, target), rest = parts[-1], parts[:-1]
        begin, length = source.start[0], source.shape[0]
        return [*rest, (TensorSlice((begin - length, *source.start[1:]), source.shape), target)]

    return with_parts(plan, "qkv_proj.weight", change)


def beyond_the_source(plan: ReshardPlan) -> ReshardPlan:
    return with_parts(
        plan, "o_proj.weight", lambda parts: [(TensorSlice((0, 0), (10**4, parts[0][0].shape[1])), parts[0][1])]
    )


def shorter_part(plan: ReshardPlan) -> ReshardPlan:
    def change(parts: list[tuple]) -> list[tuple]:
        return [
            tuple(TensorSlice(region.start, (region.shape[0] - 1, *region.shape[1:])) for region in parts[0]),
            *parts[1:],
        ]

    return with_parts(plan, "o_proj.weight", change)


def test_the_plan_itself_is_proven(plan: ReshardPlan) -> None:
    assert reshard_failures(plan) == []
    assert traffic(plan).over_bound == 1.0


@pytest.mark.parametrize(
    ("mutate", "said"),
    [
        (wrong_shard, "o_proj.weight: a source shard that its rank does not hold"),
        (wrong_stage, "a source of another pipeline stage"),
        (wrong_expert_rank, "an expert that the source does not hold"),
        (shifted_layer, "ends in different layers or experts"),
        (swapped_experts, "ends in different layers or experts"),
        (
            dropped_expert,
            "rollout rank 5 model.layers.3.block_sparse_moe.experts.routed_experts.w2_weight (expert 2): ",
        ),
        (missing_shard, "model.embed_tokens.weight: nothing is sent to it"),
        (sent_twice, "qkv_proj.weight: an element of it is written twice"),
        (to_another_rank, "model.norm.weight: an element of it is written twice"),
        (all_from_one, "of training ranks that hold the same tensors"),
        (swapped_gate_and_up, "is not what"),
        (wrong_kv_head, "is not what"),
        (beyond_the_source, "is not what"),
        (shorter_part, "elements are written"),
    ],
)
def test_the_proof_sees(plan: ReshardPlan, mutate: Callable[[ReshardPlan], ReshardPlan], said: str) -> None:
    assert said in "\n".join(reshard_failures(mutate(plan)))
