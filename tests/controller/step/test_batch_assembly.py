"""Graded episodes to a batch: every token where it belongs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from mcore_rl.algorithms.step_batch import StepBatch
from mcore_rl.config.roles import Teachers
from mcore_rl.controller.step.batch_assembly import assemble
from mcore_rl.data.media.placed import Grid, ImageRef, Placed
from mcore_rl.ground.errors import ConfigError
from mcore_rl.ground.types import TAUGHT_BY, Picture, TrainBatch
from mcore_rl.rewards.score import Score
from mcore_rl.rollout.episodes import Author, Episode, FinishReason, Segment, prompt_segment
from tests.support.scripted_rollout import answered, conversation, row, turn

GROUPS = [
    answered(0, Score(1.0), (1, 2, 3), (10, 11)),
    answered(0, Score(0.0), (1, 2, 3), (12,), cut=True, index=1),
    answered(1, Score(0.5), (4,), (13, 14, 15), group=1),
]
# A call of a tool, which earned something by itself, its result, and two answers with a question between.
TURNS = [
    turn(Author.model, (10, 11), reward=0.25),
    turn(Author.tool, (20, 21, 22)),
    turn(Author.model, (12, 13)),
    turn(Author.user, (23,)),
    turn(Author.model, (14,), reward=-1.0),
]


def test_tokens_masks_and_logprobs_stand_side_by_side() -> None:
    assembled = assemble(GROUPS)
    batch = assembled.batch
    assert batch.lengths_S == (5, 4, 4)
    assert batch.tokens_T.tolist() == [1, 2, 3, 10, 11, 1, 2, 3, 12, 4, 13, 14, 15]
    assert batch.mask_T.int().tolist() == [0, 0, 0, 1, 1, 0, 0, 0, 1, 0, 1, 1, 1]
    assert batch.rollout_logprobs_T is not None and batch.rollout_logprobs_T.dtype == torch.float32
    expected = torch.tensor([0, 0, 0, -1.0, -1.1, 0, 0, 0, -1.2, 0, -1.3, -1.4, -1.5])
    assert torch.equal(batch.rollout_logprobs_T, expected)
    assert batch.turn_rewards_T is None
    assert assembled.group_S.tolist() == [0, 0, 1]
    assert assembled.outcomes.scores_S.tolist() == [1.0, 0.0, 0.5]
    assert assembled.outcomes.truncated_S.tolist() == [False, True, False]
    assert assembled.outcomes.greedy_S is None and assembled.num_trained == 6


def test_a_greedy_score_goes_to_all_of_its_group() -> None:
    assembled = assemble(GROUPS, greedy=[0.25, 0.75])
    assert assembled.outcomes.greedy_S is not None and assembled.outcomes.greedy_S.tolist() == [0.25, 0.25, 0.75]


def test_of_several_teachers_a_sequence_says_which_it_has() -> None:
    """The rows of all prompts here are of the data source "sums"."""
    for source, number in (("sums", 1.0), ("math", 0.0)):
        assembled = assemble(GROUPS, teachers=Teachers("rest", {source: "t"}), with_outcomes=True)
        assert assembled.taught_by == ("teacher.path", source)
        assert assembled.batch.extra_S[TAUGHT_BY].tolist() == [number] * 3 and "outcome_S" in assembled.batch.extra_S
    for alone in (None, Teachers("t", {}), Teachers(None, {"sums": "t"})):
        assembled = assemble(GROUPS, teachers=alone)
        assert assembled.taught_by == () and not assembled.batch.extra_S


def test_outcomes_are_whether_the_answer_is_right_without_the_overlong_penalty() -> None:
    scores = [Score(5.0, correct=1.0), Score(-0.25, {"overlong": -0.5}), Score(0.5, error="hung")]
    episodes = [answered(0, score, index=index) for index, score in enumerate(scores)]
    assembled = assemble(episodes, with_outcomes=True)
    assert {name: x_S.tolist() for name, x_S in assembled.batch.extra_S.items()} == {"outcome_S": [1.0, 0.25, 0.5]}
    assert assembled.outcomes.scores_S.tolist() == [5.0, -0.25, 0.5]
    assert assemble(episodes).batch.extra_S == {}


def test_an_outcome_that_is_no_probability_is_refused() -> None:
    episodes = [answered(0, Score(1.0)), answered(0, Score(5.0), index=1)]
    with pytest.raises(ConfigError, match=r"(?s)=5\.0: is not in \[0, 1\].*Let the grader answer with acc"):
        assemble(episodes, with_outcomes=True)


def test_of_a_conversation_the_model_s_turns_are_trained() -> None:
    assembled = assemble([conversation(0, TURNS, Score(3.0)), answered(1, Score(0.5), (4,), (15,), group=1)])
    batch = assembled.batch
    assert batch.lengths_S == (11, 2)
    assert batch.tokens_T.tolist() == [5, 6, 10, 11, 20, 21, 22, 12, 13, 23, 14, 4, 15]
    assert batch.mask_T.int().tolist() == [0, 0, 1, 1, 0, 0, 0, 1, 1, 0, 1, 0, 1]
    expected = [0, 0, -1.0, -1.1, 0, 0, 0, -1.2, -1.3, 0, -1.4, 0, -1.5]
    assert batch.rollout_logprobs_T is not None and torch.equal(batch.rollout_logprobs_T, torch.tensor(expected))
    assert batch.turn_rewards_T is not None
    assert batch.turn_rewards_T.tolist() == [0, 0, 0, 0.25, 0, 0, 0, 0, 0, 0, -1.0, 0, 0]
    assert assembled.outcomes.scores_S.tolist() == [3.0, 0.5] and assembled.num_trained == 6


def test_a_model_s_turn_may_be_left_untrained() -> None:
    first, *rest = TURNS
    seen = Segment(author=Author.model, tokens=first.tokens, logprobs=first.logprobs)
    batch = assemble([conversation(0, [seen, *rest], Score(0.0))]).batch
    assert batch.mask_T.int().tolist() == [0, 0, 0, 0, 0, 0, 0, 1, 1, 0, 1]
    assert batch.rollout_logprobs_T is not None
    assert not batch.rollout_logprobs_T[~batch.mask_T].any()


def test_the_reward_of_an_empty_turn_goes_nowhere() -> None:
    episode = conversation(0, [turn(Author.model, (), reward=1.0), turn(Author.model, (10,))], Score(0.0))
    assert assemble([episode]).batch.turn_rewards_T is None


def test_pairs_keep_their_keys() -> None:
    assert assemble(GROUPS).batch.pairs_S is None
    paired = [replace(GROUPS[0], pair=4), replace(GROUPS[1], pair=4), GROUPS[2]]
    assert assemble(paired).batch.pairs_S == (4, 4, None)
    with pytest.raises(AssertionError, match="pair 4 has 1 sequences"):
        assemble([paired[0], *GROUPS[1:]])
    with pytest.raises(AssertionError, match="pair 4 is of two prompts"):
        assemble([paired[0], GROUPS[1], replace(GROUPS[2], pair=4)])


@dataclass(frozen=True)
class OldTrajectory:
    """What was drawn and trained before there were episodes."""

    prompt: tuple[int, ...]
    tokens: np.ndarray
    logprobs: np.ndarray


def old_assemble(trajectories: Sequence[OldTrajectory]) -> TrainBatch:
    """As it was written then, line by line, but for what a row and a sample were called."""
    lengths = [len(each.prompt) + len(each.tokens) for each in trajectories]
    tokens_T = np.empty(sum(lengths), dtype=np.int32)
    mask_T, logprobs_T = np.empty(len(tokens_T), dtype=bool), np.empty(len(tokens_T), dtype=np.float32)
    end = 0
    for each in trajectories:
        prompt = np.asarray(each.prompt, dtype=np.int32)
        start, end = end + len(prompt), end + len(prompt) + len(each.tokens)
        tokens_T[start - len(prompt) : start], tokens_T[start:end] = prompt, each.tokens
        mask_T[start - len(prompt) : start], mask_T[start:end] = False, True
        logprobs_T[start - len(prompt) : start], logprobs_T[start:end] = 0, each.logprobs
    return TrainBatch(
        lengths_S=tuple(lengths),
        tokens_T=torch.from_numpy(tokens_T),
        mask_T=torch.from_numpy(mask_T),
        rollout_logprobs_T=torch.from_numpy(logprobs_T),
    )


def test_single_turns_are_the_same_arrays_as_before_episodes() -> None:
    draw = np.random.default_rng(3)
    old, episodes = [], []
    for number in range(60):
        prompt = tuple(draw.integers(0, 99, draw.integers(1, 9)).tolist())
        tokens = draw.integers(0, 99, draw.integers(0, 12), dtype=np.int32)
        logprobs = draw.normal(size=len(tokens)).astype(np.float32)
        old.append(OldTrajectory(prompt, tokens, logprobs))
        of = row(number, prompt)
        answer = Segment(author=Author.model, tokens=tokens, trained=True, logprobs=logprobs)
        episodes.append(episode_of([prompt_segment(of), answer], number))
    expected, batch = old_assemble(old), assemble(episodes).batch
    assert batch.lengths_S == expected.lengths_S
    assert dict(batch.token_fields()).keys() == dict(expected.token_fields()).keys()
    for name, tensor in expected.token_fields():
        same = dict(batch.token_fields())[name]
        assert same.dtype == tensor.dtype and same.numpy().tobytes() == tensor.numpy().tobytes(), name


def episode_of(segments: Sequence[Segment], number: int = 0) -> Episode:
    return Episode(
        row=row(number), prompt_id=f"p{number}", group=number, index=0, segments=tuple(segments),
        end=FinishReason.stop, score=Score(float(number)),
    )  # fmt: skip


def drawn_episode(draw: np.random.Generator, number: int) -> Episode:
    """A prompt and up to six segments of anybody, some empty, some of the model's not trained, some rewarded."""
    segments = [prompt_segment(row(number, tuple(draw.integers(0, 99, draw.integers(1, 5)).tolist())))]
    for _ in range(draw.integers(0, 7)):
        author = (Author.model, Author.model, Author.tool, Author.user)[draw.integers(4)]
        trained = author is Author.model and bool(draw.random() < 0.8)
        tokens = draw.integers(0, 99, draw.integers(0, 6), dtype=np.int32)
        logprobs = draw.normal(size=len(tokens)).astype(np.float32) if author is Author.model else None
        reward = float(np.float32(draw.normal())) if trained and draw.random() < 0.3 else None
        segments.append(
            Segment(author=author, tokens=tokens, trained=trained, logprobs=logprobs, reward=reward)
        )  # fmt: skip
    return episode_of(segments, number)


