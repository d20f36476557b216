"""The published result that a recipe reproduces.  No key of this group changes a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from mcore_rl.config.bounds import Interval, Lines


@dataclass(kw_only=True)
class PublishedConfig:
    """A published result.

    score: percent; None if there is no published score.
    of_run: ``best`` if it is the best of the run's validations, ``final`` if the last; "" if that is unknown.
    metric: the metric and its test set.
    source: who published it.
    hardware: what it was reached on.
    note: where the published settings are unclear or differ from the recipe.
    """

    score: Annotated[float, Interval("[0, 100]")] | None = None
    of_run: str = ""
    metric: str = ""
    source: str = ""
    hardware: str = ""
    note: Lines = ""


@dataclass(kw_only=True)
class RecipeConfig:
    """What a recipe is about.

    title: one line for a table.
    checkpoint: the name of its model in ``model_configs/``; "" is none, and the planner skips the recipe.
    checkpoints: the same of roles with models of their own, by role: ``{teacher: NAME}``.
    cluster: the name in ``launch/clusters`` for which the layout was chosen.
    datasets: the data sets that ``mcore-rl prepare`` writes for it.
    published: the result that it reproduces.
    """

    title: str = ""
    checkpoint: str = ""
    checkpoints: dict[str, Any] = field(default_factory=dict)
    cluster: str = ""
    datasets: list[str] = field(default_factory=list)
    published: PublishedConfig = field(default_factory=PublishedConfig)
