"""Ranks that are worth a rehearsal: one of the first, the middle and the last pipeline stage."""

from __future__ import annotations

from mcore_rl.config.parallel import ParallelConfig
from mcore_rl.parallel.layout import Layout


def ranks_of_stages(parallel: ParallelConfig, world_size: int) -> list[int]:
    """The lowest rank of the first, the middle and the last stage; fewer where there are fewer stages.

    Raises ConfigError if the layout does not divide the world.
    """
    layout = Layout.of(parallel, world_size)
    stages = sorted({0, layout.pp // 2, layout.pp - 1})
    return [layout.rank_of(tp=0, cp=0, dp=0, pp=stage) for stage in stages]
