"""Computes a step's advantages by the estimator that ``algorithm.adv_estimator`` names.

Tokens are spread over many ranks, while groups and whitening span all of them.  So an estimator has a scope, and runs
where its inputs are: ``Scope.sequence`` on the controller, which has one score per sequence; ``Scope.token`` on the
ranks, each for its own sequences (``token_advantages``).  ``Scope.pair`` makes no advantages (``pairs.py``).
``estimate`` runs on the controller in all cases; the controller sends its result to the ranks, which apply it
(``final_advantages``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_rl.algorithms.advantages.groups import PromptGroups
from mcore_rl.algorithms.advantages.inputs import AdvantageInputs, Advantages
from mcore_rl.algorithms.advantages.ragged import Spread, Spreads, at_tokens
from mcore_rl.config.algorithm import AlgorithmConfig
from mcore_rl.config.algorithm_object import CRITIC, Scope
from mcore_rl.config.algorithm_registry import estimator

EPSILON = 1e-8  # added to the variance, as in verl


@dataclass(frozen=True)
class Whitening:
    """``(x - mean) / deviation``, elementwise: mean and deviation of the global batch, computed once."""

    mean: float
    deviation: float

    @classmethod
    def of(cls, spread: Spread | None) -> Whitening:
        """The whitening by the mean and ``sqrt(variance + 1e-8)`` of all advantages.  spread: None if there are none.

        The variance is unbiased (Bessel's correction), as in verl; OpenAI's baselines divide by the count.  A single
        value becomes 0, and so do equal values.
        """
        if spread is None:
            return cls(0.0, 1.0)
        unbiased = spread.variance * spread.count / max(spread.count - 1, 1)
        return cls(spread.mean, math.sqrt(unbiased + EPSILON))

    def __call__(self, x: Tensor) -> Tensor:
        """``x`` whitened, elementwise, in the dtype of ``x``."""
        return (x - self.mean) / self.deviation

    def of_spread(self, spread: Spread) -> Spread:
        """The statistics after whitening of values whose statistics were ``spread``."""
        return Spread(
            count=spread.count,
            mean=(spread.mean - self.mean) / self.deviation,
            variance=spread.variance / self.deviation**2,
            low=(spread.low - self.mean) / self.deviation,
            high=(spread.high - self.mean) / self.deviation,
        )


def token_advantages(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages | None:
    """The advantages of an estimator of ``Scope.token``, not yet whitened; None if the estimator has another scope.

    inputs: any subset of a step's sequences, since none depends on another.
    """
    chosen = estimator(config.adv_estimator)
    assert CRITIC not in chosen.roles or inputs.values_T is not None, f"{config.adv_estimator} needs values_T"
    assert not chosen.greedy or inputs.greedy_S is not None, f"{config.adv_estimator} needs greedy_S"
    if chosen.scope is not Scope.token:
        return None
    of_tokens: Callable[[AdvantageInputs, AlgorithmConfig], Advantages] = chosen.load()
    return of_tokens(inputs, config)


@dataclass(frozen=True, kw_only=True)
class BatchAdvantages:
    """What the controller estimates for a whole step; ``final_advantages`` applies it.

    advantages_S: one advantage per sequence, final, for each of its trained tokens; None with an estimator of
    ``Scope.token``, whose advantages the ranks have, or of ``Scope.pair``.
    whitening: how the ranks whiten these; None: not at all.
    spread: statistics of all final advantages of the step; None if no token is trained, or there are none.
    """

    advantages_S: Tensor | None
    whitening: Whitening | None
    spread: Spread | None


def estimate(
    group_S: Tensor,
    scores_S: Tensor,
    counts_S: Tensor,
    of_tokens: Spreads | None,
    config: AlgorithmConfig,
    *,
    members_S: Tensor | None = None,
    parts_SK: Tensor | None = None,
) -> BatchAdvantages:
    """The advantages of a whole step, whitened if the estimator or ``config.whiten_advantages`` says so.

    group_S: the number of the prompt that a sequence is a sample of.
    scores_S: the sum of the rewards of its tokens.
    counts_S: the number of its tokens whose advantages are trained, int64.
    of_tokens: statistics of the advantages that ``token_advantages`` gave; required with ``Scope.token``.
    members_S: tokens of a sequence that is a member of its group, else 0, int64; None is ``counts_S``.
    parts_SK: the scores that ``gdpo_reward_keys`` names; required if the estimator needs ``parts``.

    The only member of a group gets 0 from estimators that compare groups, and whitening leaves it out (``groups.py``
    says why).
    """
    chosen = estimator(config.adv_estimator)
    if chosen.scope is Scope.pair:
        return BatchAdvantages(advantages_S=None, whitening=None, spread=None)
    whitens = chosen.whitens or config.whiten_advantages
    if chosen.scope is Scope.token:
        assert of_tokens is not None, f"{config.adv_estimator} is made of tokens"
        raw = of_tokens.total()
        if not whitens:
            return BatchAdvantages(advantages_S=None, whitening=None, spread=raw)
        whitening = Whitening.of(raw)
        return BatchAdvantages(advantages_S=None, whitening=whitening, spread=raw and whitening.of_spread(raw))
    assert not chosen.parts or parts_SK is not None, f"{config.adv_estimator} needs parts_SK"
    groups = PromptGroups.of(group_S, scores_S, counts_S if members_S is None else members_S, parts_SK)
    of_groups: Callable[[PromptGroups, AlgorithmConfig], Tensor] = chosen.load()
    advantages_S = of_groups(groups, config)
    if whitens:
        compared_S = groups.has_siblings_S if chosen.min_group > 1 else groups.member_S
        whitening = Whitening.of(Spreads.constant(advantages_S, counts_S * compared_S).total())
        advantages_S = torch.where(compared_S, whitening(advantages_S), 0)
    spread = Spreads.constant(advantages_S, counts_S).total()
    return BatchAdvantages(advantages_S=advantages_S, whitening=None, spread=spread)


def final_advantages(
    raw_T: Tensor | None,
    advantages_S: Tensor | None,
    whitening: Whitening | None,
    mask_T: Tensor,
    lengths: list[int],
    teacher_T: Tensor | None = None,
) -> Tensor:
    """The advantages with which the tokens are trained, [T], 0 at untrained tokens.

    raw_T: from ``token_advantages``; None with an estimator of ``Scope.sequence``.
    advantages_S, whitening: from ``BatchAdvantages``, for the sequences at hand.
    mask_T, lengths: trained tokens, and tokens per sequence, of the same sequences.
    teacher_T: a teacher's part, which is added to what the estimator gives as it is; None without a teacher.
    """
    if advantages_S is not None:
        advantages_T = at_tokens(advantages_S, lengths)
    else:
        assert raw_T is not None
        advantages_T = raw_T if whitening is None else whitening(raw_T)
    return torch.where(mask_T, advantages_T if teacher_T is None else advantages_T + teacher_T, 0)


def estimate_advantages(
    inputs: AdvantageInputs, group_S: Tensor, config: AlgorithmConfig, parts_SK: Tensor | None = None
) -> Advantages:
    """The advantages of a whole step that is in one process; the same as the functions above on many ranks.

    Untrained tokens get 0.  Returns are never whitened.
    """
    raw = token_advantages(inputs, config)
    of_tokens = None
    if raw is not None:
        of_tokens = Spreads.of(inputs.trained.gather(raw.advantages_T), inputs.counts_S)
    concluded = estimate(group_S, inputs.scores_S, inputs.counts_S, of_tokens, config, parts_SK=parts_SK)
    raw_T, returns_T = (None, None) if raw is None else (raw.advantages_T, raw.returns_T)
    advantages_T = final_advantages(
        raw_T, concluded.advantages_S, concluded.whitening, inputs.mask_T, list(inputs.lengths_S)
    )
    return Advantages(advantages_T=advantages_T, returns_T=returns_T)
