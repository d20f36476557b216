"""When rollouts are drawn and when they are trained: the group ``async``, partial rollouts, and what contradicts them.

Staleness is counted in versions of the weights: a step that begins with version v and trains a sample whose oldest
token was drawn with version u trains one of staleness v - u (arXiv:2505.24298, section 5.1).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from mcore_rl.config.bounds import NonNegativeInt
from mcore_rl.config.trainer import ASYNC, Mode, Placement
from mcore_rl.ground.errors import Violation

if TYPE_CHECKING:
    from mcore_rl.config.run import RunConfig


class Overdue(Enum):
    """What becomes of a group of responses that an engine died with, and that is therefore late.

    ``wait``: its finished responses keep their age, the others are drawn again, and the step in which it is due waits
    for it.  ``redraw``: the whole group is drawn again, with the newest weights.
    """

    wait = "wait"
    redraw = "redraw"


@dataclass(kw_only=True)
class AsyncConfig:
    """How far drawing may be ahead of training.

    max_staleness: the most versions of the weights between the oldest token of a sample and the step that trains it,
    with ``rollout.partial`` too; 0 draws and trains in turns, as ``trainer.mode=sync`` does.

    partial_rollout: an update of the weights freezes the responses under way, which go on with the new weights; else it
    waits until they are finished.
    """

    max_staleness: NonNegativeInt = 1
    partial_rollout: bool = True
    overdue: Overdue = Overdue.wait


def trains_stale(run: RunConfig) -> bool:
    """Whether ``run`` trains samples of older weights than those that a step begins with."""
    mode = run.trainer.mode
    ahead = mode is ASYNC and run.async_.max_staleness > 0
    return mode is Mode.one_step_off or ahead or run.rollout.partial


def mode_violations(run: RunConfig) -> Iterator[Violation]:
    """Refuses devices that trainer and engines share in a mode in which both work at the same time.

    And partial rollouts where they have no meaning, or begin more than may be left to later steps.
    """
    yield from _partial_violations(run)
    trainer = run.trainer
    if trainer.mode is not Mode.sync and trainer.placement is Placement.colocated:
        problem = f"engines and trainer take turns, and with trainer.mode={trainer.mode.value} both work at once"
        remedy = "Write separate, or trainer.mode=sync"
        yield Violation("trainer.placement", trainer.placement.value, problem, remedy)


def _partial_violations(run: RunConfig) -> Iterator[Violation]:
    mode = run.trainer.mode
    rollout = run.rollout
    bound = run.async_.max_staleness
    if not rollout.partial:
        return
    if mode is ASYNC:
        problem = "trainer.mode=async keeps unfinished responses by async.partial_rollout"
        yield Violation("rollout.partial", True, problem, "Write async.partial_rollout=true, or trainer.mode=sync")
    elif mode is Mode.one_step_off:
        problem = "trainer.mode=one_step_off trains whole batches of one version"
        remedy = "Write trainer.mode=async async.max_staleness=1, which goes on with unfinished responses"
        yield Violation("rollout.partial", True, problem, remedy)
    elif rollout.over_sampling > bound:
        problem = f"of a batch may be left to later steps, and async.max_staleness={bound} has room for {bound}"
        remedy = f"Write async.max_staleness={math.ceil(rollout.over_sampling)}, or {bound or 'rollout.partial=false'}"
        yield Violation("rollout.over_sampling", rollout.over_sampling, problem, remedy)
