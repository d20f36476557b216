"""Episodes: what may be one, what graders are told of it, and where its rewards lie."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from mcore_rl.data.media.placed import Grid, ImageRef, Placed
from mcore_rl.rewards.score import Score
from mcore_rl.rollout.episodes import (
    Author,
    Episode,
    FinishReason,
    Segment,
    VersionSpan,
    prompt_segment,
    reward_request,
)
from tests.support.scripted_rollout import answered, conversation, row, turn

CALL, RESULT, ANSWER = (
    turn(Author.model, (10, 11, 12), reward=0.25, text="add(2, 3)"),
    turn(Author.tool, (20, 21), text="5"),
    turn(Author.model, (13,), text="It is 5."),
)
TOLD = turn(Author.user, (22,), text="Are you sure?")


def spans(*edges: int) -> tuple[VersionSpan, ...]:
    return tuple(VersionSpan(version=0, start=a, end=b) for a, b in pairwise(edges))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        (dict(tokens=np.arange(3)), "tokens are int64, not int32"),
        (dict(author=Author.tool, versions=()), "a tool segment is not trained"),
        (dict(author=Author.user, trained=False), "a user segment is not trained"),
        (dict(logprobs=None), "a trained segment has log-probs"),
        (dict(logprobs=np.zeros(2, np.float32)), "2 log-probs of 3 tokens"),
        (dict(versions=spans(0, 2)), "are not of 3 tokens"),
        (dict(versions=spans(1, 3)), "do not follow one another"),
        (dict(versions=(*spans(0, 2), *spans(1, 3))), "do not follow one another"),
        (dict(versions=(*spans(0, 3), VersionSpan(version=0, start=3, end=2))), "do not follow one another"),
        (dict(reward=1.0, trained=False), "a model segment that is not trained has a reward"),
        (dict(reward=float("nan")), "the reward nan is not finite"),
    ],
)
def test_what_is_no_segment(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        replace(CALL, **changes)


def placed(first: int, tokens: int) -> Placed:
    return Placed(ImageRef("a", "a.png"), first, Grid(1, 2, 2 * tokens))


SEEN = turn(Author.tool, (7, 6, 6, 6, 8, 6, 9), text="a picture")


def test_pictures_lie_whole_within_what_a_tool_or_a_user_says() -> None:
    media = (placed(1, 3), placed(5, 1))
    for author in (Author.prompt, Author.tool, Author.user):
        assert replace(SEEN, author=author, media=media).media == media
    assert replace(SEEN, media=(placed(1, 1), placed(2, 2))).media[1].end == 4, "one right behind the other"
    of = replace(row(4, tuple(SEEN.tokens.tolist())), media=media)
    assert prompt_segment(of).media == media


@pytest.mark.parametrize(
    ("media", "complaint"),
    [
        ((placed(5, 1), placed(1, 3)), "picture 1 begins at 1, before 6"),
        ((placed(1, 2), placed(2, 2)), "picture 1 begins at 2, before 3"),
        ((placed(-1, 1),), "picture 0 begins at -1, before 0"),
        ((placed(5, 3),), "picture 0 has the tokens 5 to 8, of 7"),
        ((placed(1, 4),), "picture 0 stands on tokens of several ids, 1 to 5"),
        ((placed(0, 2),), "picture 0 stands on tokens of several ids, 0 to 2"),
    ],
)
def test_pictures_that_are_cut_or_elsewhere_are_no_segment(media: tuple[Placed, ...], complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        replace(SEEN, media=media)


def test_the_model_draws_no_picture() -> None:
    """It may draw the token of one, which stays a token."""
    with pytest.raises(AssertionError, match="a model segment has pictures"):
        replace(CALL, media=(placed(0, 1),))


def test_what_may_be_left_out_of_a_segment() -> None:
    assert replace(CALL, trained=False, reward=None, logprobs=None, versions=()).trained is False
    assert replace(CALL, versions=spans(0, 1, 3)).versions[1].end == 3
    empty = np.zeros(0, np.int32)
    nothing = Segment(author=Author.model, tokens=empty, trained=True, logprobs=empty.astype(np.float32))
    assert len(nothing.tokens) == 0


@pytest.mark.parametrize(
    ("segments", "complaint"),
    [
        ((), "p4: the first segment is the prompt"),
        ((CALL,), "p4: the first segment is the prompt"),
        ((prompt_segment(row(4, ())), CALL), "p4: the prompt has no token"),
        ((prompt_segment(row(4)), CALL, prompt_segment(row(4))), "p4: one segment is the prompt"),
    ],
)
def test_what_is_no_episode(segments: tuple[Segment, ...], complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        Episode(row=row(4), prompt_id="p4", group=0, index=0, segments=segments, end=FinishReason.stop)


def test_one_answer_is_two_segments() -> None:
    episode = answered(4, prompt=(5, 6, 7), response=(8, 9), group=2, index=1, cut=True, text="five")
    prompt, answer = episode.segments
    assert (prompt.author, prompt.trained, prompt.tokens.tolist()) == (Author.prompt, False, [5, 6, 7])
    assert (answer.author, answer.trained, answer.tokens.tolist()) == (Author.model, True, [8, 9])
    assert answer.logprobs is not None and answer.logprobs.tolist() == pytest.approx([-0.8, -0.9])
    assert answer.versions == (VersionSpan(version=3, start=0, end=2),)
    assert (episode.prompt_id, episode.group, episode.index, episode.end) == ("p4", 2, 1, FinishReason.length)
    assert episode.is_single_turn and episode.truncated
    assert (episode.num_prompt_tokens, episode.num_response_tokens, episode.num_tokens) == (3, 2, 5)
    assert episode.response == episode.transcript == "five"


def test_all_that_follows_the_prompt_is_the_response() -> None:
    episode = conversation(4, [CALL, RESULT, TOLD, ANSWER])
    assert not episode.is_single_turn and not episode.truncated
    assert (episode.num_prompt_tokens, episode.num_response_tokens, episode.num_tokens) == (2, 7, 9)
    assert episode.response == "It is 5.", "graders look for the answer in what the model said last"
    assert episode.transcript == "assistant: add(2, 3)\n\ntool: 5\n\nuser: Are you sure?\n\nassistant: It is 5."
    assert conversation(4, [CALL, RESULT]).response == "add(2, 3)"


def test_graders_are_told_the_whole_conversation() -> None:
    asked = [{"role": "user", "content": "2 + 3?"}]
    episode = conversation(4, [CALL, RESULT, ANSWER])
    request = reward_request(replace(episode, row=replace(episode.row, messages=asked)), 20)
    assert request.messages == [
        {"role": "user", "content": "2 + 3?"},
        {"role": "assistant", "content": "add(2, 3)"},
        {"role": "tool", "content": "5"},
        {"role": "assistant", "content": "It is 5."},
    ]
    assert (request.key, request.response, request.ground_truth) == (("p4", 0), "It is 5.", "4")
    assert (request.num_tokens, request.max_tokens, request.truncated, request.num_turns) == (6, 20, False, 2)
    assert request.extra_info == {"ability": "math", "index": 4}
    assert reward_request(answered(4), 20).num_turns == 1


def test_the_reward_is_that_of_the_whole_and_of_the_turns() -> None:
    assert answered(4, Score(0.5)).reward == 0.5
    assert conversation(4, [CALL, RESULT, ANSWER], Score(1.0)).reward == 1.25
    with pytest.raises(AssertionError, match="p4: not graded yet"):
        _ = answered(4).reward


def test_a_grader_s_turn_rewards_go_to_the_model_s_turns() -> None:
    episode = conversation(4, [CALL, RESULT, ANSWER], Score(1.0, turn_rewards=(0.5, -2.0)))
    assert [segment.reward for segment in episode.segments] == [None, 0.75, None, -2.0], "the loop's stays"
    assert episode.turn_rewards == [0.75, -2.0] and episode.reward == -0.25
    for wrong in ((1.0,), (1.0, 2.0, 3.0)):
        with pytest.raises(ValueError, match="zip"):
            conversation(4, [CALL, RESULT, ANSWER], Score(1.0, turn_rewards=wrong))
