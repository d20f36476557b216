"""How a step's advantages are put together by the estimator that ``algorithm.adv_estimator`` names.

Tokens lie on many ranks, groups and whitening span all of them.  So an estimator is of one of two scopes, and each does
its part where what it needs is: ``Scope.sequence`` on the controller, which sees a score of each sequence;
``Scope.token`` on the ranks, each for its own sequences.  ``estimate`` is what the controller concludes, and tells the
ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_rl.algorithms.advantages.groups import PromptGroups
from mcore_rl.algorithms.advantages.inputs import AdvantageInputs, Advantages
from mcore_rl.algorithms.advantages.whiten import Whitening
from mcore_rl.algorithms.ragged import Spread, Spreads, at_tokens
from mcore_rl.config.algorithm import AlgorithmConfig
from mcore_rl.config.algorithm_object import CRITIC, Scope
from mcore_rl.config.algorithm_registry import estimator


def token_advantages(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages | None:
    """An estimator's of ``Scope.token``, not yet whitened; None of another.

    Any sequences: none depends on another.
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
    """What becomes of all advantages of a step.

    advantages_S: of every trained token of a sequence, as they are to be trained; None with an estimator of
    ``Scope.token``, whose own are to be whitened by ``whitening``, if any.
    spread: of all of them, as trained; None where there are none.
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
    """Of a whole step, by ``config.adv_estimator``, whitened where it or ``config.whiten_advantages`` says so.

    group_S: which prompt a sequence is a sample of.
    scores_S: sums of the rewards of its tokens.
    counts_S: its tokens whose advantages are trained, int64.
    of_tokens: of ``token_advantages``.
    members_S: tokens of each member of a group, int64, 0 of those who are none; None is ``counts_S``.
    parts_SK: of ``gdpo_reward_keys``, where the estimator needs ``parts``.

    The only member of a group gets 0 where groups are compared, and whitening leaves it out (``groups`` says why).
    """
    chosen = estimator(config.adv_estimator)
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
        compared_S = groups.has_siblings_S
        whitening = Whitening.of(Spreads.constant(advantages_S, counts_S * compared_S).total())
        advantages_S = torch.where(compared_S, whitening(advantages_S), 0)
    spread = Spreads.constant(advantages_S, counts_S).total()
    return BatchAdvantages(advantages_S=advantages_S, whitening=None, spread=spread)


def final_advantages(
    raw_T: Tensor | None, advantages_S: Tensor | None, whitening: Whitening | None, mask_T: Tensor, lengths: list[int]
) -> Tensor:
    """What is trained with, [T], 0 at untrained tokens.

    raw_T: of ``token_advantages``.
    advantages_S, whitening: of ``BatchAdvantages``.
    mask_T, lengths: of the same sequences as the others.
    """
    if advantages_S is not None:
        return torch.where(mask_T, at_tokens(advantages_S, lengths), 0)
    assert raw_T is not None
    return torch.where(mask_T, raw_T if whitening is None else whitening(raw_T), 0)


def estimate_advantages(
    inputs: AdvantageInputs, group_S: Tensor, config: AlgorithmConfig, parts_SK: Tensor | None = None
) -> Advantages:
    """Advantages of a whole step that is in one place: what all of the above comes to.

    Untrained tokens get 0.  Returns are never whitened.
    """
    found, of_tokens = token_advantages(inputs, config), None
    if found is not None:
        of_tokens = Spreads.of(inputs.trained.gather(found.advantages_T), inputs.counts_S)
    concluded = estimate(group_S, inputs.scores_S, inputs.counts_S, of_tokens, config, parts_SK=parts_SK)
    raw_T, returns_T = (None, None) if found is None else (found.advantages_T, found.returns_T)
    advantages_T = final_advantages(
        raw_T, concluded.advantages_S, concluded.whitening, inputs.mask_T, list(inputs.lengths_S)
    )
    return Advantages(advantages_T=advantages_T, returns_T=returns_T)
