"""Packing: the invariants on random lengths, the optimum on small cases, and the messages."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import cache

import pytest

from mcore_rl.data.packing import budget_violations, chunk_fixed, pack, pack_into, padded_length


def random_cases(num_cases: int = 300) -> Iterator[tuple[list[int], int]]:
    """(costs, budget) from one sequence to many, from tiny beside the budget to more than half of it."""
    rng = random.Random(0)
    for _ in range(num_cases):
        budget = rng.choice([1, 7, 100, 4096])
        longest = rng.randint(1, budget)
        shortest = rng.randint(1, longest)
        yield [rng.randint(shortest, longest) for _ in range(rng.randint(1, 80))], budget


def loads(costs: Sequence[int], microbatches: list[list[int]]) -> list[int]:
    return [sum(costs[index] for index in members) for members in microbatches]


def assert_valid(costs: Sequence[int], microbatches: list[list[int]], budget: int) -> None:
    assert sorted(index for members in microbatches for index in members) == list(range(len(costs)))
    assert max(loads(costs, microbatches)) <= budget
    assert all(members == sorted(members) for members in microbatches)
    first = [members[0] for members in microbatches if members]
    assert first == sorted(first)
    assert not any(microbatches[len(first) :]), "empty ones come last"


def fewest_microbatches(costs: Sequence[int], budget: int) -> int:
    """By dynamic programming over subsets: (microbatches, load of the last one), least first."""
    everything = (1 << len(costs)) - 1

    @cache
    def best(chosen: int) -> tuple[int, int]:
        if chosen == 0:
            return 1, 0
        fewest = (len(costs) + 1, 0)
        for index, cost in enumerate(costs):
            if chosen >> index & 1:
                count, load = best(chosen & ~(1 << index))
                fewest = min(fewest, (count, load + cost) if load + cost <= budget else (count + 1, cost))
        return fewest

    return best(everything)[0]


@pytest.mark.parametrize(
    ("length", "multiple", "expected"), [(1, 1, 1), (5, 1, 5), (1, 4, 4), (4, 4, 4), (5, 4, 8), (0, 4, 0)]
)
def test_padded_length(length: int, multiple: int, expected: int) -> None:
    assert padded_length(length, multiple) == expected


def test_pack_keeps_every_sequence_once_within_the_budget() -> None:
    for costs, budget in random_cases():
        microbatches = pack(costs, budget)
        assert_valid(costs, microbatches, budget)
        assert all(microbatches)
        assert len(microbatches) >= -(-sum(costs) // budget)


def test_pack_is_within_its_bound_of_the_fewest_and_nearly_always_there() -> None:
    rng = random.Random(1)
    extra = 0
    for _ in range(60):
        budget = rng.choice([10, 100])
        costs = [rng.randint(1, budget) for _ in range(rng.randint(1, 10))]
        fewest, used = fewest_microbatches(costs, budget), len(pack(costs, budget))
        assert fewest <= used <= 11 * fewest / 9 + 4
        extra += used - fewest
    assert extra <= 1, "best-fit decreasing misses the optimum of cases this small about once in a hundred"


def test_pack_takes_the_tightest_room() -> None:
    # 60 opens the first and 50 the second; 40 fits both and must close the first, or 50 would find no room
    assert pack([40, 60, 50, 50], 100) == [[0, 1], [2, 3]]
    # first-fit decreasing would put 3 beside 5 and need a third for the last 4
    assert pack([5, 6, 4, 3, 2], 10) == [[0, 3, 4], [1, 2]]


def test_pack_of_short_sequences_wastes_at_most_a_hundredth() -> None:
    """It needs ``ceil(sum / budget)`` unless those would be more than 99 % full, and then one more at most."""
    rng = random.Random(2)
    fullest = 0.0
    for _ in range(40):
        costs = [max(20, min(1000, round(rng.lognormvariate(5.4, 0.4)))) for _ in range(500)]
        fewest = -(-sum(costs) // 4096)
        fullness = sum(costs) / (fewest * 4096)
        assert len(pack(costs, 4096)) <= fewest + (fullness > 0.99)
        fullest = max(fullest, fullness if fullness <= 0.99 else 0.0)
    assert fullest > 0.98, "no case comes near"


def test_ties_go_by_index() -> None:
    assert pack([4] * 5, 8) == [[0, 1], [2, 3], [4]]
    assert pack([6, 6, 3], 10) == [[0, 2], [1]]
    assert pack_into([4] * 6, 3, 12) == [[0, 3], [1, 4], [2, 5]]


def test_equal_input_gives_equal_output() -> None:
    for costs, budget in random_cases(30):
        count = len(pack(costs, budget)) + 1
        assert pack(list(costs), budget) == pack(tuple(costs), budget)
        assert pack_into(list(costs), count, budget) == pack_into(tuple(costs), count, budget)


def test_pack_of_nothing() -> None:
    assert pack([], 8) == []
    assert pack_into([], 2, 8) == [[], []]


def test_pack_into_always_succeeds_from_the_number_that_pack_needs() -> None:
    tight = 0
    for costs, budget in random_cases(600):
        needed = len(pack(costs, budget))
        for count in (needed, needed + 1, needed + 5, len(costs) + 2):
            microbatches = pack_into(costs, count, budget)
            assert len(microbatches) == count
            assert_valid(costs, microbatches, budget)
            assert sum(bool(members) for members in microbatches) == min(count, len(costs)), (
                "empty only for want of more"
            )
        tight += max(greedy_loads(costs, needed)) > budget
    assert tight >= 20, "the cases never reach the second method"


def greedy_loads(costs: Sequence[int], count: int) -> list[int]:
    """Loads of longest processing time first, written without a heap."""
    result = [0] * count
    for cost in sorted(costs, reverse=True):
        result[result.index(min(result))] += cost
    return result


def test_pack_into_balances() -> None:
    """Within the longest sequence where the budget is loose: the least loaded would have taken one from the most."""
    for costs, _ in random_cases():
        for count in (1, 2, 4, 7):
            spread = loads(costs, pack_into(costs, count, sum(costs)))
            assert max(spread) - min(spread) <= max(costs)
            assert sorted(spread) == sorted(greedy_loads(costs, count))
    assert sorted(loads([8, 7, 6, 5, 4], pack_into([8, 7, 6, 5, 4], 2, 30))) == [13, 17]


def test_pack_into_a_tight_budget_is_balanced_as_far_as_it_goes() -> None:
    costs = [3, 3, 2, 2, 2]  # longest first gives 7 and 5; the budget wants 6 and 6
    assert loads(costs, pack_into(costs, 2, 6)) == [6, 6]
    assert max(loads(costs, pack_into(costs, 2, 7))) == 7
    costs = [7, 12, 4, 9, 10]  # longest first gives 23, pack 22 and 20, and 21 and 21 is possible
    assert max(greedy_loads(costs, 2)) == 23
    assert loads(costs, pack(costs, 22)) == [20, 22]
    assert loads(costs, pack_into(costs, 2, 22)) == [21, 21]


def test_pack_into_too_few_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="1 microbatches of 8 tokens hold too little"):
        pack_into([5, 5], 1, 8)


@pytest.mark.parametrize("cost", [0, -1, 9])
def test_costs_outside_the_budget_are_a_bug(cost: int) -> None:
    with pytest.raises(AssertionError, match=r"\[1, 8\]"):
        pack([1, cost], 8)
    with pytest.raises(AssertionError, match=r"\[1, 8\]"):
        pack_into([1, cost], 2, 8)


def test_a_budget_below_the_longest_sequence_is_one_violation() -> None:
    assert budget_violations([3, 8, 8], 8) == []
    assert budget_violations([], 8) == []
    (violation,) = budget_violations([3, 900, 7, 1200, 1200], 512)
    assert violation.key == "microbatch_tokens"
    assert violation.value == 512
    assert "3 of 5 sequences do not fit" in violation.problem
    assert "sequence 3, takes 1200 tokens" in violation.problem
    assert violation.remedy == "Write 1200 or more"
    assert budget_violations([3, 900, 7, 1200, 1200], 1200) == [], "the remedy suffices"


def test_chunk_fixed() -> None:
    assert chunk_fixed([1] * 5, 2) == [[0, 1], [2, 3], [4]]
    assert chunk_fixed([1] * 4, 2) == [[0, 1], [2, 3]]
    assert chunk_fixed([1] * 2, 8) == [[0, 1]]
    assert chunk_fixed([], 8) == []
    assert chunk_fixed([2, 2, 1, 2], 4) == [[0, 1], [2, 3]]
    assert chunk_fixed([2, 2, 1, 2], 3) == [[0], [1, 2], [3]], "none is parted, and all stay in order"
