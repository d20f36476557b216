"""The planner against the world: the rows of measured runs, planned."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.calibration import composed_row, planned_gain, planned_mfu, planned_parts
from mcore_rl.families.flops import matmul_parameters
from mcore_rl.planning.measured_runs import (
    WITHIN,
    MeasuredGain,
    MeasuredRun,
    MeasuredUpdate,
    measured_gains,
    measured_runs,
    measured_updates,
)
from mcore_rl.planning.plan import role_plan
from tests.house.source import ROOT

PARTS = {"generate", "logprobs", "update", "sync", "step"}
LONG = ("Qwen3-235B", "DeepSeek-V3")  # whose layouts are searched on 32 to 64 nodes


@pytest.mark.parametrize("run", [run for run in measured_runs() if run.counted], ids=lambda run: run.name)
def test_what_counts_is_within_a_quarter(run: MeasuredRun) -> None:
    planned = planned_parts(run)
    ratios = {part: planned[part] / seconds for part, seconds in run.counted.items()}
    assert ratios == {part: pytest.approx(1, abs=WITHIN) for part in run.counted}


@pytest.mark.parametrize("update", measured_updates(), ids=lambda update: update.name)
def test_updates_on_one_device_are_within_a_quarter(update: MeasuredUpdate) -> None:
    assert planned_mfu(update) == pytest.approx(update.mfu, rel=WITHIN)


SIGNS = [
    pytest.param(gain, id=gain.name, marks=pytest.mark.tier("full") if gain.name.startswith(LONG) else ())
    for gain in measured_gains()
]


@pytest.mark.parametrize("gain", SIGNS)
def test_the_sign_of_every_gain_is_right(gain: MeasuredGain) -> None:
    sync, other = planned_gain(gain)
    assert other.engine_nodes == gain.engine_nodes and sync.trainer_nodes == gain.engine_nodes + other.trainer_nodes
    planned = sync.simulation.step_s / other.simulation.step_s
    assert (planned > 1) == (gain.sync_s > gain.other_s)
    page = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
    assert f"| {gain.name} | {gain.sync_s / gain.other_s:.2f} | {planned:.2f} |" in page


def test_rows_say_where_they_are_from_and_why_they_do_not_count() -> None:
    rows = measured_runs()
    assert Counter(run.name for run in rows).most_common(1)[0][1] == 1
    for run in rows:
        assert run.source.startswith("https://") and run.seconds.keys() <= PARTS and "step" in run.seconds
        assert set(run.out) <= run.seconds.keys() and bool(run.out) == bool(run.why)
        parts = [run.seconds.get(part, 0.0) for part in ("generate", "logprobs", "update", "sync")]
        assert sum(parts) <= run.seconds["step"] * 1.001, "a step has its parts"
    counted = [run for run in rows if "step" in run.counted]
    assert len(counted) > 0.8 * len(rows), "most count"
    assert {gain.run for gain in measured_gains()} <= {run.name for run in counted}
    assert any(gain.sync_s < gain.other_s for gain in measured_gains()), "a gain that is a loss is among them"


@pytest.mark.parametrize("run", measured_runs(), ids=lambda run: run.name)
def test_a_row_is_planned_as_what_it_was(run: MeasuredRun) -> None:
    """The devices that its name counts, its model's size, and the layers that its cluster comes to."""
    config, model, cluster = composed_row(run.name)
    devices = int(next(word for part in run.name.split(", ")[1:2] for word in part.split()))
    assert config.trainer.world_size == devices and run.device in cluster.device_name
    assert (model.moe is not None) == run.experts and cluster.transformer_engine == run.fused
    role = role_plan(config.group_rows[0], model, config, cluster)
    assert role.sizes.num_parameters / 1e9 == pytest.approx(run.billions, rel=0.04)
    assert matmul_parameters(model) <= role.sizes.num_parameters
    assert role.work.mean == run.prompt + run.response