@pytest.mark.parametrize("seed", range(20))
def test_any_segments_are_found_again_token_by_token(seed: int) -> None:
    draw = np.random.default_rng(seed)
    episodes = [drawn_episode(draw, number) for number in range(int(draw.integers(1, 12)))]
    assembled = assemble(episodes)
    expected: list[tuple[int, bool, float, float]] = []
    for episode in episodes:
        for segment in episode.segments:
            for place, token in enumerate(segment.tokens.tolist()):
                logprob = float(segment.logprobs[place]) if segment.trained else 0.0  # type: ignore[index]
                last = place == len(segment.tokens) - 1
                expected.append((token, segment.trained, logprob, (segment.reward or 0.0) if last else 0.0))
    assert rows_of(assembled) == expected
    ends = np.cumsum(assembled.batch.lengths_S)
    assert ends[-1] == len(expected) and assembled.batch.lengths_S == tuple(each.num_tokens for each in episodes)
    assert assembled.group_S.tolist() == [each.group for each in episodes]


def rows_of(assembled: StepBatch) -> list[tuple[int, bool, float, float]]:
    batch = assembled.batch
    rewards_T: Tensor = torch.zeros(len(batch.tokens_T)) if batch.turn_rewards_T is None else batch.turn_rewards_T
    assert batch.rollout_logprobs_T is not None
    columns = (batch.tokens_T, batch.mask_T, batch.rollout_logprobs_T, rewards_T)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def graded(value: float, parts: dict[str, float], correct: float | None = None, error: str | None = None) -> Episode:
    return replace(GROUPS[0], score=Score(value, parts, correct, error))


