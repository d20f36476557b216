"""DAPO (arXiv:2503.14476).

The paper has two remedies for overlong responses.  The soft punishment is on.  The filter (``mask_truncated``) is off:
the authors say that most runs, the best one too, did without it, because it overlaps with the punishment (the FAQ of
verl's DAPO page).
"""

from __future__ import annotations

from mcore_rl.config.algorithm_object import Algorithm, Sourced
from mcore_rl.config.algorithms.grpo import GROUP_NORMALIZED
from mcore_rl.config.algorithms.ppo import PPO_CLIP
from mcore_rl.config.roles import LossAggregation

DAPO = Algorithm(
    name="dapo",
    title="DAPO",
    about="clip-higher, dynamic sampling, token-level loss, soft overlong punishment, no KL",
    paper="arXiv:2503.14476",
    advantages=GROUP_NORMALIZED,
    loss=PPO_CLIP,
    aggregation=Sourced(LossAggregation.token_mean, "arXiv:2503.14476, section 3.3"),
    samples=Sourced(16, "arXiv:2503.14476, section 4.1"),
    settings={
        "actor.clip_ratio_low": Sourced(0.2, "arXiv:2503.14476, section 4.1"),
        "actor.clip_ratio_high": Sourced(0.28, "arXiv:2503.14476, section 4.1"),
        "actor.clip_ratio_c": Sourced(10.0, "the authors' recipe in verl"),
        "algorithm.filter_groups.enable": Sourced(True, "arXiv:2503.14476, section 3.2"),
        "algorithm.filter_groups.max_num_gen_batches": Sourced(10, "the authors' recipe in verl"),
        "algorithm.mask_truncated": Sourced(False, "the authors' recipe in verl: the best run was without the filter"),
        "reward.overlong.enable": Sourced(True, "arXiv:2503.14476, section 3.4"),
    },
)
