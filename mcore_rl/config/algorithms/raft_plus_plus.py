"""RAFT++: RAFT with a clipped ratio, for several updates of a batch (arXiv:2504.11343)."""

from __future__ import annotations

from mcore_rl.config.algorithm_object import Algorithm
from mcore_rl.config.algorithms.ppo import PPO_CLIP
from mcore_rl.config.algorithms.raft import ENTROPY, FOUR, KL, POSITIVE_ONLY, TOKEN_MEAN

RAFT_PLUS_PLUS = Algorithm(
    name="raft_plus_plus",
    title="RAFT++",
    about="RAFT with a clipped ratio, so that a batch may take several updates",
    paper="arXiv:2504.11343",
    advantages=POSITIVE_ONLY,
    loss=PPO_CLIP,
    aggregation=TOKEN_MEAN,
    samples=FOUR,
    kl=KL,
    settings=ENTROPY,
)