def test_named_parts_of_the_reward_come_in_the_order_of_the_keys() -> None:
    assembled = assemble(
        [
            graded(1.5, {"format": 1.0, "overlong": -0.5}, correct=1.0),
            graded(0.25, {"format": 0.5, "acc": 0.75}, correct=0.0),  # a part of its own goes before the general name
            graded(-1.0, {}, error="timeout: 9 s"),
        ],
        reward_keys=["score", "format", "acc"],
    )
    parts_SK = assembled.outcomes.parts_SK
    assert parts_SK is not None and parts_SK.dtype == torch.float32
    assert parts_SK.tolist() == [[2.0, 1.0, 1.0], [0.25, 0.5, 0.75], [-1.0, -1.0, -1.0]]
    of_two = assembled.outcomes.of([2, 0]).parts_SK
    assert of_two is not None and of_two.tolist() == [[-1.0, -1.0, -1.0], [2.0, 1.0, 1.0]]
    assert assemble(GROUPS).outcomes.parts_SK is None


def test_a_part_that_no_grader_names_is_the_user_s_to_mend() -> None:
    with pytest.raises(ConfigError) as error:
        assemble([graded(1.0, {"boxed": 1.0})], reward_keys=["format", "acc", "boxed"])
    assert [str(each) for each in error.value.violations] == [
        f"algorithm.gdpo_reward_keys={name}: the grader of sums names no such part; it names ['boxed']. "
        "Write names of its own, acc or score, or let it answer with this one"
        for name in ("format", "acc")
    ]


