"""The plan of who gives what: an exact cover of every tensor under any layout, from ranks that hold it, evenly."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
import torch

from mcore_rl.checkpoints.export import owned_parts
from mcore_rl.families.rules import Range, Rule, ShardRanges
from mcore_rl.ground.errors import WeightMapError
from mcore_rl.weights.views import view_of
from tests.support import checkpoints

LAYOUTS = (("", 1), ("tp=2", 4), ("pp=2,vpp=2", 4), ("cp=2", 4), ("tp=2,pp=2", 8), ("", 3))
EXPERT_LAYOUTS = (("ep=2", 4), ("tp=2,ep=2,etp=1", 4), ("etp=2", 2), ("tp=2,ep=2,etp=2,pp=2", 16), ("cp=2,ep=4", 8))


def _cases() -> list[tuple[str, str, int]]:
    cases = []
    for name in checkpoints.MODELS:
        layouts = LAYOUTS + (EXPERT_LAYOUTS if name in checkpoints.WITH_EXPERTS else ())
        cases += [(name, layout, world_size) for layout, world_size in layouts]
    return cases


@pytest.mark.parametrize(("name", "layout", "world_size"), _cases())
@pytest.mark.parametrize("prefer", [None, 0])
def test_every_element_is_given_once_by_a_rank_that_holds_it(
    name: str, layout: str, world_size: int, prefer: int | None
) -> None:
    table = checkpoints.table(name, layout, world_size)
    parts = owned_parts(table, prefer)
    assert list(parts) == list(table.hf_tensors)
    holds = [{(local.chunk, local.name): local for local in table.tensors(rank)} for rank in range(world_size)]
    for hf_name, held in parts.items():
        count = torch.zeros(table.hf_tensors[hf_name].shape, dtype=torch.int32)
        for part in held:
            view_of(count, part.region).add_(1)
            local = holds[part.owner][part.local.chunk, part.local.name]
            assert set(part.pieces) <= set(table.pieces(local))
            assert sum(prod(piece.shape) for piece in part.pieces) == prod(part.region.shape)
        assert bool((count == 1).all()), hf_name


def test_what_the_preferred_rank_holds_comes_from_it() -> None:
    table = checkpoints.table("llama", "tp=2", 4)
    for rank in range(4):
        mine = {(local.name, local.index) for local in table.tensors(rank)}
        for held in owned_parts(table, prefer=rank).values():
            for part in held:
                if (part.local.name, part.local.index) in mine:
                    assert part.owner == rank


def test_replicas_share_the_work() -> None:
    """Nothing is split here, so a fair share is a fourth; the largest tensor is what it cannot be fairer than."""
    table = checkpoints.table("mixtral", "", 4)
    given = [0] * 4
    for held in owned_parts(table).values():
        for part in held:
            given[part.owner] += prod(part.region.shape)
    largest = max(prod(table.shape(local)) for local in table.tensors(0))
    assert max(given) - min(given) <= largest


def test_a_tied_projection_gives_nothing() -> None:
    parts = owned_parts(checkpoints.table("qwen2", "pp=2"))
    assert {part.owner for part in parts["model.embed_tokens.weight"]} == {0}
    assert "lm_head.weight" not in parts


@pytest.mark.parametrize("lost", [True, False])
def test_a_table_that_does_not_cover_is_refused(lost: bool) -> None:
    table = checkpoints.table("llama", "tp=2")

    def layout(model: object, sizes: object, num_shards: int, index: int) -> ShardRanges:
        return ShardRanges.of([Range(0, 0, 32)] if lost else [Range(0, 0, 33 if index == 0 else 32)])

    def broken(rule: Rule) -> Rule:
        return replace(rule, layout=layout) if rule.name.endswith("linear_proj.weight") else rule

    table.rules = tuple(broken(rule) for rule in table.rules)
    with pytest.raises(WeightMapError, match=r"o_proj.weight of shape \(48, 64\).*families/llama.py") as refused:
        owned_parts(table)
    assert len(refused.value.problems) == table.model.num_layers
