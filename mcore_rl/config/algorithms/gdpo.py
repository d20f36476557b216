"""GDPO: group reward-decoupled normalization policy optimization (arXiv:2601.05242)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mcore_rl.config.algorithm import AlgorithmConfig
from mcore_rl.config.algorithm_object import Algorithm, Estimator, Scope, Sourced
from mcore_rl.config.algorithms.ppo import PPO_CLIP
from mcore_rl.config.roles import LossAggregation
from mcore_rl.ground.errors import Violation

if TYPE_CHECKING:
    from mcore_rl.config.run import RunConfig


@dataclass(kw_only=True)
class GdpoConfig(AlgorithmConfig):
    """Which parts of the reward are normalized.

    gdpo_reward_keys: as the grader names them, ``acc`` (whether the answer is right) or ``score`` (the whole).
    gdpo_reward_weights: one weight for each of these parts; None is 1 for all.
    """

    gdpo_reward_keys: list[str] = field(default_factory=list)
    gdpo_reward_weights: list[float] | None = None

    @property
    def reward_parts(self) -> list[str]:
        """The parts that ``gdpo_reward_keys`` names."""
        return self.gdpo_reward_keys


def _part_violations(run: RunConfig) -> Iterator[Violation]:
    algorithm = run.algorithm
    assert isinstance(algorithm, GdpoConfig)
    keys = algorithm.gdpo_reward_keys
    weights = algorithm.gdpo_reward_weights
    if not keys:
        problem = f"{algorithm.adv_estimator} normalizes each part of the reward by itself, and none is named"
        remedy = "Write [acc,format], say: parts that the grader names, acc or score"
        yield Violation("algorithm.gdpo_reward_keys", "[]", problem, remedy)
    if weights is not None and len(weights) != len(keys):
        problem = f"has {len(weights)} weights for {len(keys)} gdpo_reward_keys"
        yield Violation("algorithm.gdpo_reward_weights", weights, problem, "Write one for each, or none")


REWARD_DECOUPLED = Estimator(
    name="gdpo",
    function="mcore_rl.algorithms.advantages.gdpo:gdpo",
    scope=Scope.sequence,
    formula="`Z / (std of Z over the step + 1e-6)`, `Z = sum of w_k (R_k - mean_k) / (std_k + 1e-6)` over rewards k",
    paper="arXiv:2601.05242",
    min_group=2,
    refuses_kl="reads the parts of the reward, and the KL is none",
    settings=GdpoConfig,
    rules=(_part_violations,),
)

GDPO = Algorithm(
    name="gdpo",
    title="GDPO",
    about="each named reward is normalized within the group by itself; no KL",
    paper="arXiv:2601.05242",
    advantages=REWARD_DECOUPLED,
    loss=PPO_CLIP,
    aggregation=Sourced(LossAggregation.token_mean, "NVlabs/GDPO, verl-GDPO/train_gdpo.sh: verl's default"),
    samples=Sourced(4, "NVlabs/GDPO, verl-GDPO/train_gdpo.sh"),
    settings={
        "algorithm.gdpo_reward_keys": Sourced(["acc", "format"], "arXiv:2601.05242: correctness and format"),
    },
)
