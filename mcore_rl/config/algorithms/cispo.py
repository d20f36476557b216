"""CISPO (arXiv:2506.13585): the clipped ratio weighs the gradient of every token."""

from __future__ import annotations

from mcore_rl.config.algorithm_object import Algorithm, PolicyLoss, Sourced
from mcore_rl.config.algorithms.grpo import GROUP_NORMALIZED
from mcore_rl.config.clipping import ClippedConfig
from mcore_rl.config.roles import LossAggregation

CLIPPED_WEIGHT = PolicyLoss(
    name="cispo",
    function="mcore_rl.algorithms.losses.cispo:cispo",
    formula="`-sg[clip(r, 1 - low, 1 + high)] A log p`",
    paper="arXiv:2506.13585",
    settings=ClippedConfig,
)

CISPO = Algorithm(
    name="cispo",
    title="CISPO",
    about="clipped ratios weigh the policy gradient, so that every token keeps one; no KL",
    paper="arXiv:2506.13585",
    advantages=GROUP_NORMALIZED,
    loss=CLIPPED_WEIGHT,
    aggregation=Sourced(LossAggregation.token_mean, "arXiv:2506.13585, section 3.1"),
    samples=Sourced(16, "arXiv:2510.13786 (ScaleRL)"),
    settings={
        "actor.clip_ratio_low": Sourced(1.0, "arXiv:2506.13585, section 3.1: no lower bound"),
        "actor.clip_ratio_high": Sourced(4.0, "arXiv:2510.13786 (ScaleRL), weights up to 5; the paper gives no number"),
    },
)
