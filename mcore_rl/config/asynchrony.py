"""When rollouts are drawn and when they are trained: the group ``async``, and what contradicts ``trainer.mode``.

Staleness is counted in versions of the weights: a step that begins with version v and trains a sample whose oldest
token was drawn with version u trains one of staleness v - u (arXiv:2505.24298, section 5.1).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from mcore_rl.config.bounds import NonNegativeInt
from mcore_rl.config.trainer import ASYNC, Mode, Placement
from mcore_rl.errors import Violation

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

    max_staleness: the most versions of the weights between the oldest token of a sample and the step that trains it; 0
    draws and trains in turns, as ``trainer.mode=sync`` does.
    """

    max_staleness: NonNegativeInt = 1
    overdue: Overdue = Overdue.wait


def trains_stale(run: RunConfig) -> bool:
    """Whether ``run`` trains samples of older weights than those that a step begins with."""
    mode = run.trainer.mode
    return mode is Mode.one_step_off or (mode is ASYNC and run.async_.max_staleness > 0)


def mode_violations(run: RunConfig) -> Iterator[Violation]:
    """Refuses devices that trainer and engines share in a mode in which both work at the same time."""
    trainer = run.trainer
    if trainer.mode is not Mode.sync and trainer.placement is Placement.colocated:
        problem = f"engines and trainer take turns, and with trainer.mode={trainer.mode.value} both work at once"
        remedy = "Write separate, or trainer.mode=sync"
        yield Violation("trainer.placement", trainer.placement.value, problem, remedy)
