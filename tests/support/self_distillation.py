"""Self-distillation as a user writes it, one file: the teacher is the policy itself, which is told the right answer.

A token's advantage is what the answer adds to its log-prob: ``log p(y_t | hint, x, y_<t) - log p(y_t | x, y_<t)``, as
in on-policy distillation with another teacher.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mcore_rl.algorithms.advantages.inputs import AdvantageInputs, Advantages
from mcore_rl.config.algorithm import AlgorithmConfig
from mcore_rl.config.algorithm_object import Estimator, Scope
from mcore_rl.config.algorithms.distill import DISTILL
from mcore_rl.config.stages import TOKEN_REWARDS, TOKENS, OnRanks, Pass
from mcore_rl.ground.types import TrainBatch
from mcore_rl.rollout.episodes import Episode


@dataclass(kw_only=True)
class HintConfig(AlgorithmConfig):
    """hint: what the teacher is told behind the question; {answer} is the right answer.  None: nothing."""

    hint: str | None = " The answer is {answer}."


def with_answer(episode: Episode, group: Sequence[Episode], run: Any) -> list[dict[str, Any]] | None:
    """The row's messages, the last with the hint behind it."""
    if run.algorithm.hint is None:
        return None
    *before, question = episode.row.messages
    hint = run.algorithm.hint.format(answer=episode.row.ground_truth)
    return [*before, {**question, "content": question["content"] + hint}]


def what_it_adds(batch: TrainBatch, values: Mapping[str, Tensor], run: Any) -> dict[str, Tensor]:
    """What the hint adds to the log-prob of each token."""
    assert batch.old_logprobs_T is not None
    return {TOKEN_REWARDS: batch.extra_T["told_logprobs_T"] - batch.old_logprobs_T}


def token_rewards_alone(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages:
    """The rewards of tokens; the score of the whole is measured, and not learnt from."""
    assert inputs.process_T is not None
    return Advantages(advantages_T=torch.where(inputs.mask_T, inputs.process_T, 0))


SELF_DISTILLATION = replace(
    DISTILL,
    name="self_distillation",
    title="Self-distillation",
    about="the policy, told the right answer, teaches the policy that is not",
    paper="none: an example",
    teacher=None,
    advantages=Estimator(
        name="self_distillation",
        function=token_rewards_alone,
        scope=Scope.token,
        formula="`log p(y_t | hint, x, y_<t) - log p(y_t | x, y_<t)`",
        paper="none: an example",
        refuses_kl="learns from no score of the whole",
        settings=HintConfig,
        stages=(
            Pass(
                role="self_teacher",
                group="actor",
                makes=("told_logprobs_T",),
                phase="self_teacher_scores",
                context=with_answer,
            ),
            OnRanks(
                function=what_it_adds,
                reads=(*TOKENS, "told_logprobs_T", "old_logprobs_T"),
                makes=(TOKEN_REWARDS,),
            ),
        ),
    ),
)
