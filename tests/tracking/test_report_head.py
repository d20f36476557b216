from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from mcore_rl.config.algorithm_registry import algorithms
from mcore_rl.config.compose import as_dict, compose
from mcore_rl.config.run import RunConfig
from mcore_rl.tracking.report import facts, head_card, title_of
from mcore_rl.tracking.run_directory import plain
from mcore_rl.tracking.run_files import read_run
from mcore_rl.tracking.run_owner import OWNER, Owner, start_of

HARDWARE = {"host": "n1", "processor": "EPYC", "cpus": 64, "memory_gib": 512.0}


def made(path: Path, *, steps: int = 4, total: int = 4, device: dict[str, Any] | None = None, plan: str = "{}") -> Path:
    """A run of four steps of half an hour each."""
    path.mkdir()
    config = {
        "model": {"path": "/models/Qwen2.5-7B"}, "recipe": {"title": "sums"},
        "algorithm": {"adv_estimator": "rloo"}, "actor": {"loss_mode": "policy_gradient", "optim": {"lr": 1e-6}},
        "data": {"train_files": ["d/train.parquet"], "val_files": ["d/test.parquet"], "train_batch_size": 128},
        "rollout": {"n": 8},
    }  # fmt: skip
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    rows = [{"step": k, "time/step": 1800.0} for k in range(1, steps + 1)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    environment = {
        "started": "2026-01-02T03:04:05+00:00", "total_steps": total, "versions": {"torch": "2.13.0"},
        "hardware": HARDWARE | (device or {}),
    }  # fmt: skip
    (path / "environment.json").write_text(json.dumps(environment))
    (path / "plan.json").write_text(plan)
    return path


def tiles(path: Path) -> dict[str, tuple[str, ...]]:
    return {fact.name: (fact.value, *(note for note in fact.notes if note)) for fact in facts(read_run(path))}


def test_the_tiles_say_what_ran_on_what_and_at_what_cost(tmp_path: Path) -> None:
    """Two hours of 16 devices are 32 GPU hours."""
    plan = {"num_gpus": 16, "num_nodes": 2, "num_parameters": 7_615_616_512,
            "layout": "tp=4,pp=1,ep=1; rollout tp=2,dp=8"}  # fmt: skip
    device = {"device": "cuda", "device_name": "NVIDIA H100"}
    assert tiles(made(tmp_path / "run", device=device, plan=json.dumps(plan))) == {
        "Model": ("models/Qwen2.5-7B", "7.6B parameters", "recipe: sums"),
        "Algorithm": ("RLOO", "advantages rloo, loss policy_gradient", "learning rate 1e-06"),
        "Data": ("d/train.parquet", "validated on d/test.parquet", "128 prompts a step, 8 responses each"),
        "Hardware": ("16 x NVIDIA H100", "2 nodes", "tp=4; rollout tp=2,dp=8"),
        "Time in steps": ("2:00:00 h", "4 steps, 30:00 min each", "started 2026-01-02 03:04 UTC"),
        "Cost": ("32 GPU hours", "16 devices, while in steps"),
    }


def test_a_cpu_costs_no_gpu_hours_and_missing_files_cost_tiles(tmp_path: Path) -> None:
    path = made(tmp_path / "run", device={"device": "cpu"})
    assert tiles(path)["Cost"] == ("no GPU hours", "2 h of this machine's CPU")
    assert tiles(path)["Hardware"] == ("EPYC", "64 cores, 512.0 GiB, 1 node")
    for name in ("config.yaml", "environment.json", "plan.json"):
        (path / name).unlink()
    assert set(tiles(path)) == {"Time in steps", "Cost"}


@pytest.mark.parametrize("name", sorted(algorithms()))
def test_the_name_of_every_algorithm_is_found_in_its_own_configuration(name: str) -> None:
    config = plain(as_dict(compose(RunConfig, "train", [f"algorithm={name}", "model.path=m"])))
    assert title_of(config) == algorithms()[name].title


def test_the_state_follows_from_the_steps_and_the_owner(tmp_path: Path) -> None:
    def state(path: Path) -> str:
        return head_card(read_run(path)).partition('class="badge')[2].partition(">")[2].partition("<")[0]

    assert state(made(tmp_path / "done")) == "finished"
    path = made(tmp_path / "half", total=10)
    assert state(path) == "ended before its last step"
    here = asdict(Owner())
    (path / OWNER).write_text(json.dumps(here | {"pid": 1, "started": 1}))
    assert state(path) == "killed"
    parent = os.getppid()
    (path / OWNER).write_text(json.dumps(here | {"pid": parent, "started": start_of(parent)}))
    assert state(path) == "running"
    assert tiles(path)["Time in steps"][1:3] == ("about 3:00:00 h left", "30:00 min a step of late")
    (path / OWNER).write_text(json.dumps(here | {"machine": "another", "host": "n7"}))
    assert state(path) == "belongs to a program on n7"
    (path / OWNER).write_text(json.dumps(here))
    assert state(path) == "ended before its last step", "its own process writes the report last"
