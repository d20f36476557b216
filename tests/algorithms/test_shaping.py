"""Which groups have a signal, and which responses are left out."""

from __future__ import annotations

import itertools

import pytest
import torch

from mcore_rl.algorithms.advantages.inputs import AdvantageInputs
from mcore_rl.algorithms.shaping import has_signal, mask_truncated
from mcore_rl.config.algorithm import FilterGroupsConfig
from tests.support.settings import algorithm_config

RIGHT, WRONG = 1.0, 0.0


@pytest.mark.parametrize(
    ("scores", "truncated", "masks", "in_baseline", "expected"),
    [
        ([RIGHT] * 8, [False] * 8, False, True, False),
        ([RIGHT, WRONG] * 4, [False] * 8, False, True, True),
        ([RIGHT] * 4 + [WRONG] * 4, [False] * 4 + [True] * 4, False, True, True),  # truncated, and trained all the same
        # Four that are right, four that were cut off and are not trained: who leaves the group takes the signal along.
        ([RIGHT] * 4 + [WRONG] * 4, [False] * 4 + [True] * 4, True, False, False),
        ([RIGHT] * 4 + [WRONG] * 4, [False] * 4 + [True] * 4, True, True, True),
        ([RIGHT, WRONG] * 4, [True] * 8, True, True, False),  # nobody is trained
        ([RIGHT, WRONG] * 4, [True] * 8, True, False, False),
        ([RIGHT] * 8, [True] * 4 + [False] * 4, True, True, False),
    ],
)
def test_a_group_has_a_signal_where_training_sees_one(
    scores: list[float], truncated: list[bool], masks: bool, in_baseline: bool, expected: bool
) -> None:
    config = algorithm_config(mask_truncated=masks, masked_in_baseline=in_baseline)
    assert has_signal(scores, truncated, config) is expected


def test_a_group_has_a_signal_if_two_that_are_trained_make_a_pair() -> None:
    """Whatever stays in a baseline, which pairs do not have."""
    config = algorithm_config(adv_estimator="best_worst", mask_truncated=True, masked_in_baseline=True)
    assert has_signal([RIGHT, WRONG, RIGHT], [False, False, True], config)
    assert not has_signal([RIGHT, WRONG, RIGHT], [False, True, False], config)
    assert not has_signal([RIGHT, WRONG], [True, True], config)


@pytest.mark.parametrize(
    ("right", "of", "expected"),
    [(0, 5, False), (1, 5, True), (4, 5, True), (5, 5, False), (1, 6, False), (5, 6, False)],
)
def test_prompts_that_are_too_hard_or_too_easy_have_no_signal(right: int, of: int, expected: bool) -> None:
    """The bounds themselves are within."""
    config = algorithm_config(filter_groups=FilterGroupsConfig(lower=0.2, upper=0.8))
    assert has_signal([RIGHT] * right + [WRONG] * (of - right), [False] * of, config) is expected


def test_each_bound_is_by_itself_and_of_the_members_of_the_group() -> None:
    scores, cut = [RIGHT, WRONG, WRONG, WRONG], [False, False, True, True]
    for bounds, masks, expected in (
        (dict(lower=0.5), False, False), (dict(upper=0.25), False, True), (dict(upper=0.2), False, False),
        (dict(lower=0.5), True, True),
    ):  # fmt: skip
        config = algorithm_config(
            filter_groups=FilterGroupsConfig(**bounds), mask_truncated=masks, masked_in_baseline=False
        )
        assert has_signal(scores, cut, config) is expected, (bounds, masks)


def raft_trains(scores: tuple[float, ...], members: list[int], place: int) -> bool:
    """RAFT trains every response whose score is positive, whatever its siblings have."""
    return scores[place] > 0


def best_of_n_trains(scores: tuple[float, ...], members: list[int], place: int) -> bool:
    """Best of n trains the best of a group in which one is worse."""
    compared = [scores[each] for each in members]
    return scores[place] == max(compared) > min(compared)


def pass_at_k_trains(scores: tuple[float, ...], members: list[int], place: int) -> bool:
    """A response adds to the best of two where another member scores less."""
    return any(scores[place] > scores[each] for each in members)


def grpo_trains(scores: tuple[float, ...], members: list[int], place: int) -> bool:
    """A group's mean is no member's score where any two differ by what these do."""
    return len({scores[each] for each in members}) > 1


TRAINS = {"raft": raft_trains, "best_of_n": best_of_n_trains, "pass_at_k": pass_at_k_trains, "grpo": grpo_trains}


@pytest.mark.parametrize("in_baseline", [False, True])
@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize("name", TRAINS)
def test_a_group_has_a_signal_if_the_algorithm_trains_one_of_its_responses(
    name: str, masks: bool, in_baseline: bool
) -> None:
    """Every group of three, against what each algorithm's paper says that it trains."""
    config = algorithm_config(adv_estimator=name, mask_truncated=masks, masked_in_baseline=in_baseline, pass_k=2)
    met = set()
    for scores in itertools.product([RIGHT, WRONG], repeat=3):
        for truncated in itertools.product([False, True], repeat=3):
            trained = [place for place in range(3) if not (truncated[place] and masks)]
            members = list(range(3)) if in_baseline else trained
            expected = any(TRAINS[name](scores, members, place) for place in trained)
            assert has_signal(scores, truncated, config) is expected, (scores, truncated)
            met.add(expected)
    assert met == {False, True}


@pytest.mark.parametrize(
    "name", ["grpo", "dr_grpo", "rloo", "opo", "gpg", "pass_at_k", "best_of_n", "win_rate", "best_worst"]
)
def test_scores_that_differ_by_rounding_are_no_signal(name: str) -> None:
    config = algorithm_config(adv_estimator=name, pass_k=2)
    assert not has_signal([0.1 + 0.2, 0.3, 0.1 + 0.1 + 0.1], [False] * 3, config)
    assert not has_signal([1e6 + 0.1 + 0.2, 1e6 + 0.3], [False] * 2, config)
    assert has_signal([0.3, 0.30001, 0.3], [False] * 3, config)


@pytest.mark.parametrize("name", ["gae", "reinforce_plus_plus", "remax", "gdpo", "softmean", "none"])
def test_where_a_group_alone_says_nothing_the_scores_have_to_differ(name: str) -> None:
    config = algorithm_config(adv_estimator=name)
    assert has_signal([RIGHT, WRONG], [False] * 2, config)
    assert not has_signal([RIGHT, RIGHT], [False] * 2, config)
    assert not has_signal([0.1 + 0.2, 0.3], [False] * 2, config)


def test_truncated_responses_are_not_trained() -> None:
    mask_T = torch.tensor([False, True, False, True, True, False, True])
    masked_T = mask_truncated(mask_T, (2, 3, 2), torch.tensor([False, True, False]))
    assert masked_T.tolist() == [False, True, False, False, False, False, True]
    assert mask_T.sum() == 4
    assert AdvantageInputs(lengths_S=(2, 3, 2), mask_T=masked_T, outcome_S=torch.zeros(3)).counts_S.tolist() == [
        1,
        0,
        1,
    ]
