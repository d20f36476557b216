"""GSPO (arXiv:2507.18071): ratios and clipping of whole sequences."""

from __future__ import annotations

from mcore_rl.config.algorithm_object import Algorithm, PolicyLoss, Sourced
from mcore_rl.config.algorithms.grpo import GROUP_NORMALIZED
from mcore_rl.config.clipping import ClippedConfig
from mcore_rl.config.roles import LossAggregation

SEQUENCE_CLIP = PolicyLoss(
    name="gspo",
    function="mcore_rl.algorithms.losses.gspo:gspo",
    formula="`max(-A s, -A clip(s, 1 - low, 1 + high))`, `s` the geometric mean of the response's ratios",
    paper="arXiv:2507.18071",
    aggregation=LossAggregation.seq_mean_token_mean,
    settings=ClippedConfig,
)

GSPO = Algorithm(
    name="gspo",
    title="GSPO",
    about="one ratio a response, clipped as a whole; no KL",
    paper="arXiv:2507.18071",
    advantages=GROUP_NORMALIZED,
    loss=SEQUENCE_CLIP,
    aggregation=Sourced(LossAggregation.seq_mean_token_mean, "arXiv:2507.18071, eq. 5"),
    samples=Sourced(16, "verl's examples/gspo_trainer; the paper does not say"),
    settings={
        "actor.clip_ratio_low": Sourced(3e-4, "arXiv:2507.18071, section 5.1"),
        "actor.clip_ratio_high": Sourced(4e-4, "arXiv:2507.18071, section 5.1"),
    },
)
