"""The plan before a run: of this machine, shown, written, and refused where it cannot fit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mcore_rl.config.engine import Device
from mcore_rl.config.run import RunConfig
from mcore_rl.config.sft import SftConfig
from mcore_rl.controller.lifecycle import start_plan
from mcore_rl.controller.lifecycle.start_plan import cluster_at_hand, doubts_of, forecast, tell_plan, write_plan
from mcore_rl.families.registry import model_of
from mcore_rl.ground.errors import ConfigError
from mcore_rl.parallel.device import detect
from tests.support import models, published

CPU = detect(Device.cpu)
GPU = replace(
    CPU, kind=Device.cuda, device_type="cuda", device_name="NVIDIA H100 80GB HBM3", memory_total_bytes=79 * 2**30
)  # fmt: skip


def run_of() -> RunConfig:
    run = RunConfig()
    run.actor.microbatch_tokens = 4096
    return run


def test_a_small_run_is_planned_shown_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planned = forecast(run_of(), CPU, {"actor": models.moe()})
    assert planned.fits
    tell_plan(planned, ["a doubt"])
    said = capsys.readouterr().err
    assert "the plan: " in said and "warning: a doubt" in said
    write_plan(planned, tmp_path)
    assert json.loads((tmp_path / "plan.json").read_text())["fits"] is True


def test_gpus_that_would_idle_are_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of()
    run.trainer.n_gpus_per_node, run.rollout.dp = 2, 1
    tell_plan(forecast(run, GPU, {"actor": models.moe()}), [])
    said = " ".join(capsys.readouterr().err.split())
    assert "warning: 1 of 2 GPUs idle in " in said and "rollout.dp=2 takes more" in said


def test_fine_tuning_too() -> None:
    config = SftConfig()
    config.actor.microbatch_tokens = 4096
    assert forecast(config, CPU, {"actor": models.dense()}).concurrency is None


def test_a_model_that_this_machine_cannot_hold_is_refused() -> None:
    model = model_of(published.FACTS["mistralai/Mixtral-8x22B-Instruct-v0.1"])[1]
    with pytest.raises(ConfigError, match="update needs"):
        forecast(run_of(), CPU, {"actor": model})


def test_an_accelerator_has_its_own_memory_and_the_rates_of_its_name() -> None:
    cluster = cluster_at_hand(run_of().trainer, GPU)
    assert (cluster.gpus_per_node, cluster.gpu_memory_gib, cluster.memory_gb_s) == (1, 79.0, 3350.0)
    assert cluster_at_hand(run_of().trainer, replace(GPU, device_name="unheard of")).memory_gb_s == 2000.0
    assert cluster_at_hand(run_of().trainer, CPU).gpus_per_node == 0
    planned = forecast(run_of(), GPU, {"actor": models.moe()})
    assert planned.fits and planned.peaks[0].capacity == 79 * 2**30


def test_rates_and_processes_that_nobody_means_are_doubts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_plan, "num_cores", lambda: 2)
    run = run_of()
    assert doubts_of(run, CPU) == []
    run.actor.optim.lr, run.trainer.n_gpus_per_node = 1.0, 8
    rate, processes = doubts_of(run, CPU)
    assert rate.startswith("actor.optim.lr=1: AdamW moves every weight by about that much a step")
    assert processes.startswith("trainer.n_gpus_per_node=8: as many training processes share 2 cores")
    assert doubts_of(run, GPU) == [rate], "devices compute there"
    config = SftConfig()
    config.actor.optim.lr = 0.5
    assert len(doubts_of(config, CPU)) == 1


def test_a_microbatch_that_no_long_response_fits_into_does_not_fit() -> None:
    run = run_of()
    run.actor.microbatch_tokens = run.data.max_response_length
    with pytest.raises(ConfigError, match="does not fit into a microbatch with its prompt"):
        forecast(run, CPU, {"actor": models.moe()})
    run.actor.microbatch_tokens = run.data.max_response_length + 1
    assert "is refused before it starts" in " ".join(forecast(run, CPU, {"actor": models.moe()}).notes)
