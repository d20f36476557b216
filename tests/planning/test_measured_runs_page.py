"""docs/planning.md beside the table of measured runs and the planner: rows, constants, sums and examples."""

from __future__ import annotations

from functools import cache
from math import exp, log

import pytest

from benchmarks.calibration import planned_mfu, planned_parts
from mcore_rl.config.compose import compose
from mcore_rl.config.launch import load_cluster, load_recipe
from mcore_rl.config.run import RunConfig
from mcore_rl.planning import overheads, timing
from mcore_rl.planning.measured_runs import (
    WITHIN,
    MeasuredRun,
    MeasuredUpdate,
    measured_runs,
    measured_updates,
)
from mcore_rl.planning.plan import Plan, plan
from mcore_rl.planning.recipes import other_models, run_model
from mcore_rl.planning.tables import seconds_text
from tests.house.source import ROOT

COLUMNS = ("generate", "logprobs", "update", "step")
# What the page calls a constant -> its value, in the unit of its row.
CONSTANTS = {
    "experts, TFLOP/s for each of their columns": timing.EXPERT_COLUMN_FLOPS / 1e12,
    "local dense layers, over Transformer Engine's": timing.LOCAL_EFFICIENCY,
    "local experts": timing.LOCAL_EXPERT_EFFICIENCY,
    "small all-reduce inside a node, µs": timing.LAYER_LATENCY_S * 1e6,
    "over two nodes, and for every doubling, µs": timing.NODES_LATENCY_S * 1e6,
    "a layer with experts in a decode step, µs": timing.EXPERT_DECODE_S * 1e6,
    "a layer of an engine without CUDA graphs, ms": timing.EAGER_LAYER_S * 1e3,
    "MI300X, over the same share of the data sheet": timing.device_efficiency("AMD Instinct MI300X"),
    "B200 and GB200, dense": timing.device_efficiency("NVIDIA GB200"),
}


@cache
def page(name: str = "planning") -> str:
    return (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")


def cells_of(first: str) -> list[str]:
    """The cells of the one row of the page's first table of runs that begins with ``first``."""
    table = page().partition("### What the times were held against\n")[2].partition("\n### ")[0]
    (line,) = (line for line in table.splitlines() if line.startswith(f"| {first} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def cell(run: MeasuredRun, planned: dict[str, float], part: str) -> str:
    """What the page must say of a part of a run."""
    if part not in run.seconds:
        return ""
    if part in run.out:
        return f"out: {run.seconds[part]:.3g}, {planned[part]:.3g}"
    measured = run.counted[part]
    return f"{measured:.3g}, {planned[part]:.3g}: {planned[part] / measured:.2f}"


@pytest.mark.parametrize("run", measured_runs(), ids=lambda run: run.name)
def test_the_page_has_every_run_with_its_source(run: MeasuredRun) -> None:
    planned = planned_parts(run)
    _, lengths, *parts, source = cells_of(run.name)
    assert lengths == f"{run.prompt}, {run.response}"
    assert parts == [cell(run, planned, part) for part in COLUMNS]
    address, _, file = run.source.partition(" ")
    assert f"({address.rstrip(',')})" in source and file.partition(",")[0] in source


@pytest.mark.parametrize("update", measured_updates(), ids=lambda update: update.name)
def test_the_page_has_every_update_and_the_facts_have_it_too(update: MeasuredUpdate) -> None:
    planned = planned_mfu(update)
    _, mean, *parts, source = cells_of(update.name)
    assert mean == f"{update.mean:.0f}" and f"MFU {update.mfu:.0%}, {planned:.0%}: {update.mfu / planned:.2f}" in parts
    _, section, *_ = update.source.split(", ")
    assert section in source
    (row,) = (
        line for line in page("gpu_facts").splitlines() if line.startswith("| MFU") and f"| `{section}` |" in line
    )
    assert f"{100 * update.mfu:.0f} %" in row


def test_the_page_has_the_constants_that_the_planner_takes() -> None:
    table = page().partition("### The constants\n")[2].partition("\nThe seconds of narrow experts")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:4]] for line in table.splitlines() if line.startswith("| ")]
    said = {name: float(value) for name, _, value in rows if name != "constant"}
    assert len(said) == len(CONSTANTS)
    for begins, value in CONSTANTS.items():
        (name,) = (name for name in said if name.startswith(begins))
        assert said[name] == pytest.approx(value), name
    assert f"{overheads.MATMUL_EFFICIENCY:g} of the data sheet" in table
    assert f"{overheads.MEMORY_EFFICIENCY:g} of the memory's rate and {timing.STEP_LATENCY_S * 1e3:g} ms" in table


def test_the_page_counts_what_counts() -> None:
    ratios = [
        planned_parts(run)[part] / seconds for run in measured_runs() for part, seconds in run.counted.items()
    ] + [planned_mfu(update) / update.mfu for update in measured_updates()]
    rows = sum(bool(run.counted) for run in measured_runs()) + len(measured_updates())
    error = exp(sum(abs(log(ratio)) for ratio in ratios) / len(ratios)) - 1
    assert f"{len(ratios)} values of {rows} rows, whose mean error is {100 * error:.0f} %" in page()
    assert f"within {100 * WITHIN:.0f} %" in page()


def planned_of(run: RunConfig) -> Plan:
    return plan(run, run_model(run), load_cluster("nvidia_h100"), other_models(run))


def recipe_plan(name: str, *overrides: str) -> Plan:
    run = load_recipe(name, overrides)
    assert isinstance(run, RunConfig)
    return planned_of(run)


def test_steps_that_pages_give_as_examples_are_those_of_today() -> None:
    first_run = [
        "recipe.checkpoint=qwen2.5-0.5b-instruct", "algorithm=grpo", "rollout.n=8", "trainer.n_gpus_per_node=8",
        "actor.parallel.tp=2", "data.train_files=[train.parquet]",
    ]  # fmt: skip
    one, all_ = (planned_of(compose(RunConfig, "train", [*first_run, *more])) for more in (["rollout.dp=1"], []))
    assert f"`{one.notes[0]}`; a step takes {one.step_s:.0f} s by plan, and {all_.step_s:.0f} without it." in page()
    shown = recipe_plan("qwen3_30b_a3b_grpo", "data.mean_response_length=700")
    low, high = map(seconds_text, shown.calibration.range_s(shown.step_s))
    assert f"`all {low} to {high}`" in page() and f"`{shown.calibration.text[:40]}" in page()
    least, full = recipe_plan("qwen25_72b_grpo"), recipe_plan("qwen25_72b_grpo", "actor.recompute=full")
    said = " ".join(page("performance").split())
    assert f"on 32 H100 is planned at {least.step_s:.0f} s instead of {full.step_s:.0f}." in said
