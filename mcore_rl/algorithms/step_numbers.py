"""Numbers of the whole step that a rank needs to finish what it made of its own tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from mcore_rl.algorithms.advantages.estimation import final_advantages
from mcore_rl.algorithms.advantages.whiten import Whitening
from mcore_rl.types import TrainBatch


@dataclass(frozen=True, kw_only=True)
class StepNumbers:
    """Concluded on the controller from what every rank says of its sequences; the same for all ranks.

    whitening: of the advantages of an estimator of ``Scope.token``; None: they are not whitened.
    mean_weight: what importance weights are divided by.
    threshold: the least key that is selected; None where the loss selects no tokens.
    """

    whitening: Whitening | None = None
    mean_weight: float = 1.0
    threshold: float | None = None


def finish(batch: TrainBatch, advantages_S: NDArray[np.float32] | None, numbers: StepNumbers) -> TrainBatch:
    """``batch`` as it is trained.

    advantages_S: of its sequences, where a response has one advantage; None: ``batch.advantages_T`` are of tokens.
    """
    if advantages_S is not None or batch.advantages_T is not None:
        of_response_S = None if advantages_S is None else torch.from_numpy(advantages_S)
        final_T = final_advantages(
            batch.advantages_T, of_response_S, numbers.whitening, batch.mask_T, list(batch.lengths_S)
        )
        batch = replace(batch, advantages_T=final_T)
    if batch.weights_T is not None and numbers.mean_weight != 1.0:
        batch = replace(batch, weights_T=batch.weights_T / numbers.mean_weight)
    if batch.selection_T is not None:
        assert numbers.threshold is not None, "keys without a threshold select nothing"
        batch = replace(batch, selection_T=batch.selection_T - numbers.threshold)
    return batch
