"""Pairs of a step's responses: who is trained, beside whom, and what stands in for a pair that cannot be made."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mcore_rl.controller.step.batch_assembly import assemble
from mcore_rl.controller.step.pairing import StepEpisodes, in_pairs
from mcore_rl.data.pairs import units_of
from mcore_rl.ground.types import NOT_DRAWN
from mcore_rl.rewards.score import Score
from mcore_rl.rollout.episodes import Author, Episode
from tests.support.scripted_rollout import answered, conversation, lost_episode, turn
from tests.support.settings import algorithm_config

BEST_WORST, ANSWERS = algorithm_config(adv_estimator="best_worst"), algorithm_config(adv_estimator="true_answer")
OWN = (70, 71, 2)


def group(number: int, *responses: tuple[float, tuple[int, ...]], cut: tuple[int, ...] = ()) -> list[Episode]:
    """Of prompt ``number``: a score and tokens of each.  cut: the places of those that reached their limit."""
    return [
        answered(number, Score(score), (1, 2), tokens, group=number, index=place, cut=place in cut)
        for place, (score, tokens) in enumerate(responses)
    ]


def with_answers(episodes: list[Episode]) -> list[Episode]:
    return [replace(each, row=replace(each.row, answer=OWN)) for each in episodes]


def shape(trained: StepEpisodes) -> list[tuple[int, int | None, int | None, bool]]:
    """Of each: its prompt, its place among the drawn, its pair, whether anything of it is trained."""
    return [
        (each.group, place, each.pair, any(part.trained for part in each.segments))
        for each, place in zip(trained.episodes, trained.places, strict=True)
    ]


def test_without_pairs_all_is_trained_as_it_was_drawn() -> None:
    episodes = group(0, (1.0, (7,)), (0.0, (8, 9)))
    trained = in_pairs(episodes, algorithm_config(adv_estimator="grpo"))
    assert list(trained.episodes) == episodes and list(trained.places) == [0, 1] and trained.metrics == {}
    assert trained.of_drawn(torch.tensor([1, 2]), 2) == [1, 2]


def test_the_best_stands_before_the_worst_and_the_rest_is_left_out() -> None:
    episodes = [
        *group(0, (0.5, (7,)), (0.0, (8,)), (1.0, (9, 9)), (0.25, (6,))),
        *group(1, (1.0, (5,)), (0.5, (4, 4))),
    ]
    trained = in_pairs(episodes, BEST_WORST)
    assert shape(trained) == [(0, 2, 0, True), (0, 1, 0, True), (1, 4, 1, True), (1, 5, 1, True)]
    assert trained.metrics == {
        "pairs/count": 2.0,
        "pairs/missing_share": 0.0,
        "pairs/same_share": 0.0,
        "pairs/score_gap": pytest.approx(0.75),
    }
    assert trained.of_drawn(torch.tensor([2, 1, 1, 2]), 6) == [0, 1, 2, 0, 1, 2]
    batch = assemble(trained.episodes).batch
    assert batch.pairs_S == (0, 0, 1, 1) and batch.lengths_S == (4, 3, 3, 4)


def test_of_equal_scores_the_shortest_response_stands_in_untrained() -> None:
    episodes = [*group(0, (1.0, (7, 7, 7)), (1.0, (8,)), (1.0, (9, 9))), *group(1, (0.0, (5,)), (1.0, (4,)))]
    trained = in_pairs(episodes, BEST_WORST)
    assert shape(trained) == [(0, 1, None, False), (1, 4, 0, True), (1, 3, 0, True)]
    assert trained.metrics["pairs/missing_share"] == 0.5 and trained.metrics["pairs/count"] == 1
    batch = assemble(trained.episodes)
    assert batch.batch.pairs_S == (None, 0, 0) and batch.batch.mask_T.int().tolist() == [0, 0, 0, 0, 0, 1, 0, 0, 1]
    assert units_of(batch.batch.pairs_S) == [[0], [1, 2]] and batch.group_S.tolist() == [0, 1, 1]


def test_a_step_without_a_single_pair_is_whole_too() -> None:
    trained = in_pairs([*group(0, (1.0, (7,)), (1.0, (8,))), *group(1, (0.0, (5,)), (0.0, (4,)))], BEST_WORST)
    assert shape(trained) == [(0, 0, None, False), (1, 2, None, False)]
    assert trained.metrics == {"pairs/count": 0.0, "pairs/missing_share": 1.0}
    assert assemble(trained.episodes).num_trained == 0


def test_an_empty_response_is_in_no_pair() -> None:
    trained = in_pairs(group(0, (0.0, ()), (0.5, (8,)), (1.0, (9,))), BEST_WORST)
    assert shape(trained) == [(0, 2, 0, True), (0, 1, 0, True)]
    alone = in_pairs(group(0, (0.0, ()), (1.0, (9,))), BEST_WORST)
    assert shape(alone) == [(0, 0, None, False)] and alone.metrics["pairs/missing_share"] == 1


def test_a_lost_response_is_in_no_pair() -> None:
    lost = replace(lost_episode(0, Score(0.0)), group=0, index=2)
    trained = in_pairs([*group(0, (0.5, (8, 8)), (1.0, (9, 9, 9))), lost], BEST_WORST)
    assert shape(trained) == [(0, 1, 0, True), (0, 0, 0, True)]


def test_overlong_responses_are_in_no_pair_where_they_are_masked() -> None:
    episodes = group(0, (0.0, (7,)), (0.5, (8,)), (1.0, (9,)), cut=(0,))
    assert shape(in_pairs(episodes, BEST_WORST)) == [(0, 2, 0, True), (0, 0, 0, True)]
    masked = replace(BEST_WORST, mask_truncated=True)
    assert shape(in_pairs(episodes, masked)) == [(0, 2, 0, True), (0, 1, 0, True)]
    all_cut = group(0, (0.0, (7,)), (1.0, (9,)), cut=(0, 1))
    assert shape(in_pairs(all_cut, masked)) == [(0, 0, None, False)]


def test_what_turns_earned_counts() -> None:
    """A conversation of score 0 whose turn earned 2 is better than an answer of score 1."""
    turns = [turn(Author.model, (10,), reward=2.0), turn(Author.tool, (20,)), turn(Author.model, (11,))]
    episodes = [*group(0, (1.0, (7,))), replace(conversation(0, turns, Score(0.0)), index=1)]
    trained = in_pairs(episodes, BEST_WORST)
    assert shape(trained) == [(0, 1, 0, True), (0, 0, 0, True)] and trained.metrics["pairs/score_gap"] == 1.0
    assert assemble(trained.episodes).batch.mask_T.int().tolist() == [0, 0, 1, 0, 1, 0, 0, 1]


def test_each_response_stands_behind_the_row_s_own_answer() -> None:
    episodes = with_answers([*group(0, (1.0, (7,)), (0.0, OWN)), *group(1, (0.5, (5,)), (0.5, (4,)))])
    trained = in_pairs(episodes, ANSWERS)
    assert shape(trained) == [
        (0, None, 0, True), (0, 0, 0, True), (0, None, 1, True), (0, 1, 1, True),
        (1, None, 2, True), (1, 2, 2, True), (1, None, 3, True), (1, 3, 3, True),
    ]  # fmt: skip
    assert trained.metrics == {"pairs/count": 4.0, "pairs/missing_share": 0.0, "pairs/same_share": 0.25}
    assert trained.of_drawn(torch.tensor([3, 1, 3, 3, 3, 1, 3, 1]), 4) == [1, 3, 1, 1]
    batch = assemble(trained.episodes).batch
    assert batch.tokens_T[:5].tolist() == [1, 2, *OWN] and batch.mask_T[:5].int().tolist() == [0, 0, 1, 1, 1]
    assert batch.rollout_logprobs_T is not None
    assert batch.rollout_logprobs_T[:5].tolist() == [0, 0, NOT_DRAWN, NOT_DRAWN, NOT_DRAWN]
    assert batch.rollout_logprobs_T[5:8].isfinite().all()


def test_a_response_that_is_paired_with_no_answer_stands_there_untrained() -> None:
    episodes = with_answers(group(0, (1.0, (7,)), (0.0, ()), (1.0, (8, 8))))
    trained = in_pairs(episodes, ANSWERS)
    assert shape(trained) == [
        (0, None, 0, True), (0, 0, 0, True), (0, None, 1, True), (0, 2, 1, True), (0, 1, None, False),
    ]  # fmt: skip
    assert trained.metrics["pairs/missing_share"] == pytest.approx(1 / 3)


def test_a_row_without_an_answer_of_its_own_is_no_row_of_such_a_run() -> None:
    with pytest.raises(AssertionError, match="file:0 has no answer of its own"):
        in_pairs(group(0, (1.0, (7,))), ANSWERS)
