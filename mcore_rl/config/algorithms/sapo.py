"""SAPO: soft adaptive policy optimization (arXiv:2511.20347)."""

from __future__ import annotations

from dataclasses import dataclass

from mcore_rl.config.algorithm_object import Algorithm, PolicyLoss, Sourced
from mcore_rl.config.algorithms.grpo import GROUP_NORMALIZED
from mcore_rl.config.bounds import PositiveFloat
from mcore_rl.config.roles import ActorConfig, LossAggregation


@dataclass(kw_only=True)
class SapoConfig(ActorConfig):
    """tau_pos, tau_neg: temperatures of the gate, for advantages above 0 and for the others."""

    tau_pos: PositiveFloat = 1.0
    tau_neg: PositiveFloat = 1.05


SOFT_GATE = PolicyLoss(
    name="sapo",
    function="mcore_rl.algorithms.losses.sapo:sapo",
    formula="`-A sigmoid(tau (r - 1)) 4 / tau`, `tau` is `tau_pos` where A > 0, else `tau_neg`",
    paper="arXiv:2511.20347",
    settings=SapoConfig,
)

SAPO = Algorithm(
    name="sapo",
    title="SAPO",
    about="a smooth gate of the ratio in the place of a clip; no KL",
    paper="arXiv:2511.20347",
    advantages=GROUP_NORMALIZED,
    loss=SOFT_GATE,
    aggregation=Sourced(LossAggregation.seq_mean_token_mean, "arXiv:2511.20347; verl's sapo always"),
    samples=Sourced(16, "verl's examples/sapo_trainer"),
    settings={
        "actor.tau_pos": Sourced(1.0, "arXiv:2511.20347"),
        "actor.tau_neg": Sourced(1.05, "arXiv:2511.20347"),
    },
)
