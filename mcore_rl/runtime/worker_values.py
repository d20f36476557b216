"""What the controller hands to training processes and gets back, beside shards of the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mcore_rl.algorithms.own_scores import OwnScores
from mcore_rl.parallel.device import Memory
from mcore_rl.types import StepResult

# For each minibatch, the advantages of its sequences (float32, [S]); None if the batch has one per token.
SequenceAdvantages = Sequence[NDArray[np.float32] | None]


@dataclass(frozen=True)
class TrainResults:
    """results: one per optimizer step.  memories: the memory use of each rank after them.

    scores: one per data-parallel rank, if they were asked for.
    """

    results: list[StepResult]
    memories: list[Memory]
    scores: list[OwnScores] = field(default_factory=list)
