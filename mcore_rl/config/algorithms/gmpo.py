"""GMPO: geometric-mean policy optimization (arXiv:2507.20673)."""

from __future__ import annotations

from mcore_rl.config.algorithm_object import Algorithm, PolicyLoss, Sourced
from mcore_rl.config.algorithms.grpo import GROUP_NORMALIZED
from mcore_rl.config.clipping import ClippedConfig
from mcore_rl.config.roles import LossAggregation

GEOMETRIC_MEAN = PolicyLoss(
    name="geo_mean",
    function="mcore_rl.algorithms.losses.geo_mean:geo_mean",
    formula="`-A s`, `s` the geometric mean of ratios that are clipped as PPO clips, at `e^-low` and `e^high`",
    paper="arXiv:2507.20673",
    aggregation=LossAggregation.seq_mean_token_mean,
    settings=ClippedConfig,
)

GMPO = Algorithm(
    name="gmpo",
    title="GMPO",
    about="the geometric mean of a response's clipped ratios; no KL",
    paper="arXiv:2507.20673",
    advantages=GROUP_NORMALIZED,
    loss=GEOMETRIC_MEAN,
    aggregation=Sourced(LossAggregation.seq_mean_token_mean, "arXiv:2507.20673: a mean over responses"),
    samples=Sourced(8, "callsys/GMPO, scripts/qwen2.5-math-7b-gmpo.sh"),
    settings={
        "actor.clip_ratio_low": Sourced(0.4, "arXiv:2507.20673: the ratio from e^-0.4"),
        "actor.clip_ratio_high": Sourced(0.4, "arXiv:2507.20673: to e^0.4"),
    },
)
