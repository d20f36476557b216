"""An actor's loss that learns the opposite: what a wrong sign of the advantages would do."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mcore_rl.algorithms.policy import ActorLoss
from mcore_rl.ground.types import LossInputs, LossSums


@dataclass(frozen=True)
class Flipped(ActorLoss):
    def __call__(self, inputs: LossInputs) -> LossSums:
        assert inputs.advantages_N is not None
        return super().__call__(replace(inputs, advantages_N=-inputs.advantages_N))
