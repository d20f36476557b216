"""PRIME without its normalization (arXiv:2502.01456) as a user writes it: one file, given to ``algorithm=FILE.py``.

A trained role, ``verifier``, learns from outcomes.  Its log-ratio to a frozen copy of itself rewards the policy's
tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from mcore_rl.algorithms.advantages.inputs import AdvantageInputs, Advantages
from mcore_rl.algorithms.advantages.ragged import discounted_sums
from mcore_rl.algorithms.losses.token_losses import masked_sum, trained_rows
from mcore_rl.algorithms.role_loss import RoleLoss
from mcore_rl.config.algorithm import AlgorithmConfig
from mcore_rl.config.algorithm_object import Estimator, Scope
from mcore_rl.config.algorithms.grpo import GRPO
from mcore_rl.config.bounds import PositiveFloat
from mcore_rl.config.role import Role
from mcore_rl.config.roles import LossAggregation, TrainedModelConfig
from mcore_rl.config.stages import OUTCOME, TOKEN_REWARDS, OnRanks, StepStage
from mcore_rl.ground.types import LossInputs, LossSums, TrainBatch


@dataclass(kw_only=True)
class VerifierConfig(TrainedModelConfig):
    """beta: what a nat of log-ratio is worth."""

    beta: PositiveFloat = 0.05
    loss_agg_mode: LossAggregation = LossAggregation.seq_mean_token_sum


@dataclass(frozen=True)
class OutcomeLoss(RoleLoss):
    """Cross entropy on the outcome of each response, whose logit is ``beta`` times its log-ratio."""

    config: VerifierConfig

    def __call__(self, inputs: LossInputs) -> LossSums:
        inputs = trained_rows(inputs)
        assert inputs.logprobs_N is not None
        logit_S = self.config.beta * inputs.sequence_sums(inputs.logprobs_N - inputs.extra_N["verifier_copy_N"])
        right_S = torch.zeros_like(logit_S)
        right_S[: inputs.num_sequences] = inputs.extra_S[OUTCOME].to(logit_S)
        loss_S = binary_cross_entropy_with_logits(logit_S, right_S, reduction="none")
        says_right_N = inputs.expand(torch.sigmoid(logit_S.detach()))
        metrics = {"verifier/says_right": masked_sum(says_right_N, inputs.mask_N)}
        return LossSums(total=(loss_S * inputs.own_shares(logit_S.dtype)).sum(), metrics=metrics)


def verifier_stages(role: Role, run: Any) -> Sequence[StepStage]:
    """It rewards the responses, and then learns from their outcomes."""
    copy = role.copy_scores("verifier_copy_T", sampled=False)
    scores = role.scores("verifier_T", sampled=False)
    return [copy, scores, role.update("verifier_copy_T", "verifier_T", OUTCOME, whole=True, sampled=False)]


def token_rewards(batch: TrainBatch, values: Mapping[str, Tensor], run: Any) -> dict[str, Tensor]:
    """The rewards of tokens, ``beta`` times the log-ratio."""
    ratio_T = batch.extra_T["verifier_T"] - batch.extra_T["verifier_copy_T"]
    return {TOKEN_REWARDS: run.verifier.beta * ratio_T}


def returns(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages:
    """The sum of the rewards from a token on; whitened later."""
    returns_M = discounted_sums(inputs.trained.gather(inputs.rewards_T), inputs.counts_S, 1.0)
    return Advantages(advantages_T=inputs.trained.scatter(returns_M))


VERIFIER = Role(
    name="verifier",
    trains=True,
    weights="verifier.path",
    config=VerifierConfig,
    stages=verifier_stages,
    keeps_copy=True,
    loss=OutcomeLoss,
)
VERIFIED = replace(
    GRPO,
    name="verified",
    title="Verified",
    about="a reward model of tokens learns from outcomes beside the policy",
    paper="arXiv:2502.01456, without its normalization",
    kl=None,
    advantages=Estimator(
        name="verified",
        function=returns,
        scope=Scope.token,
        formula="the sum of rewards from t on; whitened",
        paper="arXiv:2502.01456",
        roles=(VERIFIER,),
        stages=(OnRanks(function=token_rewards, reads=("tokens_T", "mask_T", "verifier_T", "verifier_copy_T"),
                        makes=(TOKEN_REWARDS,)),),
        whitens=True,
    ),
)  # fmt: skip
