"""What a recipe reproduces: the published row that it stands for.  Nothing of it changes a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(kw_only=True)
class PublishedConfig:
    """A result that somebody has published.

    score: percent; None where there is none.  of_run: whether it is the ``best`` of its validations or the ``final``
    one; "" where that is not known.  metric: what it is, with the test set.  source: who published it.  hardware: that
    it was reached on.  note: where the published settings are unclear or differ from ours.
    """

    score: float | None = None
    of_run: str = ""
    metric: str = ""
    source: str = ""
    hardware: str = ""
    note: str = ""


@dataclass(kw_only=True)
class RecipeConfig:
    """title: a line for a table.  checkpoint: its name in ``model_configs/``; "" is none, and nothing is planned.

    config_json: fields that the run wants otherwise than the checkpoint's ``config.json`` has them; change them in your
    copy.  cluster: a name of ``launch/clusters``, that the layout was chosen for.  datasets: what
    ``tools/prepare_data.py`` makes for it.
    """

    title: str = ""
    checkpoint: str = ""
    config_json: dict[str, Any] = field(default_factory=dict)
    cluster: str = ""
    datasets: list[str] = field(default_factory=list)
    published: PublishedConfig = field(default_factory=PublishedConfig)
