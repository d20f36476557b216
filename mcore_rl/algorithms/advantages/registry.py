"""Every advantage estimator by name, what it needs, where it comes from, and how a step's advantages are put together.

Tokens lie on many ranks, groups and whitening span all of them.  So an estimator is one of two kinds, and each does its
part where what it needs is: ``PerSequence`` on the controller, which sees a score of each sequence; ``PerToken`` on the
ranks, each for its own sequences.  ``estimate`` is what the controller concludes, and tells the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mcore_rl.algorithms.advantages.dr_grpo import dr_grpo
from mcore_rl.algorithms.advantages.gae import gae
from mcore_rl.algorithms.advantages.gdpo import gdpo
from mcore_rl.algorithms.advantages.gpg import gpg
from mcore_rl.algorithms.advantages.groups import PromptGroups
from mcore_rl.algorithms.advantages.grpo import grpo
from mcore_rl.algorithms.advantages.inputs import AdvantageInputs, Advantages
from mcore_rl.algorithms.advantages.lite_ppo import lite_ppo
from mcore_rl.algorithms.advantages.opo import opo
from mcore_rl.algorithms.advantages.reinforce_plus_plus import reinforce_plus_plus
from mcore_rl.algorithms.advantages.reinforce_plus_plus_baseline import reinforce_plus_plus_baseline
from mcore_rl.algorithms.advantages.remax import remax
from mcore_rl.algorithms.advantages.rloo import rloo
from mcore_rl.algorithms.advantages.whiten import Whitening
from mcore_rl.algorithms.ragged import Spread, Spreads, at_tokens
from mcore_rl.config.algorithm import AdvEstimator, AlgorithmConfig

Need = Literal["values", "group", "greedy", "parts"]


@dataclass(frozen=True, kw_only=True)
class PerSequence:
    """One estimator whose advantages are the same for every token of a response.

    fn: of all sequences.  needs: a ``group`` of two or more samples of each prompt, ``parts`` of the reward.  whitens:
    whether its result is whitened whatever ``whiten_advantages`` says.
    """

    fn: Callable[[PromptGroups, AlgorithmConfig], Tensor]
    needs: frozenset[Need]
    paper: str
    whitens: bool = False


@dataclass(frozen=True, kw_only=True)
class PerToken:
    """One estimator whose advantages differ within a response, and depend on no other response.

    needs: ``values`` of a critic, the score of a ``greedy`` response.  whitens: see ``PerSequence``.
    """

    fn: Callable[[AdvantageInputs, AlgorithmConfig], Advantages]
    needs: frozenset[Need]
    paper: str
    whitens: bool = False


VALUES: frozenset[Need] = frozenset({"values"})
GROUP: frozenset[Need] = frozenset({"group"})
GREEDY: frozenset[Need] = frozenset({"greedy"})
PARTS: frozenset[Need] = frozenset({"group", "parts"})
NOTHING: frozenset[Need] = frozenset()

ADVANTAGES: dict[AdvEstimator, PerSequence | PerToken] = {
    AdvEstimator.gae: PerToken(fn=gae, needs=VALUES, paper="arXiv:1506.02438", whitens=True),
    AdvEstimator.grpo: PerSequence(fn=grpo, needs=GROUP, paper="arXiv:2402.03300"),
    AdvEstimator.dr_grpo: PerSequence(fn=dr_grpo, needs=GROUP, paper="arXiv:2503.20783"),
    AdvEstimator.rloo: PerSequence(fn=rloo, needs=GROUP, paper="arXiv:2402.14740"),
    AdvEstimator.reinforce_plus_plus: PerToken(
        fn=reinforce_plus_plus, needs=NOTHING, paper="arXiv:2501.03262", whitens=True
    ),
    AdvEstimator.reinforce_plus_plus_baseline: PerSequence(
        fn=reinforce_plus_plus_baseline, needs=GROUP, paper="arXiv:2501.03262", whitens=True
    ),
    AdvEstimator.remax: PerToken(fn=remax, needs=GREEDY, paper="arXiv:2310.10505"),
    AdvEstimator.gpg: PerSequence(fn=gpg, needs=GROUP, paper="arXiv:2504.02546"),
    AdvEstimator.opo: PerSequence(fn=opo, needs=GROUP, paper="arXiv:2505.23585"),
    AdvEstimator.lite_ppo: PerSequence(fn=lite_ppo, needs=GROUP, paper="arXiv:2508.08221"),
    AdvEstimator.gdpo: PerSequence(fn=gdpo, needs=PARTS, paper="arXiv:2601.05242"),
}


def token_advantages(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages | None:
    """A ``PerToken`` estimator's, not yet whitened; None of another.  Any sequences: none depends on another."""
    row = ADVANTAGES[config.adv_estimator]
    assert "values" not in row.needs or inputs.values_T is not None, f"{config.adv_estimator} needs values_T"
    assert "greedy" not in row.needs or inputs.greedy_S is not None, f"{config.adv_estimator} needs greedy_S"
    return row.fn(inputs, config) if isinstance(row, PerToken) else None


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What becomes of all advantages of a step.

    advantages_S: of every trained token of a sequence, as they are to be trained; None with a ``PerToken`` estimator,
    whose own are to be whitened by ``whitening``, if any.  spread: of all of them, as trained; None where there are
    none.
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
) -> Estimate:
    """Of a whole step, by ``config.adv_estimator``, whitened where it or ``config.whiten_advantages`` says so.

    Args:
        group_S: which prompt a sequence is a sample of.
        scores_S: sums of the rewards of its tokens.
        counts_S: its tokens whose advantages are trained, int64.
        of_tokens: of ``token_advantages``.
        config: names the estimator.
        members_S: tokens of each member of a group, int64; None is ``counts_S``.
        parts_SK: of ``gdpo_reward_keys``, where the estimator needs ``parts``.

    The only member of a group gets 0 where groups are compared, and whitening leaves it out (``groups`` says why).
    """
    row = ADVANTAGES[config.adv_estimator]
    whitens = row.whitens or config.whiten_advantages
    if isinstance(row, PerToken):
        assert of_tokens is not None, f"{config.adv_estimator} is made of tokens"
        raw = of_tokens.total()
        if not whitens:
            return Estimate(advantages_S=None, whitening=None, spread=raw)
        whitening = Whitening.of(raw)
        return Estimate(advantages_S=None, whitening=whitening, spread=raw and whitening.of_spread(raw))
    assert "parts" not in row.needs or parts_SK is not None, f"{config.adv_estimator} needs parts_SK"
    groups = PromptGroups.of(group_S, scores_S, counts_S if members_S is None else members_S, parts_SK)
    advantages_S = row.fn(groups, config)
    if whitens:
        compared_S = groups.has_siblings_S
        whitening = Whitening.of(Spreads.constant(advantages_S, counts_S * compared_S).total())
        advantages_S = torch.where(compared_S, whitening(advantages_S), 0)
    spread = Spreads.constant(advantages_S, counts_S).total()
    return Estimate(advantages_S=advantages_S, whitening=None, spread=spread)


def final_advantages(
    raw_T: Tensor | None, advantages_S: Tensor | None, whitening: Whitening | None, mask_T: Tensor, lengths: list[int]
) -> Tensor:
    """What is trained with, [T], 0 at untrained tokens.  raw_T: of ``token_advantages``; the rest: of an ``Estimate``.

    advantages_S, mask_T, lengths: of the sequences in question.
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
