"""Graded responses, and the batch that they become: ragged, no padding, one sequence each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from mcore_rl.algorithms.lesson import Outcomes
from mcore_rl.data.prompts import PromptRow
from mcore_rl.errors import Violation, refuse_if_any
from mcore_rl.rewards.score import RewardRequest, Score
from mcore_rl.rollout.protocol import FinishReason, Sample
from mcore_rl.types import TrainBatch


@dataclass(frozen=True, kw_only=True, eq=False)
class Trajectory:
    """A response, its prompt and its score.  group: number of the prompt within the step."""

    row: PromptRow
    group: int
    sample: Sample
    score: Score

    @property
    def truncated(self) -> bool:
        """Cut off at its limit."""
        return self.sample.finish is FinishReason.length


@dataclass(frozen=True, kw_only=True)
class Groups:
    """All trajectories of one step, prompt by prompt, and their batch; see ``assemble``."""

    trajectories: tuple[Trajectory, ...]
    batch: TrainBatch
    group_S: Tensor
    outcomes: Outcomes

    @property
    def num_trained(self) -> int:
        """Tokens of responses."""
        return int(np.count_nonzero(self.batch.mask_T.numpy()))


def assemble(
    trajectories: Sequence[Trajectory], greedy: Sequence[float] | None = None, reward_keys: Sequence[str] = ()
) -> Groups:
    """Sequences of prompt and response tokens, the response tokens trained; in the order of ``trajectories``.

    Args:
        trajectories: those of a prompt follow one another.
        greedy: score of the greedy response to each group's prompt, by group number.
        reward_keys: parts of the score that advantages are made of (``algorithm.gdpo_reward_keys``).

    Raises:
        ConfigError: a grader does not name one of ``reward_keys``.
    """
    lengths = [len(each.row.tokens) + len(each.sample.tokens) for each in trajectories]
    tokens_T = np.empty(sum(lengths), dtype=np.int32)
    mask_T, logprobs_T = np.empty(len(tokens_T), dtype=bool), np.empty(len(tokens_T), dtype=np.float32)
    prompt, row, end = np.empty(0, dtype=np.int32), None, 0
    for each in trajectories:
        if each.row is not row:  # the samples of a prompt follow one another
            prompt, row = np.asarray(each.row.tokens, dtype=np.int32), each.row
        start, end = end + len(prompt), end + len(prompt) + len(each.sample.tokens)
        tokens_T[start - len(prompt) : start], tokens_T[start:end] = prompt, each.sample.tokens
        mask_T[start - len(prompt) : start], mask_T[start:end] = False, True
        logprobs_T[start - len(prompt) : start], logprobs_T[start:end] = 0, each.sample.logprobs
    batch = TrainBatch(
        lengths_S=tuple(lengths),
        tokens_T=torch.from_numpy(tokens_T),
        mask_T=torch.from_numpy(mask_T),
        rollout_logprobs_T=torch.from_numpy(logprobs_T),
    )
    groups = [trajectory.group for trajectory in trajectories]
    return Groups(
        trajectories=tuple(trajectories),
        batch=batch,
        group_S=torch.tensor(groups),
        outcomes=Outcomes(
            scores_S=torch.tensor([trajectory.score.value for trajectory in trajectories], dtype=torch.float32),
            truncated_S=torch.tensor([trajectory.truncated for trajectory in trajectories]),
            greedy_S=None if greedy is None else torch.tensor([greedy[group] for group in groups], dtype=torch.float32),
            parts_SK=_parts(trajectories, reward_keys) if reward_keys else None,
        ),
    )


def _parts(trajectories: Sequence[Trajectory], names: Sequence[str]) -> Tensor:
    """Each named part of each score, [S, K]; of a response that could not be graded, its score."""
    graded = [each for each in trajectories if each.score.error is None]
    missing = {name: each for each in graded for name in names if each.score.named(name) is None}
    refuse_if_any(
        [
            Violation(
                "algorithm.gdpo_reward_keys",
                name,
                f"the grader of {each.row.data_source} names no such part; it names {sorted(each.score.parts)}",
                "Write names of its own, acc or score, or let it answer with this one",
            )
            for name, each in missing.items()
        ]
    )
    rows = [
        [each.score.value if each.score.error else each.score.named(name) for name in names] for each in trajectories
    ]
    return torch.tensor(rows, dtype=torch.float32)


def reward_request(row: PromptRow, sample: Sample, max_tokens: int) -> RewardRequest:
    """What a grader is told of a response."""
    return RewardRequest(
        key=(sample.prompt_id, sample.index),
        data_source=row.data_source,
        response=sample.text,
        ground_truth=row.ground_truth,
        extra_info={**row.columns, **row.extra_info},
        num_tokens=len(sample.tokens),
        max_tokens=max_tokens,
        truncated=sample.finish is FinishReason.length,
    )


def sample_rows(
    step: int, trajectories: Sequence[Trajectory], tokenizer: PreTrainedTokenizerBase
) -> list[dict[str, Any]]:
    """What is kept of each response, to be read by people."""
    prompts = {
        tokens: tokenizer.decode(np.asarray(tokens), skip_special_tokens=True)
        for tokens in dict.fromkeys(each.row.tokens for each in trajectories)
    }
    return [
        {
            "step": step,
            "data_source": each.row.data_source,
            "prompt_id": each.row.id,
            "sample": each.sample.index,
            "prompt": prompts[each.row.tokens],
            "response": each.sample.text,
            "score": each.score.value,
            "correct": each.score.correct,
            "ground_truth": each.row.ground_truth,
            "num_tokens": len(each.sample.tokens),
            "finish": each.sample.finish.value,
            "version": each.sample.versions[-1].version if each.sample.versions else step,
            "error": each.score.error,
        }
        for each in trajectories
    ]
