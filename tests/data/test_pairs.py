"""Pairs stay together, whatever places them: in microbatches by tokens or by number, and over ranks."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial

import pytest

from mcore_rl.data.balance import balance, imbalance
from mcore_rl.data.packing import chunk_fixed, pack, pack_into
from mcore_rl.data.pairs import placed_whole, units_of


def random_cases(num_cases: int = 200) -> Iterator[tuple[list[int], list[int | None], int]]:
    """(costs, pairs_S, budget): pairs with any sequences between their two, some sequences without one."""
    rng = random.Random(0)
    for _ in range(num_cases):
        keys: list[int | None] = [None] * rng.randint(0, 9)
        keys += [key for key in range(rng.randint(1, 30)) for _ in range(2)]
        rng.shuffle(keys)
        budget = rng.choice([8, 100, 4096])
        yield [rng.randint(1, budget // 2) for _ in keys], keys, budget


def assert_whole(placed: list[list[int]], keys: list[int | None]) -> None:
    assert sorted(index for members in placed for index in members) == list(range(len(keys)))
    assert all(members == sorted(members) for members in placed)
    for members in placed:
        inside = [keys[index] for index in members if keys[index] is not None]
        assert all(inside.count(key) == 2 for key in inside), f"{inside} has half a pair"


def test_units_by_hand() -> None:
    assert units_of([None, 7, None, 5, 7, 5]) == [[0], [1, 4], [2], [3, 5]]
    assert units_of([None, None]) == [[0], [1]] and units_of([]) == []
    assert placed_whole([1, 2, 3, 4], [[0, 2], [1], [3]], lambda costs: [costs and [2, 0], [1]]) == [[0, 2, 3], [1]]
    costs: list[list[int]] = []
    placed_whole([1, 2, 3, 4], [[0, 2], [1], [3]], lambda of_units: costs.append(of_units) or [])
    assert costs == [[4, 2, 4]]


@pytest.mark.parametrize("keys", [[1], [1, None], [1, 1, 1]])
def test_a_pair_is_two(keys: list[int | None]) -> None:
    with pytest.raises(AssertionError, match=r"pair 1 has [13] sequences"):
        units_of(keys)


def test_packing_parts_no_pair() -> None:
    for costs, keys, budget in random_cases():
        units = units_of(keys)
        packed = placed_whole(costs, units, partial(pack, budget=budget))
        more = placed_whole(costs, units, partial(pack_into, num_microbatches=len(packed) + 1, budget=budget))
        assert len(more) == len(packed) + 1
        for microbatches in (packed, more):
            assert_whole(microbatches, keys)
            assert max(sum(costs[index] for index in members) for members in microbatches) <= budget
            first = [members[0] for members in microbatches if members]
            assert first == sorted(first), "microbatches ascend by their first index"


def test_packing_by_number_parts_no_pair() -> None:
    for costs, keys, _ in random_cases():
        for size in (2, 3, 4):
            chunks = placed_whole([1] * len(costs), units_of(keys), partial(chunk_fixed, size=size))
            assert_whole(chunks, keys)
            assert all(1 <= len(members) <= size for members in chunks)


def test_balance_parts_no_pair() -> None:
    for costs, keys, _ in random_cases():
        units = units_of(keys)
        for num_ranks in (1, 2, 4):
            if num_ranks <= len(units):
                shards = placed_whole(costs, units, partial(balance, num_ranks=num_ranks))
                assert_whole(shards, keys)
                assert len(shards) == num_ranks and all(shards)


def test_pairs_of_one_length_are_balanced_as_sequences_are() -> None:
    rng = random.Random(1)
    lengths = [rng.randint(50, 400) for _ in range(128)]
    costs, keys = [length for length in lengths for _ in range(2)], [key for key in range(128) for _ in range(2)]
    shards = placed_whole(costs, units_of(keys), partial(balance, num_ranks=8))
    assert {len(shard) for shard in shards} == {32}
    assert imbalance(costs, shards) == imbalance(lengths, balance(lengths, 8)) < 1.01


def test_without_pairs_nothing_changes() -> None:
    for costs, keys, budget in random_cases(30):
        units = units_of([None] * len(keys))
        assert placed_whole(costs, units, partial(pack, budget=budget)) == pack(costs, budget)
        assert placed_whole(costs, units, partial(balance, num_ranks=2)) == balance(costs, 2)
