"""The groups that Megatron makes are those that the layout names, again and again in the same processes.

Four processes are started once.  They stand in a world of four, then the first three and then two of them in worlds of
their own, and in each world they take on one layout after another.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from mcore_rl.config.engine import Device
from mcore_rl.config.parallel import parse_layout
from mcore_rl.parallel.device import detect
from mcore_rl.parallel.groups import ProcessGroups, destroy_groups, init_groups, sum_over
from mcore_rl.parallel.launch import Rank
from mcore_rl.parallel.layout import Coords, Layout
from tests.support.forked import run_ranks

WORLDS = {
    4: (
        *("", "tp=4", "tp=2", "pp=2", "cp=2", "ep=2", "ep=4", "tp=2,pp=2", "tp=2,cp=2", "cp=2,ep=2", "pp=2,vpp=2,ep=2"),
        *("tp=2,ep=2", "tp=2,ep=2,etp=2", "tp=2,pp=2,ep=2"),
    ),
    3: ("", "tp=3", "pp=3", "cp=3", "ep=3"),
    2: ("", "tp=2", "pp=2", "cp=2", "ep=2", "tp=2,etp=2"),
}
CASES = [(world_size, layout) for world_size, layouts in WORLDS.items() for layout in layouts]

# A group's members: the ranks whose coordinates agree on these axes with those of the rank that asks.
SHARED: dict[str, tuple[str, ...]] = {
    "tp": ("cp", "dp", "pp"),
    "pp": ("tp", "cp", "dp"),
    "cp": ("tp", "dp", "pp"),
    "dp": ("tp", "cp", "pp"),
    "dp_cp": ("tp", "pp"),
    "experts": ("edp", "pp"),
    "moe_tokens": ("dp", "pp"),
}


@dataclass(frozen=True)
class Found:
    """What one rank saw of one layout.

    members: ranks of each group.  sums: of rank + 1 over each group.  own, tensor: random numbers of the default state
    and of Megatron's model-parallel one.
    """

    coords: Coords
    is_last_stage: bool
    members: dict[str, list[int]]
    sums: dict[str, float]
    own: float
    tensor: float
    gradient: list[float]
    destroyed: bool


def layout_of(world_size: int, text: str) -> Layout:
    return Layout.of(parse_layout(text), world_size)


def look(groups: ProcessGroups) -> Found:
    named = {name: getattr(groups, name) for name in SHARED}
    mine = torch.tensor([groups.rank + 1.0])
    sums = {}
    for name, group in named.items():
        total = mine.clone()
        dist.all_reduce(total, group=group)
        sums[name] = total.item()
    x = torch.tensor([groups.rank + 1.0, -2.0], requires_grad=True)
    total = sum_over(x, groups.dp_cp)
    ((groups.rank + 10) * total.square()).sum().backward()
    assert x.grad is not None
    own = torch.rand(()).item()
    with get_cuda_rng_tracker().fork():
        tensor = torch.rand(()).item()
    destroy_groups()
    return Found(
        coords=groups.coords,
        is_last_stage=groups.is_last_stage,
        members={name: dist.get_process_group_ranks(group) for name, group in named.items()},
        sums=sums,
        own=own,
        tensor=tensor,
        gradient=x.grad.tolist(),
        destroyed=not parallel_state.model_parallel_is_initialized(),
    )


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def take_on_layouts(rank: Rank) -> tuple[dict[tuple[int, str], Found], dict[int, list[int]]]:
    """What this rank saw of each case, and in each world its threads after each of three rounds of all layouts."""
    platform, seen_by_layout, threads = detect(Device.cpu), {}, {}
    for world_size, layouts in WORLDS.items():
        if rank.rank >= world_size:
            continue
        replace(rank, world_size=world_size).init_process_group(platform)
        threads[world_size] = []
        for _ in range(3):
            for text in layouts:
                groups = init_groups(layout_of(world_size, text), platform, torch.device("cpu"), seed=3)
                seen = look(groups)
                assert seen_by_layout.setdefault((world_size, text), seen) == seen, "another round, other results"
            threads[world_size].append(num_threads())
        dist.destroy_process_group()
    return seen_by_layout, threads


@pytest.fixture(scope="module")
def ranks(processes: None) -> list[tuple[dict[tuple[int, str], Found], dict[int, list[int]]]]:
    return run_ranks(take_on_layouts, max(WORLDS), threads_per_rank=1, timeout_s=300)


@pytest.fixture
def of_ranks(ranks: list, case: tuple[int, str]) -> list[Found]:
    """Of every rank of the case's world."""
    return [seen[case] for seen, _ in ranks[: case[0]]]


