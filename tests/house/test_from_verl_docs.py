"""docs/from_verl.md is made from the table, and a changed row is seen."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mcore_rl.from_verl.table import SECTIONS
from tools import from_verl as tool


def test_the_page_is_up_to_date() -> None:
    assert tool.main(["--check"]) == 0, "run: python tools/from_verl.py"


def test_a_changed_row_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    data, *others = SECTIONS
    changed = replace(data, rows=[replace(data.rows[0], note="another thing"), *data.rows[1:]])
    monkeypatch.setattr(tool, "SECTIONS", (changed, *others))
    assert tool.main(["--check"]) == 1


def test_every_row_is_on_the_page_or_said_to_be_as_the_actors() -> None:
    page = tool.PAGE.read_text(encoding="utf-8")
    for section in SECTIONS:
        for row in section.rows:
            twin = row.verl.replace("critic.", "actor_rollout_ref.actor.", 1)
            if tool.is_shared(row, section):
                assert any(each.verl == twin and each.rule == row.rule for each in SECTIONS[2].rows), row
            else:
                assert tool.line(row, section) in page
