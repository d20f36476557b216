"""What people are shown of a plan, and what a program reads."""

from __future__ import annotations

import json
from xml.etree import ElementTree

from rich.console import Console

from mcore_rl.config.launch import load_cluster
from mcore_rl.planning.plan import Phase, Plan, plan
from mcore_rl.planning.search import Found, search
from mcore_rl.planning.tables import (
    as_written,
    gib,
    plan_page,
    plan_tables,
    plan_values,
    search_page,
    search_tables,
    search_values,
    seconds_text,
    short_line,
)
from mcore_rl.tracking.page import LIGHT
from tests.support import models
from tests.support.settings import any_run

H100 = load_cluster("nvidia_h100")


def planned(**rollout: object) -> tuple[Plan, Found]:
    run = any_run()
    run.actor.microbatch_tokens = 8192
    for name, value in rollout.items():
        setattr(run.rollout, name, value)
    return plan(run, models.moe(), H100), search(run, models.moe(), H100, limit=2)


def shown(renderable: object) -> str:
    console = Console(width=120, record=True)
    console.print(renderable)
    return console.export_text()


def test_the_terminal_shows_every_part_and_the_verdict() -> None:
    run_plan, _ = planned()
    text = shown(plan_tables(run_plan))
    for row in run_plan.rows:
        assert row.part.split()[0] in text
    assert "~" in text and "expected time of a step" in text
    assert text.rstrip().endswith("fits") and "does not fit" not in text
    wrong, _ = planned(gpu_memory_utilization=0.999)
    assert "does not fit" in shown(plan_tables(wrong))


def test_the_search_shows_what_to_write() -> None:
    _, looked = planned()
    text = " ".join(shown(search_tables(looked)).split())
    assert "settings looked at" in text
    assert looked.best[0].overrides[0] in text


def test_the_page_stands_alone_and_is_well_formed() -> None:
    run_plan, _ = planned()
    page = plan_page(run_plan)
    ElementTree.fromstring(page.split("\n", 1)[1])
    assert "http:" not in page and "https:" not in page and "It fits." in page
    wrong, _ = planned(gpu_memory_utilization=0.999)
    assert "It does not fit." in plan_page(wrong) and "rollout needs" in plan_page(wrong)


def test_the_page_of_a_search_tells_the_run_as_it_is_written_from_what_was_found() -> None:
    """Also where it does not fit: its time, and why, stand above those of the layouts."""
    for share, fits in ((0.5, True), (0.999, False)):
        run = any_run()
        run.actor.microbatch_tokens = 8192
        run.rollout.gpu_memory_utilization = share
        written = as_written(run, plan(run, models.moe(), H100))
        looked = search(run, models.moe(), H100, limit=2)
        root = ElementTree.fromstring(search_page(looked, written).split("\n", 1)[1])
        table = next(root.iter("table"))
        _, own, first, *_ = ["; ".join(cell.text or "" for cell in row) for row in table.iter("tr")]
        assert own.startswith(seconds_text(written.plan.step_s)) and own.partition("as it is written")[1]
        assert ("does not fit" in own) != fits
        assert first.startswith(seconds_text(looked.best[0].plan.step_s)) and "the fastest" in first
        assert "as it is written" in " ".join(shown(search_tables(looked, written)).split())
        text = " ".join("".join(root.itertext()).split())
        assert " ".join(looked.best[0].overrides) in text and f"Layouts of {written.plan.title}" in text
    values = search_values(looked, written)
    assert values["as_written"]["step_s"] == written.plan.step_s and values["best"][0]["plan"]["fits"]


def test_no_two_parts_of_a_chart_have_one_colour() -> None:
    run = any_run()
    run.algorithm.adv_estimator, run.actor.use_kl_loss = "gae", True
    run.actor.microbatch_tokens = run.critic.microbatch_tokens = 8192
    run.trainer.save_freq = 5
    root = ElementTree.fromstring(plan_page(plan(run, models.moe(), H100)).split("\n", 1)[1])
    figures = [[each.get("class") for each in figure.iter("i")] for figure in root.iter("figure")]
    assert len(max(figures, key=len)) > len(LIGHT), "more parts than the palette has hues"
    assert all(len(set(colours)) == len(colours) for colours in figures)


def test_the_values_are_numbers() -> None:
    run_plan, looked = planned()
    values = json.loads(json.dumps(plan_values(run_plan) | {"search": search_values(looked)}))
    assert values["fits"] is True and values["num_gpus"] == 1
    update = next(peak for peak in values["peaks"] if peak["phase"] == Phase.update.value)
    assert update["num_bytes"] == sum(each["num_bytes"] for each in update["parts"])
    assert values["search"]["best"][0]["plan"]["fits"] is True


def test_a_line_for_the_start() -> None:
    run_plan, _ = planned()
    line = short_line(run_plan)
    assert line.startswith("the plan: ") and "of 79.6 GiB" in line
    low, high = (seconds_text(run_plan.step_s * factor) for factor in (1 / 1.25, 1 / 0.75))
    assert f"a step takes {low} to {high}" in line


def test_numbers_are_short() -> None:
    assert [gib(n) for n in (2**30, 2**20 * 100, 79 * 2**30)] == ["1.0", "0.10", "79.0"]
    assert [seconds_text(n) for n in (0.5, 9.5, 90, 110, 180, 7200)] == [
        "0.5 s", "9.5 s", "90 s", "110 s", "3.0 min", "2.0 h",
    ]  # fmt: skip
