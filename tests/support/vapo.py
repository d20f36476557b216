"""VAPO (arXiv:2504.05118) as a user writes it: one file, given to ``algorithm=FILE.py``.

Two lambdas: the critic learns from returns with lambda 1, the policy from advantages with ``1 - 1 / (alpha l)`` for a
response of l tokens (section 4.1, 4.2).  Right answers are imitated too (section 4.3).  Both numbers are keys.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from mcore_rl.algorithms.advantages.gae import temporal_differences
from mcore_rl.algorithms.advantages.inputs import AdvantageInputs, Advantages
from mcore_rl.algorithms.advantages.ragged import discounted_sums
from mcore_rl.algorithms.losses.ppo_clip import ppo_clip
from mcore_rl.algorithms.losses.token_losses import TokenLosses, masked_sum
from mcore_rl.config.algorithm import AlgorithmConfig
from mcore_rl.config.algorithm_object import PolicyLoss
from mcore_rl.config.algorithms.ppo import GAE, PPO
from mcore_rl.config.bounds import NonNegativeFloat, PositiveFloat
from mcore_rl.config.clipping import PpoClipConfig
from mcore_rl.ground.types import LossInputs


@dataclass(kw_only=True)
class TwoLambdasConfig(AlgorithmConfig):
    """alpha: how fast the policy's lambda approaches 1 as responses grow."""

    alpha: PositiveFloat = 0.05


@dataclass(kw_only=True)
class ImitatingConfig(PpoClipConfig):
    """imitation_coef: mu, the weight of ``-log p`` of the tokens of right answers."""

    imitation_coef: NonNegativeFloat = 0.1


def two_lambdas(inputs: AdvantageInputs, config: TwoLambdasConfig) -> Advantages:
    """``A_t = delta_t + lambda_l A_{t+1}`` for the policy; ``A_t + V_t`` with lambda 1 for the critic; gamma is 1."""
    deltas_M, values_M = temporal_differences(inputs, 1.0)
    returns_M = discounted_sums(deltas_M.clone(), inputs.counts_S, 1.0) + values_M
    advantages_M = torch.empty_like(deltas_M)
    end = 0
    for count in inputs.counts_S.tolist():
        start, end, later = end, end + count, 0.0
        decay = max(0.0, 1 - 1 / (config.alpha * max(1, count)))
        for place in reversed(range(start, end)):
            later = float(deltas_M[place]) + decay * later
            advantages_M[place] = later
    return Advantages(advantages_T=inputs.trained.scatter(advantages_M), returns_T=inputs.trained.scatter(returns_M))


def with_imitation(inputs: LossInputs, config: ImitatingConfig) -> TokenLosses:
    """The clipped surrogate, and ``-mu log p`` of the tokens of right answers, which is reported without ``mu``."""
    clipped = ppo_clip(inputs, config)
    assert inputs.logprobs_N is not None
    outcome_S = torch.cat([inputs.extra_S["outcome_S"].to(inputs.logprobs_N), inputs.logprobs_N.new_zeros(1)])
    right_N = outcome_S[inputs.sequence_N]  # padding, -1, finds the zero at the end
    imitation_N = -right_N * inputs.logprobs_N
    metrics = clipped.metrics | {"actor/imitation_loss": masked_sum(imitation_N.detach(), inputs.mask_N)}
    return TokenLosses(loss_N=clipped.loss_N + config.imitation_coef * imitation_N, metrics=metrics)


VAPO = replace(
    PPO,
    name="vapo",
    title="VAPO",
    about="two lambdas, and right answers are imitated",
    paper="arXiv:2504.05118",
    advantages=replace(
        GAE, name="vapo", function=two_lambdas, formula="`A_t = delta_t + lambda_l A_{t+1}`", settings=TwoLambdasConfig
    ),
    loss=PolicyLoss(
        name="vapo",
        function=with_imitation,
        formula="PPO's, less `mu log p` of right answers",
        paper="arXiv:2504.05118",
        fields=("outcome_S",),
        settings=ImitatingConfig,
    ),
    settings={name: value for name, value in PPO.settings.items() if not name.endswith(("gamma", "lam"))},
)
