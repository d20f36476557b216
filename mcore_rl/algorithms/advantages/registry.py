"""Every advantage estimator by name, what it needs, and where it comes from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from mcore_rl.algorithms.advantages.dr_grpo import dr_grpo
from mcore_rl.algorithms.advantages.gae import gae
from mcore_rl.algorithms.advantages.gpg import gpg
from mcore_rl.algorithms.advantages.groups import PromptGroups
from mcore_rl.algorithms.advantages.grpo import grpo
from mcore_rl.algorithms.advantages.inputs import AdvantageInputs, Advantages
from mcore_rl.algorithms.advantages.opo import opo
from mcore_rl.algorithms.advantages.reinforce_plus_plus import reinforce_plus_plus
from mcore_rl.algorithms.advantages.reinforce_plus_plus_baseline import reinforce_plus_plus_baseline
from mcore_rl.algorithms.advantages.remax import remax
from mcore_rl.algorithms.advantages.rloo import rloo
from mcore_rl.algorithms.advantages.whiten import whiten
from mcore_rl.algorithms.ragged import at_tokens
from mcore_rl.config.algorithm import AdvEstimator, AlgorithmConfig

Need = Literal["values", "group", "greedy"]


@dataclass(frozen=True, kw_only=True)
class Advantage:
    """One estimator.

    needs: ``values`` of a critic, a ``group`` of two or more samples of each prompt, the score of a ``greedy``
    response.  per: whether advantages differ within a response.  whitens: whether its result is whitened whatever
    ``whiten_advantages`` says.
    """

    fn: Callable[[AdvantageInputs, AlgorithmConfig], Advantages]
    needs: frozenset[Need]
    per: Literal["token", "sequence"]
    paper: str
    whitens: bool = False


VALUES: frozenset[Need] = frozenset({"values"})
GROUP: frozenset[Need] = frozenset({"group"})
GREEDY: frozenset[Need] = frozenset({"greedy"})
NOTHING: frozenset[Need] = frozenset()

ADVANTAGES: dict[AdvEstimator, Advantage] = {
    AdvEstimator.gae: Advantage(fn=gae, needs=VALUES, per="token", paper="arXiv:1506.02438", whitens=True),
    AdvEstimator.grpo: Advantage(fn=grpo, needs=GROUP, per="sequence", paper="arXiv:2402.03300"),
    AdvEstimator.dr_grpo: Advantage(fn=dr_grpo, needs=GROUP, per="sequence", paper="arXiv:2503.20783"),
    AdvEstimator.rloo: Advantage(fn=rloo, needs=GROUP, per="sequence", paper="arXiv:2402.14740"),
    AdvEstimator.reinforce_plus_plus: Advantage(
        fn=reinforce_plus_plus, needs=NOTHING, per="token", paper="arXiv:2501.03262", whitens=True
    ),
    AdvEstimator.reinforce_plus_plus_baseline: Advantage(
        fn=reinforce_plus_plus_baseline, needs=GROUP, per="sequence", paper="arXiv:2501.03262", whitens=True
    ),
    AdvEstimator.remax: Advantage(fn=remax, needs=GREEDY, per="token", paper="arXiv:2310.10505"),
    AdvEstimator.gpg: Advantage(fn=gpg, needs=GROUP, per="sequence", paper="arXiv:2504.02546"),
    AdvEstimator.opo: Advantage(fn=opo, needs=GROUP, per="sequence", paper="arXiv:2505.23585"),
}


def estimate_advantages(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages:
    """Advantages of one step by ``config.adv_estimator``, whitened where it or ``config.whiten_advantages`` says so.

    Untrained tokens get 0, and so does the only member of a group where groups are compared: whitening leaves it out
    (``groups`` says why).  Returns are never whitened.
    """
    row = ADVANTAGES[config.adv_estimator]
    assert "values" not in row.needs or inputs.values_T is not None, f"{config.adv_estimator} needs values_T"
    assert "greedy" not in row.needs or inputs.greedy_S is not None, f"{config.adv_estimator} needs greedy_S"
    found = row.fn(inputs, config)
    if not (row.whitens or config.whiten_advantages):
        return found
    mask_T = inputs.mask_T
    if "group" in row.needs:
        mask_T = mask_T & at_tokens(PromptGroups.of(inputs).has_siblings_S, inputs.lengths_S)
    return Advantages(advantages_T=whiten(found.advantages_T, mask_T), returns_T=found.returns_T)
