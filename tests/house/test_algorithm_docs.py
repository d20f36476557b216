"""docs/algorithms.md is made from the objects, and a changed object is seen."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mcore_rl.config.algorithm_registry import algorithms
from mcore_rl.config.algorithms.rloo import RLOO
from tools import algorithms as tool


def test_the_page_is_up_to_date() -> None:
    assert tool.main(["--check"]) == 0, "run: python tools/algorithms.py"


def test_a_changed_object_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    other = dict(algorithms()) | {"rloo": replace(RLOO, about="another thing")}
    monkeypatch.setattr(tool, "algorithms", lambda: other)
    assert tool.main(["--check"]) == 1


def test_every_algorithm_part_and_source_is_on_the_page() -> None:
    page = tool.PAGE.read_text(encoding="utf-8")
    for each in algorithms().values():
        assert f"| `{each.name}` | {each.title} | {each.about} | {each.paper} |" in page
        for part in (each.advantages, each.loss):
            assert f"| `{part.name}` | {part.formula} |" in page
        for key, setting in each.all_settings().items():
            assert f"{tool.override(key, setting.value)} | {setting.source} |" in page
