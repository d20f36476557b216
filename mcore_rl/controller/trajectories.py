"""Graded responses, and the batch that they become: ragged, no padding, one sequence each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from mcore_rl.data.prompts import PromptRow
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
    scores_S: Tensor
    truncated_S: Tensor
    greedy_S: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """Prompts and responses."""
        return int(self.batch.tokens_T.numel())


def assemble(trajectories: Sequence[Trajectory], greedy: Sequence[float] | None = None) -> Groups:
    """Sequences of prompt and response tokens, the response tokens trained; in the order of ``trajectories``.

    greedy: score of the greedy response to each group's prompt, by group number.
    """
    tokens, masks, logprobs, lengths = [], [], [], []
    for trajectory in trajectories:
        prompt, response = trajectory.row.tokens, trajectory.sample.tokens
        tokens += [np.asarray(prompt, dtype=np.int64), response.astype(np.int64)]
        masks += [np.zeros(len(prompt), dtype=bool), np.ones(len(response), dtype=bool)]
        logprobs += [np.zeros(len(prompt), dtype=np.float32), trajectory.sample.logprobs]
        lengths.append(len(prompt) + len(response))
    batch = TrainBatch(
        lengths_S=tuple(lengths),
        tokens_T=torch.from_numpy(np.concatenate(tokens)),
        mask_T=torch.from_numpy(np.concatenate(masks)),
        rollout_logprobs_T=torch.from_numpy(np.concatenate(logprobs)),
    )
    groups = [trajectory.group for trajectory in trajectories]
    return Groups(
        trajectories=tuple(trajectories),
        batch=batch,
        group_S=torch.tensor(groups),
        scores_S=torch.tensor([trajectory.score.value for trajectory in trajectories], dtype=torch.float32),
        truncated_S=torch.tensor([trajectory.truncated for trajectory in trajectories]),
        greedy_S=None if greedy is None else torch.tensor([greedy[group] for group in groups], dtype=torch.float32),
    )


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
    return [
        {
            "step": step,
            "data_source": each.row.data_source,
            "prompt_id": each.row.id,
            "sample": each.sample.index,
            "prompt": tokenizer.decode(list(each.row.tokens), skip_special_tokens=True),
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
