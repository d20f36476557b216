"""What the controller knows of the sequences of a step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from mcore_rl.algorithms.token_advantages import Outcomes
from mcore_rl.ground.types import TrainBatch


@dataclass(frozen=True, kw_only=True)
class StepBatch:
    """All episodes of one step as tensors, prompt by prompt; ``controller/step/batch_assembly.py`` makes it.

    batch: their tokens, masks, the sampler's log-probs, and turn rewards if there are any.
    group_S: int64, the prompt that each sequence is a sample of.
    sample_S: int64, ascending, the sample that it belongs to, where one run of a user's program has several sequences;
    None: each is a sample of its own.
    outcomes: the score of each sequence, and whether it was cut off.
    taught_by: what the numbers of the batch's ``TAUGHT_BY`` mean; () without several teachers.
    """

    batch: TrainBatch
    group_S: Tensor
    outcomes: Outcomes
    sample_S: Tensor | None = None
    taught_by: tuple[str, ...] = ()

    @property
    def num_trained(self) -> int:
        """The number of trained tokens of all sequences."""
        return int(np.count_nonzero(self.batch.mask_T.numpy()))
