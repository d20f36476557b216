"""Makes pairs of the responses that a step has drawn, for losses that compare two (DPO, SPIN); else changes nothing.

A pair is two episodes of one key, the preferred one first; they are trained, and of the other responses nothing is, so
that they are not even scored.  Each prompt, or each response where it is paired with its row's own answer, has a place
in the batch: where no pair can be made, its shortest response is there, untrained.  A minibatch thus always has as many
members as data-parallel ranks expect, and the prompt counts in no divisor.

A response without a trained token, one that was lost, and with ``algorithm.mask_truncated`` one that was cut off, are
in no pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from statistics import fmean

import numpy as np
from torch import Tensor

from mcore_rl.algorithms.advantages.pairs import Pair
from mcore_rl.config.algorithm import AlgorithmConfig
from mcore_rl.config.algorithm_object import Estimator, Scope
from mcore_rl.config.algorithm_registry import estimator
from mcore_rl.ground.types import NOT_DRAWN
from mcore_rl.rewards.score import Score
from mcore_rl.rollout.episodes import Author, Episode, FinishReason, Segment, prompt_segment


@dataclass(frozen=True)
class StepEpisodes:
    """What a step trains.

    episodes: prompt by prompt.  places: of each, its place among those that were drawn; None: its row's own answer.
    metrics: of its pairs; {} without pairs.
    """

    episodes: Sequence[Episode]
    places: Sequence[int | None]
    metrics: dict[str, float] = field(default_factory=dict)

    def of_drawn(self, trained_S: Tensor, num_drawn: int) -> list[int]:
        """The trained tokens of each of ``num_drawn`` episodes that were drawn.  trained_S: of ``episodes``."""
        counts = [0] * num_drawn
        for place, count in zip(self.places, trained_S.tolist(), strict=True):
            if place is not None:
                counts[place] = count
        return counts


@dataclass
class _Members:
    """What becomes of the groups so far: episodes with their places, and numbers of each pair."""

    episodes: list[Episode] = field(default_factory=list)
    places: list[int | None] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    same: list[bool] = field(default_factory=list)
    missing: int = 0

    def add(self, episode: Episode, place: int | None) -> None:
        self.episodes.append(episode)
        self.places.append(place)

    def add_pair(self, chosen: tuple[Episode, int | None], rejected: tuple[Episode, int | None]) -> None:
        key = len(self.same)
        for episode, place in (chosen, rejected):
            self.add(replace(episode, pair=key), place)
        self.same.append(np.array_equal(_response(chosen[0]), _response(rejected[0])))
        if chosen[1] is not None:
            self.gaps.append(chosen[0].reward - rejected[0].reward)


def in_pairs(episodes: Sequence[Episode], algorithm: AlgorithmConfig) -> StepEpisodes:
    """What is trained of ``episodes``, which are graded and in the order of their prompts."""
    chosen = estimator(algorithm.adv_estimator)
    if chosen.scope is not Scope.pair:
        return StepEpisodes(episodes, range(len(episodes)))
    assert not any(each.part for each in episodes), "preparation has refused programs"
    members = _Members()
    for _, group in groupby(enumerate(episodes), key=lambda each: each[1].group):
        _add_group(members, [*group], chosen, algorithm)
    count = len(members.same)
    metrics = {"pairs/count": float(count), "pairs/missing_share": members.missing / (count + members.missing)}
    if count:
        metrics["pairs/same_share"] = fmean(members.same)
    if members.gaps:
        metrics["pairs/score_gap"] = fmean(members.gaps)
    return StepEpisodes(members.episodes, members.places, metrics)


def _add_group(
    members: _Members, group: list[tuple[int, Episode]], chosen: Estimator, algorithm: AlgorithmConfig
) -> None:
    """The pairs of one prompt, and a response without a pair for each that is missing."""
    usable = [(place, each) for place, each in group if _is_usable(each, algorithm)]
    pairs: list[Pair] = chosen.load()([each.reward for _, each in usable])
    for pair in pairs:
        place, rejected = usable[pair.rejected]
        if pair.chosen is None:
            first: tuple[Episode, int | None] = (_own_answer(rejected), None)
        else:
            first = (usable[pair.chosen][1], usable[pair.chosen][0])
        members.add_pair(first, (rejected, place))
    wanted = len(group) if chosen.answers else 1
    assert len(pairs) <= wanted, f"{chosen.name} makes {len(pairs)} pairs of {len(group)} responses"
    paired = {usable[pair.rejected][0] for pair in pairs}
    others = sorted((each for each in group if each[0] not in paired), key=lambda each: each[1].num_tokens)
    for place, episode in others[: wanted - len(pairs)]:
        members.add(_untrained(episode), place)
        members.missing += 1


def _is_usable(episode: Episode, algorithm: AlgorithmConfig) -> bool:
    cut = episode.truncated and algorithm.mask_truncated
    return not cut and any(segment.trained and len(segment.tokens) for segment in episode.segments)


def _own_answer(episode: Episode) -> Episode:
    """The answer that the data has for the prompt of ``episode``, as if the model had said it."""
    row = episode.row
    assert row.answer, f"{row.id} has no answer of its own"
    tokens = np.asarray(row.answer, dtype=np.int32)
    logprobs = np.full(len(tokens), NOT_DRAWN, dtype=np.float32)
    said = Segment(author=Author.model, tokens=tokens, trained=True, logprobs=logprobs)
    return Episode(
        row=row,
        prompt_id=episode.prompt_id,
        group=episode.group,
        index=episode.index,
        segments=(prompt_segment(row), said),
        end=FinishReason.stop,
        score=Score(0.0),
    )


def _untrained(episode: Episode) -> Episode:
    segments = tuple(replace(each, trained=False, reward=None) for each in episode.segments)
    return replace(episode, segments=segments)


def _response(episode: Episode) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.concatenate([segment.tokens for segment in episode.segments[1:]])
