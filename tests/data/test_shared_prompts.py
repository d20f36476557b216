"""Stems by hand: which sequences share how much, within which budget, and on which rank."""

from __future__ import annotations

import numpy as np
import pytest

from mcore_rl.data.shared_prompts import Stem, dealt, loads, stems_of, within, within_budget

LENGTHS = [6, 5, 5, 3, 4, 4]


def batch(*sequences: tuple[list[int], int]) -> list[Stem]:
    """The stems of (tokens, tokens of the prompt) each; all behind the prompt is trained."""
    masks = [[place >= prompt for place in range(len(tokens))] for tokens, prompt in sequences]
    tokens_T = np.array([token for tokens, _ in sequences for token in tokens])
    return stems_of(tokens_T, np.array([each for mask in masks for each in mask]), [len(each) for each, _ in sequences])


def test_samples_of_a_prompt_share_all_of_it_but_its_last_token() -> None:
    first, second, third = [7, 8, 9], [7, 8], [5, 6, 7]
    stems = batch(([*first, 1, 2], 3), ([*second, 9, 1], 2), ([*first, 4], 3), (third, 3), (third, 3), ([*third, 2], 3))
    assert stems == [Stem((0, 2), 2), Stem((1,), 0), Stem((3, 4, 5), 2)]
    assert batch(([3, 1], 1), ([3, 2], 1)) == [Stem((0,)), Stem((1,))], (
        "the only token of a prompt predicts what differs"
    )


def test_a_token_that_is_trained_is_never_shared() -> None:
    assert batch(([1, 2, 3, 4], 2), ([1, 2, 3, 5], 3)) == [Stem((0,), 0), Stem((1,), 0)]


def test_a_part_of_the_sequences_shares_what_it_has_of_a_stem() -> None:
    stems = [Stem((0, 2, 5), 3), Stem((1, 4), 2), Stem((3,), 0)]
    assert within(stems, [5, 1, 0]) == [Stem((0, 5), 3), Stem((1,), 0)]


def test_tokens_are_those_of_the_trunk_once() -> None:
    assert Stem((0, 1, 2), 4).tokens(LENGTHS) == 4 + 2 + 1 + 1
    assert Stem((0, 1, 2), 4).saved == 8 and Stem((3,), 0).saved == 0


def test_a_stem_over_the_budget_is_parted_with_a_trunk_for_each_part() -> None:
    stem = Stem((0, 1, 2), 4)
    assert within_budget(stem, LENGTHS, 8) == [stem]
    parts = within_budget(stem, LENGTHS, 6)
    assert sorted(index for part in parts for index in part.members) == [0, 1, 2]
    assert all(part.tokens(LENGTHS) <= 6 for part in parts) and len(parts) == 2
    assert {part.shared for part in parts} == {4, 0}, "one that is left alone shares nothing"
    assert len(within_budget(Stem((1, 2), 4), LENGTHS, 5)) == 2


def test_whole_stems_go_to_a_rank_where_that_is_least_for_the_busiest() -> None:
    lengths = [12] * 8
    even = [Stem((0, 2, 4, 6), 10), Stem((1, 3, 5, 7), 10)]
    assert sorted(dealt(even, lengths, 2)) == [[0, 2, 4, 6], [1, 3, 5, 7]], "18 tokens on each"
    alone = [Stem((0, 2, 4, 6), 10), Stem((1,), 0), Stem((3,), 0), Stem((5,), 0), Stem((7,), 0)]
    costs = [sum(part.tokens(lengths) for part in within(alone, rank)) for rank in dealt(alone, lengths, 2)]
    assert max(costs) <= 36
    short = [Stem((0, 2, 4, 6), 1), Stem((1,), 0), Stem((3,), 0)]
    costs = [sum(part.tokens(lengths) for part in within(short, rank)) for rank in dealt(short, lengths, 3)]
    assert max(costs) <= 24, "a short prompt is repeated rather than waited for"
    assert sorted(index for rank in dealt([Stem(tuple(range(8)), 10)], lengths, 4) for index in rank) == [*range(8)]


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_the_busiest_rank_never_has_more_than_without_sharing(num_ranks: int) -> None:
    random = np.random.default_rng(3)
    for _ in range(20):
        stems, lengths = list[Stem](), list[int]()
        for _ in range(int(random.integers(2, 6))):
            prompt, size = int(random.integers(1, 40)), int(random.integers(1, 9))
            stems.append(Stem(tuple(range(len(lengths), len(lengths) + size)), prompt - 1 if size > 1 else 0))
            lengths += [prompt + int(each) for each in random.integers(0, 60, size)]
        if len(lengths) < num_ranks:
            continue
        ranks = dealt(stems, lengths, num_ranks)
        assert sorted(index for rank in ranks for index in rank) == [*range(len(lengths))]
        apart = dealt([Stem((index,)) for index in range(len(lengths))], lengths, num_ranks)
        computed = [sum(part.tokens(lengths) for part in within(stems, rank)) for rank in ranks]
        assert loads(stems, lengths, ranks) == computed
        busiest = max(computed)
        assert all(ranks) and busiest <= max(sum(lengths[index] for index in rank) for rank in apart)
