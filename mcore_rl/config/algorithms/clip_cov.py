"""Clip-Cov (arXiv:2505.22617)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mcore_rl.config.algorithm_object import Algorithm, PolicyLoss, Sourced, TokenSelection
from mcore_rl.config.algorithms.grpo import GROUP_NORMALIZED
from mcore_rl.config.bounds import PositiveShare
from mcore_rl.config.clipping import ClippedConfig
from mcore_rl.config.roles import LossAggregation
from mcore_rl.ground.errors import Violation

if TYPE_CHECKING:
    from mcore_rl.config.run import RunConfig

RECIPE = "PRIME-RL/Entropy-Mechanism-of-RL, recipe/dapo/7b_clip_cov.sh"


@dataclass(kw_only=True)
class ClipCovConfig(ClippedConfig):
    """Clip-Cov's selection.

    clip_cov_ratio: the share of tokens that are left out of the loss.
    clip_cov_lb, clip_cov_ub: the covariances between which they are drawn.
    """

    clip_cov_ratio: PositiveShare = 0.0002
    clip_cov_lb: float = 1.0
    clip_cov_ub: float = 5.0


def _covariance_violations(run: RunConfig) -> Iterator[Violation]:
    actor = run.actor
    assert isinstance(actor, ClipCovConfig)
    if actor.clip_cov_lb >= actor.clip_cov_ub:
        problem = f"leaves no covariance below clip_cov_ub={actor.clip_cov_ub:g}"
        yield Violation("actor.clip_cov_lb", actor.clip_cov_lb, problem, "Write 1.0, and clip_cov_ub=5.0")


COVARIANCE_CLIP = PolicyLoss(
    name="clip_cov",
    function="mcore_rl.algorithms.losses.clip_cov:clip_cov",
    formula="`ppo_clip` without the dual clip; 0 at selected tokens",
    paper="arXiv:2505.22617",
    selection=TokenSelection(keys="mcore_rl.algorithms.losses.clip_cov:clip_cov_keys", share="clip_cov_ratio"),
    settings=ClipCovConfig,
    rules=(_covariance_violations,),
)

CLIP_COV = Algorithm(
    name="clip_cov",
    title="Clip-Cov",
    about="a few tokens of high covariance are left out, which keeps the entropy; no KL",
    paper="arXiv:2505.22617",
    advantages=GROUP_NORMALIZED,
    loss=COVARIANCE_CLIP,
    aggregation=Sourced(LossAggregation.token_mean, RECIPE),
    samples=Sourced(8, RECIPE),
    settings={
        "actor.clip_ratio_low": Sourced(1.0, RECIPE),
        "actor.clip_ratio_high": Sourced(1.0, RECIPE),
        "actor.clip_cov_ratio": Sourced(0.0002, RECIPE),
        "actor.clip_cov_lb": Sourced(1.0, RECIPE),
        "actor.clip_cov_ub": Sourced(5.0, RECIPE),
        "algorithm.filter_groups.enable": Sourced(True, RECIPE),
        "algorithm.filter_groups.max_num_gen_batches": Sourced(10, RECIPE),
    },
)
