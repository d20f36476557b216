"""What a recipe reproduces: the published row that it stands for.  Nothing of it changes a run."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(kw_only=True)
class PublishedConfig:
    """A result that somebody has published.

    score: percent; None where there is none.  metric: what it is, with the test set.  source: who published it.
    hardware: that it was reached on.  note: where the published settings are unclear or differ from ours.
    """

    score: float | None = None
    metric: str = ""
    source: str = ""
    hardware: str = ""
    note: str = ""


@dataclass(kw_only=True)
class RecipeConfig:
    """title: a line for a table.  checkpoint: its name in ``model_configs/``; "" is none, and nothing is planned.

    cluster: a name of ``launch/clusters``, that the layout was chosen for.  datasets: what ``tools/prepare_data.py``
    makes for it.
    """

    title: str = ""
    checkpoint: str = ""
    cluster: str = ""
    datasets: list[str] = field(default_factory=list)
    published: PublishedConfig = field(default_factory=PublishedConfig)
