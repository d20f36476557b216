"""The numbers of the whole step with which each rank finishes the advantages and weights of its own tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from mcore_rl.algorithms.advantages.estimation import Whitening, final_advantages
from mcore_rl.ground.types import TrainBatch


@dataclass(frozen=True, kw_only=True)
class StepNumbers:
    """The controller computes them from every rank's ``SequenceStats``; all ranks receive the same.

    whitening: of the advantages of an estimator of ``Scope.token``; None: they are not whitened.
    mean_weight: the divisor of importance weights.
    threshold: the smallest selected key; None if the loss selects no tokens.
    """

    whitening: Whitening | None = None
    mean_weight: float = 1.0
    threshold: float | None = None


def finish(batch: TrainBatch, advantages_S: NDArray[np.float32] | None, numbers: StepNumbers) -> TrainBatch:
    """``batch`` with final advantages, weights and selection.

    advantages_S: one per sequence of ``batch``; None: ``batch.advantages_T`` has one per token.
    """
    if advantages_S is not None or batch.advantages_T is not None:
        of_response_S = None if advantages_S is None else torch.from_numpy(advantages_S)
        final_T = final_advantages(
            batch.advantages_T,
            of_response_S,
            numbers.whitening,
            batch.mask_T,
            list(batch.lengths_S),
            batch.teacher_advantages_T,
        )
        batch = replace(batch, advantages_T=final_T, teacher_advantages_T=None)
    if batch.weights_T is not None and numbers.mean_weight != 1.0:
        batch = replace(batch, weights_T=batch.weights_T / numbers.mean_weight)
    if batch.selection_T is not None:
        assert numbers.threshold is not None, "keys without a threshold select nothing"
        batch = replace(batch, selection_T=batch.selection_T - numbers.threshold)
    return batch