def with_experts(episode: Episode, first: int, dtype: type[np.integer] = np.uint8) -> Episode:
    """Token t went to the experts ``first + t`` and ``first + t + 1`` of the first layer, and to 0 and 1 beyond."""
    tokens = first + np.arange(episode.num_tokens - 1)
    experts = np.stack([np.stack([tokens, tokens + 1], -1), np.tile([0, 1], (len(tokens), 1))], 1)
    return replace(episode, experts=experts.astype(dtype))


@pytest.mark.parametrize("dtype", [np.uint8, np.int16])
def test_experts_stand_at_the_tokens_that_went_to_them(dtype: type[np.integer]) -> None:
    """The last token of each episode went nowhere, and says so."""
    batch = assemble([with_experts(each, 10 * number, dtype) for number, each in enumerate(GROUPS)]).batch
    assert batch.routing_TLK is not None and batch.unrouted_T is not None
    assert batch.routing_TLK.numpy().dtype == dtype and batch.routing_TLK.shape == (13, 2, 2)
    assert batch.unrouted_T.int().tolist() == [0, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1]
    first_T = batch.routing_TLK[:, 0, 0]
    assert first_T[~batch.unrouted_T].tolist() == [0, 1, 2, 3, 10, 11, 12, 20, 21, 22]
    assert (batch.routing_TLK[:, 0, 1] == first_T + 1)[~batch.unrouted_T].all()
    assert (batch.routing_TLK[:, 1] == torch.tensor([0, 1]))[~batch.unrouted_T].all()
    without = assemble(GROUPS).batch
    assert without.routing_TLK is None and without.unrouted_T is None


def test_an_episode_has_the_experts_of_all_tokens_but_the_last() -> None:
    episode = with_experts(GROUPS[0], 0)
    assert episode.experts is not None
    with pytest.raises(AssertionError, match="experts of 3 of 5 tokens"):
        replace(episode, experts=episode.experts[:-1])


def test_pictures_of_all_segments_stand_at_their_places_in_the_whole() -> None:
    """One in the prompt, and one in what a tool said; an episode of text alone is among them."""
    grid = Grid(1, 2, 4)
    first, second = (Placed(ImageRef(key, key), place, grid) for key, place in (("a", 1), ("b", 0)))
    seen = answered(0, Score(1.0), (1, 9, 9, 2), (10, 11))
    prompt = replace(seen.segments[0], media=(first,))
    tool = replace(turn(Author.tool, (9, 9, 3)), media=(second,))
    seen = replace(seen, segments=(prompt, seen.segments[1], tool, turn(Author.model, (12,))))
    batch = assemble([seen, GROUPS[1]], pictures=True).batch
    assert batch.images_S == ((Picture("a", 2, 4, 2), Picture("b", 2, 4, 2)), ())
    assert batch.feature_T is not None and batch.positions_T3 is not None
    assert batch.feature_T.tolist() == [-1, 0, 1, -1, -1, -1, 2, 3, -1, -1, *[-1] * 4]
    assert batch.positions_T3[:, 2].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2, 3]
    assert batch.positions_T3[:, 1].tolist() == [0, 1, 1, 3, 4, 5, 6, 6, 8, 9, 0, 1, 2, 3]
    assert assemble(GROUPS).batch.positions_T3 is None
