"""docs/configuration.md is made from the dataclasses, and a changed bound is seen."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from mcore_rl.config.bounds import PositiveInt
from tools import configuration as tool


def test_the_page_is_up_to_date() -> None:
    assert tool.main(["--check"]) == 0, "run: python tools/configuration.py"


def test_a_changed_bound_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(kw_only=True)
    class Other:
        new: PositiveInt | None = 3

    monkeypatch.setitem(tool.COMMANDS, "sft", Other)
    assert tool.main(["--check"]) == 1
    assert "| `new` | sft | whole number in [1, inf), or `null` | `3` |" in tool.page()
