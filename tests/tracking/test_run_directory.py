from __future__ import annotations

import json
import subprocess
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import yaml

from mcore_rl.config.trainer import Logger, TrainerConfig
from mcore_rl.tracking.run_directory import finished_step, plain, prepare, write_finished
from mcore_rl.tracking.samples import sample_files, write_samples


def test_config_and_environment_are_written(tmp_path: Path) -> None:
    config = {"trainer": TrainerConfig(logger=[Logger.wandb]), "data": {"files": ("a", "b"), "n": None, "ü": 1.5}}
    prepare(tmp_path / "run", config, 12, None, {"device": "H100", "count": np.int64(8)})
    written = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    assert written["trainer"]["logger"] == ["wandb"]
    assert written["trainer"]["resume_mode"] == "auto"
    assert written["data"] == {"files": ["a", "b"], "n": None, "ü": 1.5}
    environment = json.loads((tmp_path / "run/environment.json").read_text())
    assert environment["total_steps"] == 12 and environment["resumed_step"] is None
    assert environment["versions"]["pyarrow"] == metadata.version("pyarrow")
    assert environment["hardware"]["device"] == "H100" and environment["hardware"]["count"] == "8"
    assert environment["hardware"]["cpus"] >= 1 and environment["hardware"]["memory_gib"] > 0
    assert environment["commit"] is None or len(environment["commit"].removesuffix("-dirty")) in (40, 64)
    assert (tmp_path / "run/logs").is_dir()


def test_plain_leaves_nothing_that_yaml_cannot_say() -> None:
    value = {"enum": Logger.console, "path": Path("a/b"), 3: {"set": {1}}, "nested": [TrainerConfig()], "flag": True}
    plainly = plain(value)
    assert yaml.safe_load(yaml.safe_dump(plainly)) == plainly
    assert (plainly["enum"], plainly["path"], plainly["3"], plainly["flag"]) == ("console", "a/b", {"set": [1]}, True)


def test_a_fresh_run_moves_the_earlier_one_aside_whole(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    (tmp_path / "plan.json").write_text("{}")
    for number in (1, 2):
        (tmp_path / "metrics.jsonl").write_text(f'{{"step": {number}}}\n')
        write_samples(tmp_path, number, "validation", [{"a": 1}])
        prepare(tmp_path, {"seed": number}, 5, None, {})
        assert not (tmp_path / "metrics.jsonl").exists()
        assert sample_files(tmp_path, "validation") == {}
    for number in (1, 2):
        earlier = tmp_path / "earlier" / str(number)
        assert json.loads((earlier / "metrics.jsonl").read_text()) == {"step": number}
        assert list(sample_files(earlier, "validation")) == [number]
        assert yaml.safe_load((earlier / "config.yaml").read_text()) == {"seed": number - 1}
    assert (tmp_path / "earlier/1/plan.json").exists()
    prepare(tmp_path, {}, 5, None, {})
    assert not (tmp_path / "earlier/3").exists()


def test_a_resumed_run_keeps_what_is_not_redone(tmp_path: Path) -> None:
    for step in (0, 5, 10):
        write_samples(tmp_path, step, "validation", [{"a": step}])
        write_samples(tmp_path, step, "rollouts", [{"a": step}])
    prepare(tmp_path, {}, 20, 5, {})
    assert list(sample_files(tmp_path, "validation")) == list(sample_files(tmp_path, "rollouts")) == [0, 5]
    assert json.loads((tmp_path / "environment.json").read_text())["resumed_step"] == 5


def test_the_end_of_a_run_is_noted_until_it_goes_on(tmp_path: Path) -> None:
    assert finished_step(tmp_path) is None
    prepare(tmp_path, {}, 20, None, {})
    assert finished_step(tmp_path) is None
    write_finished(tmp_path, 20)
    assert finished_step(tmp_path) == 20
    assert json.loads((tmp_path / "environment.json").read_text())["total_steps"] == 20
    prepare(tmp_path, {}, 30, 20, {})
    assert finished_step(tmp_path) is None
    (tmp_path / "environment.json").write_text("[1")
    write_finished(tmp_path, 30)
    assert finished_step(tmp_path) is None


def test_a_commit_of_somebody_elses_repository_is_not_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mcore_rl

    package = tmp_path / "venv" / "mcore_rl" / "__init__.py"
    package.parent.mkdir(parents=True)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    author = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    subprocess.run(["git", "-C", tmp_path, *author, "commit", "-q", "--allow-empty", "-m", "theirs"], check=True)
    monkeypatch.setattr(mcore_rl, "__file__", str(package))
    prepare(tmp_path / "run", {}, 1, None, {})
    assert json.loads((tmp_path / "run/environment.json").read_text())["commit"] is None
