"""Runs a stage of the estimator where the tokens are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcore_rl.config.algorithm_object import load_function
from mcore_rl.config.algorithm_registry import estimator
from mcore_rl.config.run import RunConfig
from mcore_rl.config.stages import OnRanks
from mcore_rl.types import TrainBatch


def own_stage(batch: TrainBatch, values: Mapping[str, Any], number: int, run: RunConfig) -> Mapping[str, Any]:
    """What the stage of that number makes of ``batch``: a rank finds its function by the name of the estimator.

    values: of the controller, one row for each sequence of the batch.
    """
    stage = estimator(run.algorithm.adv_estimator).stages[number]
    assert isinstance(stage, OnRanks)
    return load_function(stage.function)(batch, values, run)  # type: ignore[no-any-return]
