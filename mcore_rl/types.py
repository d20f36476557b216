"""The records that users' programs hand to a training engine, and get (docs/engine.md)."""

from mcore_rl.ground.types import Denominators, LossInputs, LossSums, StepResult, TokenScores, TrainBatch

__all__ = ["Denominators", "LossInputs", "LossSums", "StepResult", "TokenScores", "TrainBatch"]
