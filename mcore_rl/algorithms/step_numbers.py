"""Numbers of the whole step that a rank needs to finish what it made of its own tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from mcore_rl.algorithms.advantages.registry import final_advantages
from mcore_rl.algorithms.advantages.whiten import Whitening
from mcore_rl.types import TrainBatch


@dataclass(frozen=True, kw_only=True)
class StepNumbers:
    """Concluded on the controller from what every rank says of its sequences; the same for all ranks.

    whitening: of the advantages of a ``PerToken`` estimator.  mean_weight: what importance weights are divided by.
    threshold: the least key that is selected, where the loss selects tokens.
    """

    whitening: Whitening | None = None
    mean_weight: float = 1.0
    threshold: float | None = None


def finish(batch: TrainBatch, advantages_S: Tensor | None, numbers: StepNumbers) -> TrainBatch:
    """``batch`` as it is trained.

    advantages_S: of its sequences, where a response has one advantage; else ``batch.advantages_T`` is whitened.
    """
    if advantages_S is not None or batch.advantages_T is not None:
        lengths = list(batch.lengths_S)
        final_T = final_advantages(batch.advantages_T, advantages_S, numbers.whitening, batch.mask_T, lengths)
        batch = replace(batch, advantages_T=final_T)
    if batch.weights_T is not None and numbers.mean_weight != 1.0:
        batch = replace(batch, weights_T=batch.weights_T / numbers.mean_weight)
    if batch.selection_T is not None:
        assert numbers.threshold is not None, "keys without a threshold select nothing"
        batch = replace(batch, selection_T=batch.selection_T - numbers.threshold)
    return batch
