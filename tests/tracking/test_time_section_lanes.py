"""Bars of the lanes are read back from their places on the page."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from mcore_rl.tracking.lanes import LANES, State, read_lanes
from mcore_rl.tracking.run_files import read_run
from mcore_rl.tracking.time_section import COLOURS, STEPS_SHOWN, lane_section
from tests.tracking.pages import of_class, words
from tests.tracking.recorded_run import record


def section(path: Path) -> ElementTree.Element:
    return ElementTree.fromstring(f"<section>{lane_section(read_run(path))}</section>")


def percent(written: str | None) -> float:
    return float((written or "").removesuffix("%")) / 100


def test_bars_are_where_engines_and_trainer_worked(tmp_path: Path) -> None:
    path = record(tmp_path / "run", total_steps=9)
    recorded = read_lanes(path / LANES)
    newest = sorted(recorded)[-STEPS_SHOWN:]
    whole = sum(recorded[step].seconds for step in newest)
    colours = {f"c{colour}": state for state, colour in COLOURS.items()}
    rows = [row for row in of_class(section(path), "lane") if row.find("svg/rect") is not None]
    assert [row.findtext("b") for row in rows] == ["trainer", "engine 0", "engine 1"]
    for row in rows:
        drawn = [
            (colours[bar.get("class") or ""], percent(bar.get("x")) * whole, percent(bar.get("width")) * whole)
            for bar in row.iter("rect")
        ]
        begin, expected = 0.0, []
        for step in newest:
            spans = recorded[step].lanes[row.findtext("b") or ""]
            expected += [(each.state, begin + each.start, each.end - each.start) for each in spans]
            begin += recorded[step].seconds
        assert [state for state, _, _ in drawn] == [state for state, _, _ in expected]
        for column in (1, 2):
            assert [each[column] for each in drawn] == pytest.approx([each[column] for each in expected], abs=0.1)
        worked = sum(seconds for _, _, seconds in expected)
        assert row.findtext("span") == f"idle {1 - worked / whole:.0%}"


def test_shares_are_those_of_the_whole_run(tmp_path: Path) -> None:
    path = record(tmp_path / "run", total_steps=9)
    steps = read_lanes(path / LANES).values()
    whole = sum(each.seconds for each in steps)
    drawn = sum(span.end - span.start for each in steps for span in each.lanes["engine 1"]
                if span.state is State.drawing)  # fmt: skip
    (body,) = section(path).iter("tbody")
    cells = {row[0]: row[1:] for row in ([cell.text for cell in line.iter("td")] for line in body.iter("tr"))}
    (head,) = section(path).iter("thead")
    column = [each.text for each in head.iter("th")].index("drawing") - 1
    assert list(cells) == ["trainer", "engine 0", "engine 1"]
    assert cells["engine 1"][column] == f"{drawn / whole:.1%}" and cells["trainer"][column] == "0.0%"


def test_a_run_without_engines_has_no_lanes(tmp_path: Path) -> None:
    path = record(tmp_path / "run", total_steps=3)
    rows = [json.loads(line) for line in (path / LANES).read_text().splitlines()]
    alone = [row | {"lanes": {"trainer": row["lanes"]["trainer"]}} for row in rows]
    (path / LANES).write_text("".join(json.dumps(row) + "\n" for row in alone))
    assert lane_section(read_run(path)) == ""
    (path / LANES).unlink()
    assert lane_section(read_run(path)) == ""


def test_an_engine_that_joins_has_the_share_of_the_time_since(tmp_path: Path) -> None:
    path = record(tmp_path / "run", total_steps=4)
    rows = [json.loads(line) for line in (path / LANES).read_text().splitlines()]
    seconds = rows[-1]["seconds"]
    rows[-1]["lanes"]["engine <7>"] = [["drawing", 0.0, seconds / 2]]
    (path / LANES).write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = words(section(path))
    assert "engine <7>" in said
    (body,) = section(path).iter("tbody")
    assert [cell.text for cell in [*body.iter("tr")][-1].iter("td")][-1] == "50.0%"
