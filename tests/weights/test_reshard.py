"""The copy plan against hand-written slicing, its evenness, its order, and its two ends."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest

from mcore_rl.config.model import ModelConfig
from mcore_rl.config.parallel import parse_layout
from mcore_rl.config.rollout import parse_rollout_layout
from mcore_rl.families.registry import FAMILIES
from mcore_rl.proofs.reshard_proof import reshard_failures, traffic
from mcore_rl.proofs.tracer import Tracer
from mcore_rl.weights.reshard import ReshardPlan, plan_reshard
from mcore_rl.weights.rollout_table import RolloutTable
from mcore_rl.weights.senders import deal
from mcore_rl.weights.table import Table
from mcore_rl.weights.tensor_slice import TensorSlice
from tests.support import direct_rollout, models

# 8 query heads to 4 key/value heads, a vocabulary that divides by nothing, sizes that differ from each other.
SIZES = dict(num_attention_heads=8, num_query_groups=4, hidden_size=40, head_dim=6, num_layers=4)
LLAMA = models.dense(**SIZES)
TIED = models.dense(**SIZES, tie_output=True, qkv_bias=True)
MIXTRAL = models.moe(**SIZES, ffn_hidden_size=64)


def plan(family: str, model: ModelConfig, training: str, world_size: int, rollout: str) -> ReshardPlan:
    table = Table(FAMILIES[family], model, parse_layout(training), world_size)
    return plan_reshard(table, RolloutTable(table.family, model, parse_rollout_layout(rollout)))


DENSE = [
    ("", 1, ""),
    ("tp=2,pp=2", 4, "tp=4"),
    ("tp=4,pp=2,vpp=2", 16, "tp=2,dp=3"),
    ("tp=2,cp=2,pp=4", 16, "tp=8,dp=2"),  # more rollout ranks than key/value heads
    ("pp=4", 8, "tp=8"),
    ("tp=8,pp=2", 16, "tp=2"),  # more training ranks than key/value heads, which then hold parts of heads
    ("tp=8", 8, "tp=8,dp=2"),
]


@pytest.mark.parametrize(("training", "world_size", "rollout"), DENSE)
@pytest.mark.parametrize(("family", "model"), [("llama", LLAMA), ("qwen2", TIED)])
def test_every_element_lands_where_slicing_by_hand_puts_it(
    family: str, model: ModelConfig, training: str, world_size: int, rollout: str
) -> None:
    made = plan(family, model, training, world_size, rollout)
    tracer = Tracer(made)

    def direct(rank: int) -> dict[str, np.ndarray]:
        return direct_rollout.llama_like(
            tracer.checkpoint.read, model, made.rollout.layout, rank, bias=family == "qwen2"
        )

    assert list(tracer.failures(range(made.rollout.layout.world_size), direct)) == []
    assert reshard_failures(made) == []


@pytest.mark.parametrize(
    ("training", "world_size", "rollout"),
    [
        ("", 1, "tp=4"),
        ("tp=4,pp=2,ep=4", 8, "tp=4"),  # dense ranks and expert ranks cross
        ("tp=2,pp=2,ep=2,etp=2", 16, "tp=2,dp=2"),
        ("tp=4,ep=2,etp=2", 8, "tp=2,dp=3,ep=2"),
        ("tp=1,pp=2,vpp=2,ep=4", 8, "tp=2,dp=2,ep=4"),
        ("etp=4,tp=2", 8, "tp=1,dp=4,ep=4"),
    ],
)
def test_every_expert_lands_in_its_slot(training: str, world_size: int, rollout: str) -> None:
    made = plan("mixtral", MIXTRAL, training, world_size, rollout)
    tracer = Tracer(made)

    def direct(rank: int) -> dict[str, np.ndarray]:
        return direct_rollout.llama_like(tracer.checkpoint.read, MIXTRAL, made.rollout.layout, rank, mixtral=True)

    assert list(tracer.failures(range(made.rollout.layout.world_size), direct)) == []
    assert reshard_failures(made) == []


def test_no_source_sends_more_than_its_share() -> None:
    """Four pipeline stages, four data-parallel copies, 16 rollout ranks: counted here from the copies themselves."""
    made = plan("mixtral", MIXTRAL, "tp=2,pp=4,ep=2", 32, "tp=4,dp=4")
    layout, sent = made.table.layout, defaultdict[tuple[str, ...] | int, int](int)
    largest = 0
    by_shard: dict[tuple[object, ...], list[int]] = defaultdict(lambda: [0] * layout.world_size)
    for rank in range(layout.world_size):
        at = layout.coords(rank)
        for _, copies in made.copies_from(rank):
            for copy in copies:
                size = 2 * copy.source_slice.num_elements
                largest, sent[rank] = max(largest, size), sent[rank] + size
                shard = ("expert", at.pp, at.ep) if "local_experts" in copy.source else ("dense", at.pp)
                by_shard[shard][rank] += size
    assert [sent[rank] for rank in range(layout.world_size)] == made.bytes_sent.tolist()
    for stage in range(4):
        ranks = [rank for rank in range(layout.world_size) if layout.coords(rank).pp == stage]
        totals = [sent[rank] for rank in ranks]
        assert max(totals) - min(totals) <= largest, f"stage {stage}: {totals}"
    assert traffic(made).uneven <= largest


def test_uneven_counts_differ_by_one_tensor_at_most() -> None:
    """Three targets from two copies of everything: one copy sends one more of each kind, not all of the more."""
    made = plan("llama", LLAMA, "tp=2", 4, "tp=2,dp=3")
    least, most = made.bytes_sent.min(), made.bytes_sent.max()
    assert 0 < most - least <= int(made.geometry_bytes.max())


def test_the_tied_output_projection_is_one_more_source_of_the_embedding() -> None:
    made = plan("qwen2", TIED, "pp=2", 2, "tp=1,dp=4")
    sources = {
        (copy.source_rank, copy.source)
        for rank in range(4)
        for _, copies in made.copies_to(rank)
        for copy in copies
        if copy.target == "model.embed_tokens.weight"
    }
    assert sources == {(0, "embedding.word_embeddings.weight"), (1, "output_layer.weight")}


def test_bytes_are_the_least_there_are() -> None:
    made = plan("llama", LLAMA, "tp=2,pp=2", 8, "tp=4,dp=2")
    vocab, layer = 101 * 40, 48 * 40 + 2 * 24 * 40 + 40 * 48 + 3 * 96 * 40 + 2 * 40
    # Whole norms on all 8 ranks, one of each shard of the rest in each of the 2 replicas; 4 key/value heads over tp=4.
    norms = 2 * 40 * 4 + 40
    by_hand = 2 * (2 * (2 * vocab + 4 * layer + 40 - norms) + 8 * norms)
    assert traffic(made).total == traffic(made).bound == by_hand
    assert traffic(made).over_bound == 1.0


def test_both_ends_see_the_same_copies_in_the_same_order() -> None:
    made = plan("mixtral", MIXTRAL, "tp=2,pp=2,ep=2", 8, "tp=2,dp=2")
    sent = {rank: dict(made.copies_from(rank)) for rank in range(8)}
    for target in range(4):
        received = list(made.copies_to(target))
        assert [place for place, _ in received] == [-1, 0, 1, 2, 3, 4]  # embedding, layers, norm and output
        for place, copies in received:
            for source in range(8):
                theirs = [copy for copy in sent[source].get(place, []) if copy.target_rank == target]
                assert theirs == [copy for copy in copies if copy.source_rank == source]


def test_the_plan_is_the_same_each_time() -> None:
    first, again = (plan("mixtral", MIXTRAL, "tp=2,ep=2", 4, "tp=4,dp=2") for _ in range(2))
    for name in ("source_rank", "source", "target_rank", "target", "geometry"):
        assert np.array_equal(getattr(first, name), getattr(again, name))
    assert first.geometries == again.geometries


def test_gate_and_up_of_whole_experts_are_one_copy() -> None:
    made = plan("mixtral", MIXTRAL, "ep=4", 4, "tp=1,dp=4,ep=4")
    (copy,) = [copy for copy in dict(made.copies_to(3))[2] if copy.target.endswith("w13_weight")]
    assert (copy.source_rank, copy.source) == (3, "decoder.layers.2.mlp.experts.local_experts.0.linear_fc1.weight")
    assert (copy.slot, copy.target_slice, copy.source_slice) == (
        0,
        TensorSlice((0, 0), (128, 40)),
        TensorSlice((0, 0), (128, 40)),
    )


def test_float32_buffers_count_four_bytes() -> None:
    model = models.deepseek_v3()
    made = plan("deepseek_v3", replace(model), "tp=2,ep=4", 4, "tp=2,dp=2,ep=4")
    bias = [copy for _, copies in made.copies_to(0) for copy in copies if copy.target.endswith("correction_bias")]
    rows = np.flatnonzero(made.target_rank == 0)
    ids = made.target_ids.decode(made.target[rows])[0]
    number = next(i for i, rule in enumerate(made.rollout.rules) if rule.dtype == "float32")
    assert len(bias) == 2  # layers with experts
    assert set(made.geometry_bytes[made.geometry[rows[ids == number]]]) == {12 * 4}


def test_the_sets_of_a_rank_make_up_for_each_other() -> None:
    """Rank 0 shares some tensors with 1 and others with 2; who sent the first lot is not asked for the second."""
    members = [np.array([0, 1]), np.array([0, 2])]
    dealt = deal(np.array([0, 1, 0]), np.array([10, 10, 4]), members, np.zeros(3, dtype=np.int64))
    assert dealt.tolist() == [0, 2, 1]


def test_the_largest_are_dealt_first() -> None:
    made = plan("mixtral", MIXTRAL, "tp=2,pp=2,ep=2", 8, "tp=2,dp=2")
    sizes, places = made.geometry_bytes[made.geometry], made.target_ids.places(made.target)
    assert np.all(np.diff(places) >= 0)
    assert np.all(np.diff(sizes)[np.diff(places) == 0] <= 0)
