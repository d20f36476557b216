"""Assembles graded episodes into a batch: ragged, without padding, one sequence per episode."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mcore_rl.algorithms.step_batch import StepBatch
from mcore_rl.algorithms.token_advantages import Outcomes
from mcore_rl.config.roles import Teachers
from mcore_rl.config.stages import OUTCOME
from mcore_rl.data.media.batch import with_pictures
from mcore_rl.data.pairs import units_of
from mcore_rl.ground.errors import Violation, refuse_if_any
from mcore_rl.ground.types import TAUGHT_BY, TrainBatch
from mcore_rl.rewards.score import Score
from mcore_rl.rollout.episodes import Episode, Segment


def assemble(
    episodes: Sequence[Episode],
    greedy: Sequence[float] | None = None,
    reward_keys: Sequence[str] = (),
    *,
    with_outcomes: bool = False,
    teachers: Teachers | None = None,
    pictures: bool = False,
) -> StepBatch:
    """Packs the tokens of all segments end to end; those of trained segments are trained.

    greedy: the reward of the greedy response to each group's prompt, by group number; None: the algorithm needs none.
    reward_keys: the parts of the score from which advantages are computed (``algorithm.gdpo_reward_keys``).
    with_outcomes: a stage reads whether responses are right.
    teachers: of the run; of several, the batch says which each sequence has.
    pictures: whether models are given the pictures of episodes.
    Raises ConfigError if a grader does not give one of ``reward_keys``, or an outcome is not in [0, 1].
    """
    segments = [segment for episode in episodes for segment in episode.segments]
    tokens_T = np.concatenate([segment.tokens for segment in segments])
    mask_T = np.zeros(len(tokens_T), dtype=bool)
    logprobs_T = np.zeros(len(tokens_T), dtype=np.float32)
    end = 0
    for segment in segments:
        start = end
        end = end + len(segment.tokens)
        if segment.trained:
            mask_T[start:end], logprobs_T[start:end] = True, segment.logprobs
    routing_TLK, unrouted_T = _routes(episodes)
    extra_S = {OUTCOME: _outcomes(episodes)} if with_outcomes else {}
    taught_by = teachers.names if teachers is not None and teachers.are_several else ()
    if teachers is not None and taught_by:
        extra_S[TAUGHT_BY] = torch.tensor([float(teachers.name_of(each.row.data_source)) for each in episodes])
    batch = TrainBatch(
        lengths_S=tuple(episode.num_tokens for episode in episodes),
        tokens_T=torch.from_numpy(tokens_T),
        mask_T=torch.from_numpy(mask_T),
        rollout_logprobs_T=torch.from_numpy(logprobs_T),
        turn_rewards_T=_turn_rewards(segments),
        routing_TLK=routing_TLK,
        unrouted_T=unrouted_T,
        pairs_S=_pairs(episodes),
        extra_S=extra_S,
    )
    if pictures:
        batch = with_pictures(batch, [episode.media for episode in episodes])
    groups = [episode.group for episode in episodes]
    return StepBatch(
        batch=batch,
        group_S=torch.tensor(groups),
        sample_S=_samples(episodes),
        taught_by=taught_by,
        outcomes=Outcomes(
            scores_S=torch.tensor([episode.graded.value for episode in episodes], dtype=torch.float32),
            truncated_S=torch.tensor([episode.truncated for episode in episodes]),
            greedy_S=None if greedy is None else torch.tensor([greedy[group] for group in groups], dtype=torch.float32),
            parts_SK=_parts(episodes, reward_keys) if reward_keys else None,
        ),
    )


def _outcomes(episodes: Sequence[Episode]) -> Tensor:
    """Whether each answer is right, 0 to 1, or its score without the overlong penalty if the grader does not say."""
    values = [_outcome(each.graded) for each in episodes]
    outside = {each.row.data_source: value for each, value in zip(episodes, values, strict=True) if not 0 <= value <= 1}
    refuse_if_any(
        [
            Violation(
                f"the outcome of {source}",
                value,
                "is not in [0, 1], and the process reward model learns the probability of a right answer",
                "Let the grader answer with acc as well: docs/rewards.md",
            )
            for source, value in outside.items()
        ]
    )
    return torch.tensor(values, dtype=torch.float32)


def _outcome(score: Score) -> float:
    return score.value - score.overlong if score.correct is None else score.correct


def _parts(episodes: Sequence[Episode], names: Sequence[str]) -> Tensor:
    """Each named part of each score, [S, K]; for a response that could not be graded, its score in all K."""
    graded = [each for each in episodes if each.graded.error is None]
    missing = {name: each for each in graded for name in names if each.graded.named(name) is None}
    refuse_if_any(
        [
            Violation(
                "algorithm.gdpo_reward_keys",
                name,
                f"the grader of {each.row.data_source} names no such part; it names {sorted(each.graded.parts)}",
                "Write names of its own, acc or score, or let it answer with this one",
            )
            for name, each in missing.items()
        ]
    )
    scores = [each.graded for each in episodes]
    rows = [[score.value if score.error else score.named(name) for name in names] for score in scores]
    return torch.tensor(rows, dtype=torch.float32)


def _routes(episodes: Sequence[Episode]) -> tuple[Tensor | None, Tensor | None]:
    """(experts to repeat [T, L, K]; the tokens [T] without any, the last of each episode); None: there are none."""
    first = episodes[0].experts
    if first is None:
        return None, None
    num_tokens = sum(episode.num_tokens for episode in episodes)
    routing_TLK = np.zeros((num_tokens, *first.shape[1:]), first.dtype)
    unrouted_T = np.zeros(num_tokens, dtype=bool)
    end = 0
    for episode in episodes:
        assert episode.experts is not None, f"{episode.prompt_id} has no experts, and others have"
        start = end
        end = end + episode.num_tokens
        routing_TLK[start : end - 1], unrouted_T[end - 1] = episode.experts, True
    return torch.from_numpy(routing_TLK), torch.from_numpy(unrouted_T)


def _turn_rewards(segments: Sequence[Segment]) -> Tensor | None:
    """[T], each segment's reward at its last token; None if no segment has one."""
    rewarded = [place for place, each in enumerate(segments) if each.reward is not None and len(each.tokens)]
    if not rewarded:
        return None
    ends = np.cumsum([len(segment.tokens) for segment in segments])
    turn_rewards_T = torch.zeros(int(ends[-1]))
    turn_rewards_T[ends[rewarded] - 1] = torch.tensor([segments[place].reward for place in rewarded])
    return turn_rewards_T


def _samples(episodes: Sequence[Episode]) -> Tensor | None:
    """``StepBatch.sample_S``: the other conversations of a sample follow its first."""
    firsts = [episode.part == 0 for episode in episodes]
    return None if all(firsts) else torch.tensor(firsts).cumsum(0) - 1


def _pairs(episodes: Sequence[Episode]) -> tuple[int | None, ...] | None:
    """``TrainBatch.pairs_S``.  A minibatch has whole groups, so a pair within a group is in one minibatch."""
    keys = tuple(episode.pair for episode in episodes)
    if not any(key is not None for key in keys):
        return None
    for unit in units_of(keys):
        assert len({episodes[place].group for place in unit}) == 1, f"pair {keys[unit[0]]} is of two prompts"
    return keys
