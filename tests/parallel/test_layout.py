"""Layouts: ranks and groups against Megatron's own, placements, and what is refused with which remedy."""

from __future__ import annotations

import itertools
from dataclasses import replace
from math import log2

import pytest
import torch.distributed as dist
from megatron.core import parallel_state
from torch.testing._internal.distributed.fake_pg import FakeStore

from mcore_rl.config.model import ModelConfig, MoeConfig
from mcore_rl.config.parallel import ParallelConfig, parse_layout
from mcore_rl.ground.errors import ConfigError
from mcore_rl.parallel.layout import (
    Layout,
    balanced_layers,
    describe_placement,
    layout_text,
    layout_violations,
    nearest_layouts,
    place_layers,
)
from tests.support import models

MIXTRAL = ModelConfig(
    num_layers=56,
    hidden_size=6144,
    ffn_hidden_size=16384,
    num_attention_heads=48,
    num_query_groups=8,
    head_dim=128,
    vocab_size=32768,
    max_position_embeddings=65536,
    moe=MoeConfig(num_experts=8, top_k=2, ffn_hidden_size=16384),
)
DENSE = ModelConfig(
    num_layers=13,
    hidden_size=64,
    ffn_hidden_size=96,
    num_attention_heads=8,
    num_query_groups=4,
    head_dim=8,
    vocab_size=100,
    max_position_embeddings=128,
)
MIXED = replace(  # dense layers beside layers with experts, one of them shared
    DENSE,
    ffn_hidden_size=80,
    num_attention_heads=24,
    num_query_groups=24,
    moe=MoeConfig(num_experts=8, top_k=2, ffn_hidden_size=24, dense_layers=[0], shared_ffn_hidden_size=60),
)
FEW = replace(DENSE, num_query_groups=1, head_dim=1)

MEGATRON_GROUPS = {
    "tp": parallel_state.get_tensor_model_parallel_group,
    "cp": parallel_state.get_context_parallel_group,
    "dp": parallel_state.get_data_parallel_group,
    "pp": parallel_state.get_pipeline_model_parallel_group,
    "ep": parallel_state.get_expert_model_parallel_group,
    "etp": parallel_state.get_expert_tensor_parallel_group,
    "edp": parallel_state.get_expert_data_parallel_group,
    "dp_cp": lambda: parallel_state.get_data_parallel_group(with_context_parallel=True),
}