def expected(layout: Layout, rank: int, name: str) -> list[int]:
    """The members of a group, from the coordinates alone."""
    where = [layout.coords(other) for other in range(layout.world_size)]
    mine = where[rank]
    return [
        other
        for other, coords in enumerate(where)
        if all(getattr(coords, axis) == getattr(mine, axis) for axis in SHARED[name])
    ]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_groups_are_those_of_the_layout(case: tuple[int, str], of_ranks: list[Found]) -> None:
    layout = layout_of(*case)
    for rank, seen in enumerate(of_ranks):
        assert seen.members == {name: expected(layout, rank, name) for name in SHARED}
        for axis in ("tp", "pp", "cp", "dp", "dp_cp"):
            assert tuple(seen.members[axis]) == layout.group(axis, rank)  # type: ignore[arg-type]
        for axis in ("tp", "pp", "cp", "dp"):
            assert len(seen.members[axis]) == getattr(layout, axis)
        assert len(seen.members["dp_cp"]) == layout.dp * layout.cp
        assert len(seen.members["experts"]) == layout.ep * layout.etp
        assert len(seen.members["moe_tokens"]) == layout.tp * layout.cp


@pytest.mark.parametrize("case", CASES, ids=str)
def test_groups_communicate_among_their_members(case: tuple[int, str], of_ranks: list[Found]) -> None:
    for seen in of_ranks:
        assert seen.sums == {name: sum(other + 1 for other in members) for name, members in seen.members.items()}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_rank_knows_where_it_stands(case: tuple[int, str], of_ranks: list[Found]) -> None:
    layout = layout_of(*case)
    assert [seen.coords for seen in of_ranks] == [layout.coords(rank) for rank in range(layout.world_size)]
    assert [seen.is_last_stage for seen in of_ranks] == [
        max(layout.group("pp", rank)) == rank for rank in range(layout.world_size)
    ]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_gradient_of_a_sum_counts_every_member_that_uses_it(case: tuple[int, str], of_ranks: list[Found]) -> None:
    """Rank r's loss is (r + 10) * |s|^2, s the sum of (q + 1, -2) over members q: the gradient is 2 s sum(r + 10)."""
    for seen in of_ranks:
        members = seen.members["dp_cp"]
        weight = sum(rank + 10 for rank in members)
        total = [sum(rank + 1 for rank in members), -2 * len(members)]
        assert seen.gradient == [2 * weight * component for component in total]  # integers: exact in float32


@pytest.mark.parametrize("case", CASES, ids=str)
def test_random_states_differ_over_tensor_ranks_alone(case: tuple[int, str], of_ranks: list[Found]) -> None:
    """The default state is the seed's on every rank; the model-parallel one goes with the tensor coordinate."""
    seeded = torch.rand((), generator=torch.Generator().manual_seed(3)).item()
    assert {seen.own for seen in of_ranks} == {seeded}
    by_tensor_rank: dict[int, set[float]] = {}
    for seen in of_ranks:
        by_tensor_rank.setdefault(seen.coords.tp, set()).add(seen.tensor)
    assert all(len(numbers) == 1 for numbers in by_tensor_rank.values())
    assert len(set.union(*by_tensor_rank.values())) == layout_of(*case).tp


def test_groups_are_forgotten_when_destroyed(ranks: list) -> None:
    assert all(seen.destroyed for of_rank, _ in ranks for seen in of_rank.values())


@pytest.mark.parametrize("world_size", WORLDS)
def test_threads_do_not_grow_with_the_layouts_taken_on(world_size: int, ranks: list) -> None:
    for _, threads in ranks[:world_size]:
        first, *later = threads[world_size]
        assert later == [first] * len(later)


def test_a_sum_over_one_rank_is_what_it_was_given() -> None:
    class OfOne:
        def size(self) -> int:
            return 1

    x = torch.ones(2, requires_grad=True)
    assert sum_over(x, OfOne()) is x  # type: ignore[arg-type]