def megatron_groups(parallel: ParallelConfig, rank: int, world_size: int) -> dict[str, tuple[int, ...]]:
    """The groups that Megatron really creates for ``rank``, without any communication."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tp,
            pipeline_model_parallel_size=parallel.pp,
            virtual_pipeline_model_parallel_size=parallel.vpp if parallel.vpp > 1 else None,
            context_parallel_size=parallel.cp,
            expert_model_parallel_size=parallel.ep,
            expert_tensor_parallel_size=parallel.etp,
            create_gloo_process_groups=False,
        )
        return {axis: tuple(dist.get_process_group_ranks(group())) for axis, group in MEGATRON_GROUPS.items()}
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("text", "world_size"),
    [
        ("tp=1", 3),
        ("tp=2,pp=2,vpp=2,cp=2,ep=2,etp=1", 16),
        ("tp=2,cp=2,ep=4,etp=2", 16),
        ("tp=1,pp=3,ep=2,etp=2", 12),
        ("tp=4,pp=2,ep=2,etp=1", 8),
        ("cp=3,ep=6,pp=2", 24),
    ],
)
def test_groups_are_those_megatron_creates(text: str, world_size: int) -> None:
    parallel = parse_layout(text)
    layout = Layout.of(parallel, world_size)
    for rank in range(world_size):
        ours = {axis: layout.group(axis, rank) for axis in MEGATRON_GROUPS}
        assert ours == megatron_groups(parallel, rank, world_size)
        coords = layout.coords(rank)
        for axis in ("tp", "cp", "dp", "pp", "ep", "etp", "edp"):  # a coordinate is the position in the group
            assert ours[axis][getattr(coords, axis)] == rank
        assert layout.rank_of(tp=coords.tp, cp=coords.cp, dp=coords.dp, pp=coords.pp) == rank


def test_coords_print_the_way_messages_name_a_rank() -> None:
    layout = Layout.of(parse_layout("tp=2,pp=2,ep=2"), 8)
    assert (layout.dp, layout.edp) == (2, 2)
    assert str(layout.coords(6)) == "dp1 pp1 tp0 cp0 ep0"
    assert str(layout.coords(5)) == "dp0 pp1 tp1 cp0 ep1"


def test_a_layout_that_does_not_divide_the_world_is_refused_for_dense_and_expert_axes() -> None:
    with pytest.raises(ConfigError) as refused:
        Layout.of(parse_layout("tp=2,pp=3,ep=4"), 8)
    assert [violation.key for violation in refused.value.violations] == ["world_size", "world_size"]
    assert "tp=2 * pp=3 * cp=1 = 6" in str(refused.value)
    assert "etp=1 * ep=4 * pp=3 = 12" in str(refused.value)
    with pytest.raises(ConfigError, match=r"parallel\.cp=0: must be positive"):
        Layout.of(ParallelConfig(cp=0), 8)


def test_layers_are_placed_evenly_in_the_order_of_the_forward_pass() -> None:
    assert place_layers(8, parse_layout("pp=2,vpp=2")) == ((0, 1), (2, 3), (4, 5), (6, 7))


def test_every_layer_is_placed_once_whatever_the_counts() -> None:
    for num_layers, pp, vpp in itertools.product(range(4, 20), (2, 3), (1, 2)):
        if pp * vpp > num_layers:
            continue
        counts = balanced_layers(num_layers, pp * vpp)
        assert counts[-1] == min(counts)  # the chunk with the output projection is never the longest
        placement = place_layers(num_layers, ParallelConfig(pp=pp, vpp=vpp, pipeline_layers=counts))
        assert [len(chunk) for chunk in placement] == counts
        assert list(itertools.chain(*placement)) == list(range(num_layers))


@pytest.mark.parametrize(
    ("pipeline_layers", "problem"),
    [
        (None, "13 layers do not divide over pp=4 * vpp=1 = 4 chunks"),
        ([5, 4, 4], "has 3 entries for pp=4 * vpp=1 = 4 chunks"),
        ([5, 4, 4, 0], "has a chunk without a layer"),
        ([4, 4, 3, 3], "adds up to 14 of 13 layers"),
    ],
)
def test_a_placement_that_would_drop_layers_is_refused(pipeline_layers: list[int] | None, problem: str) -> None:
    with pytest.raises(ConfigError) as refused:
        place_layers(13, ParallelConfig(pp=4, pipeline_layers=pipeline_layers))
    assert problem in str(refused.value)
    assert "Write parallel.pipeline_layers=[4,3,3,3]" in str(refused.value)


def test_the_placement_is_printed_by_stage() -> None:
    table = describe_placement(7, ParallelConfig(pp=2, vpp=2, pipeline_layers=[1, 2, 2, 2]))
    assert table.splitlines() == [
        "7 layers over pp=2, vpp=2",
        "stage  chunk  layers",
        "    0      0  embedding, 0  (1)",
        "    0      1  3-4  (2)",
        "    1      0  1-2  (2)",
        "    1      1  5-6, output  (2)",
    ]


def keys(model: ModelConfig, text: str, world_size: int) -> list[str]:
    return [violation.key for violation in layout_violations(model, parse_layout(text), world_size)]


def test_layouts_that_fit_have_no_violation() -> None:
    assert keys(MIXTRAL, "tp=8,pp=4,vpp=2,cp=2,ep=8,etp=2", 128) == []
    assert keys(DENSE, "tp=4,cp=2", 8) == []
    assert keys(DENSE, "tp=8", 8) == []  # two ranks for each of 4 key/value heads
    assert keys(MIXTRAL, "tp=16,ep=8", 16) == []
    assert keys(MIXED, "tp=4,ep=2,etp=2", 4) == []
    assert keys(replace(MIXED, ffn_hidden_size=81), "tp=4,etp=1", 4) == ["parallel.tp"]
    assert layout_violations(DENSE, ParallelConfig(pp=4, pipeline_layers=[3, 4, 3, 3]), 8) == []


@pytest.mark.parametrize(
    ("model", "text", "world_size", "expected", "remedy"),
    [
        (DENSE, "tp=3", 3, "parallel.tp", "Write parallel.tp=2, 4 or 8"),  # heads and groups; 96 columns divide by 3
        (MIXTRAL, "tp=12", 12, "parallel.tp", "Write parallel.tp=4, 8 or 16"),  # 48 heads, and not 8 key/value heads
        (FEW, "tp=8", 8, "parallel.tp", "Write parallel.tp=1 or 2"),  # 10 rows of a fused projection
        (DENSE, "vpp=13", 1, "parallel.vpp", "Write parallel.vpp=1, or parallel.pp=2 or more"),
        (DENSE, "pp=14", 14, "parallel.pp", "Make pp * vpp at most 13"),
        (DENSE, "ep=2", 2, "parallel.ep", "Write parallel.ep=1"),
        (DENSE, "etp=2", 2, "parallel.etp", "Write parallel.etp=1"),
        (DENSE, "cp=128", 128, "parallel.cp", "Write parallel.cp=64 or less"),
        (MIXTRAL, "ep=16", 16, "parallel.ep", "Write parallel.ep=2, 4 or 8"),
        (MIXTRAL, "etp=3", 3, "parallel.etp", "Write parallel.etp=2, 4 or 8"),
        (models.gpt_oss(), "etp=2", 2, "parallel.etp", "Write parallel.etp=1"),
        (MIXTRAL, "pp=3", 3, "parallel.pp", "Write parallel.pipeline_layers=[19,19,18]"),
        (MIXED, "tp=3,etp=1", 3, "parallel.tp", "Write parallel.tp=1, 2 or 4"),  # the dense layers' 80 columns
        (MIXED, "tp=8,etp=1", 8, "parallel.tp", "Write parallel.tp=1, 2 or 4"),  # the shared expert's 60
        (MIXTRAL, "tp=0", 3, "parallel.tp", "Write 1 or more"),
    ],
)
def test_each_misfit_is_named_with_its_remedy(
    model: ModelConfig, text: str, world_size: int, expected: str, remedy: str
) -> None:
    parallel = ParallelConfig(tp=0) if text == "tp=0" else parse_layout(text)
    violations = layout_violations(model, parallel, world_size)
    assert {violation.key for violation in violations} == {expected}
    assert all(violation.remedy.startswith(remedy) for violation in violations)


def test_all_violations_come_at_once_and_the_last_names_layouts_that_fit() -> None:
    violations = layout_violations(MIXTRAL, parse_layout("tp=12,pp=3,cp=2,ep=3,etp=3"), 64)
    assert [violation.key for violation in violations] == [
        "world_size",
        "world_size",
        "parallel.tp",  # 48 heads divide by 12; 8 key/value heads do not, nor are there 12 for each
        "parallel.ep",
        "parallel.etp",
        "parallel.pp",
    ]
    assert ["Nearest layouts" in violation.remedy for violation in violations] == [False] * 5 + [True]
    nearest = nearest_layouts(MIXTRAL, parse_layout("tp=12,pp=3,cp=2,ep=3,etp=3"), 64)
    assert f"fit 64 processes: {layout_text(nearest[0])}; {layout_text(nearest[1])}" in violations[-1].remedy


def brute_force_distances(model: ModelConfig, wanted: ParallelConfig, world_size: int, most: int) -> list[float]:
    """Distances of every layout with axes up to ``most``, by trying them all against ``layout_violations``."""
    distances = []
    for sizes in itertools.product(range(1, most + 1), repeat=6):
        layout = ParallelConfig(**dict(zip(("tp", "pp", "vpp", "cp", "ep", "etp"), sizes, strict=True)))
        num_chunks = layout.pp * layout.vpp
        uneven = model.num_layers % num_chunks > 0
        if num_chunks <= model.num_layers and uneven:
            layout.pipeline_layers = balanced_layers(model.num_layers, num_chunks)
        if not layout_violations(model, layout, world_size):
            distances.append(distance(wanted, layout) + uneven)
    return sorted(distances)


def distance(wanted: ParallelConfig, layout: ParallelConfig) -> float:
    pairs = [(getattr(wanted, axis), getattr(layout, axis)) for axis in ("tp", "pp", "vpp", "cp", "ep", "etp")]
    return sum(abs(log2(size / aim)) for aim, size in pairs)


@pytest.mark.parametrize("text", ["tp=3,pp=2,vpp=2,ep=2", "tp=4,pp=4,cp=4,ep=3,etp=3"])
def test_the_nearest_layouts_are_the_nearest_of_all(text: str) -> None:
    model = ModelConfig(**{**vars(MIXTRAL), "num_layers": 4, "max_position_embeddings": 8})
    wanted = parse_layout(text)
    nearest = nearest_layouts(model, wanted, 4)
    assert all(not layout_violations(model, layout, 4) for layout in nearest)
    ours = [distance(wanted, layout) + (layout.pipeline_layers is not None) for layout in nearest]
    assert ours == pytest.approx(brute_force_distances(model, wanted, 4, most=4)[:3])


def test_a_users_own_placement_is_kept_in_the_layouts_offered() -> None:
    wanted = ParallelConfig(tp=3, pp=4, pipeline_layers=[1, 4, 4, 4])
    offered = nearest_layouts(DENSE, wanted, 8)
    assert (offered[0].pp, offered[0].pipeline_layers) == (4, [1, 4, 4, 4])
    assert layout_text(offered[0]).endswith("with pipeline_layers=[1,4,4,4]")
