from __future__ import annotations

import io
import json
import sys
from collections.abc import Mapping
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from mcore_rl.config.trainer import Logger, TrainerConfig
from mcore_rl.ground.errors import ConfigError
from mcore_rl.tracking import sinks
from mcore_rl.tracking.jsonl import read_metrics
from mcore_rl.tracking.loggers import LOGGERS, LoggerRow, Sink
from mcore_rl.tracking.samples import sample_files
from mcore_rl.tracking.sinks import Tracker


def open_tracker(
    run_dir: Path, loggers: tuple[Logger, ...] = (), out: io.StringIO | None = None, **more: Any
) -> Tracker:
    console = Console(file=out or io.StringIO(), width=100)
    return Tracker.open(run_dir, TrainerConfig(logger=list(loggers)), {"a": Logger.wandb}, 10, console, **more)


class Failing(Sink):
    name = "wandb"
    told = 0

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.told += 1
        raise ConnectionError("the network is gone")

    def samples(self, *_: object) -> None:
        raise ConnectionError("still")

    def close(self) -> None:
        raise ConnectionError("to the end")


class Recording(Failing):
    name = "recording"

    def __init__(self) -> None:
        self.heard: list[object] = []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.heard.append((step, dict(metrics)))

    def samples(self, *what: object) -> None:
        *_, rows = what
        assert callable(rows)
        self.heard.append((*what[:-1], rows()))

    def close(self) -> None:
        self.heard.append("closed")


def test_nobody_is_told_a_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a file of the run directory nor a logger; the caller's rows stay as they are."""
    monkeypatch.setenv("JUDGE_API_KEY", "sk-fake-123456")
    monkeypatch.setattr(sys, "argv", ["mcore-rl", "train", "judge.key=sk-fake-123456"])
    recording, rows = Recording(), [{"error": "401: sk-fake-123456", "extra_info": {"urls": ["x?k=sk-fake-123456"]}}]
    with Tracker.open(tmp_path, TrainerConfig(logger=[]), {"judge": {"key": "sk-fake-123456"}}, 1) as tracker:
        tracker._sinks += (recording,)
        tracker.samples(1, "rollouts", lambda: rows)
    assert recording.heard[0] == (1, "rollouts", [{"error": "401: ***", "extra_info": {"urls": ["x?k=***"]}}])
    assert rows[0]["error"] == "401: sk-fake-123456"
    assert "key: '***'" in (tmp_path / "config.yaml").read_text()
    assert json.loads((tmp_path / "environment.json").read_text())["command"][-1] == "judge.key=***"
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or b"sk-fake" not in path.read_bytes()


def test_a_run_is_recorded_and_shown(tmp_path: Path) -> None:
    out = io.StringIO()
    with open_tracker(tmp_path, (Logger.console,), out, devices={"device": "cpu"}) as tracker:
        tracker.samples(0, "validation", lambda: [{"correct": True}])
        tracker.log(0, {"val/a/accuracy": 1})
        tracker.now("generate", 3, 10)
        tracker.log(1, {"reward/mean": 0.5})
        tracker.samples(1, "rollouts", lambda: [{"reward": 0.5}])
    assert read_metrics(tmp_path / "metrics.jsonl") == [
        {"step": 0, "val/a/accuracy": 1.0},
        {"step": 1, "reward/mean": 0.5},
    ]
    assert list(sample_files(tmp_path, "validation")) == [0]
    assert list(sample_files(tmp_path, "rollouts")) == [1]
    assert json.loads((tmp_path / "environment.json").read_text())["hardware"]["device"] == "cpu"
    assert out.getvalue() == "step 0/10 | val 100.0%\n0 s: step 1/10 · generate 3/10\nstep 1/10 | reward 0.500\n"


def test_a_resumed_run_goes_on_behind_its_checkpoint(tmp_path: Path) -> None:
    with open_tracker(tmp_path) as tracker:
        for step in range(6):
            tracker.log(step, {"reward/mean": step})
    with open_tracker(tmp_path, resumed_step=3) as tracker:
        tracker.log(4, {"reward/mean": 40})
    assert [row["reward/mean"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1, 2, 3, 40]
    with open_tracker(tmp_path) as tracker:
        tracker.log(0, {})
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 1
    assert len(read_metrics(tmp_path / "earlier/1/metrics.jsonl")) == 5


def test_unknown_names_and_steps_that_do_not_rise_are_our_mistakes(tmp_path: Path) -> None:
    with open_tracker(tmp_path, resumed_step=3) as tracker:
        with pytest.raises(AssertionError, match="reward/maen: no such metric"):
            tracker.log(4, {"reward/maen": 1})
        with pytest.raises(AssertionError, match="step 3 is logged after step 3"):
            tracker.log(3, {})
        tracker.log(4, {})
        with pytest.raises(AssertionError, match="one call a step"):
            tracker.log(4, {})
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [4]


def test_a_logger_that_fails_later_is_warned_about_once(capsys: pytest.CaptureFixture[str]) -> None:
    failing, recording = Failing(), Recording()
    tracker = Tracker([failing, recording])
    tracker.log(1, {"reward/mean": 1})
    said = "warning: wandb: ConnectionError: the network is gone. The run goes on, and tries again; this is said once\n"
    assert capsys.readouterr().err == said
    tracker.log(2, {})
    tracker.samples(2, "rollouts", list)
    tracker.close()
    tracker.close()
    assert capsys.readouterr().err.endswith("What it has not written is lost\n")
    assert failing.told == 2  # it may come back
    assert recording.heard == [(1, {"reward/mean": 1.0}), (2, {}), (2, "rollouts", []), "closed"]


def test_every_logger_that_cannot_start_is_named_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # what import makes of a module that is not there
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    out = io.StringIO()
    trainer = TrainerConfig(logger=[Logger.console, Logger.wandb, Logger.tensorboard])
    with pytest.raises(ConfigError) as raised:
        Tracker.open(tmp_path, trainer, {}, 10, Console(file=out, force_terminal=True))
    assert [violation.key for violation in raised.value.violations] == ["trainer.logger"] * 2
    assert "trainer.logger=wandb: the package wandb is not installed. Run `pip install wandb`" in str(raised.value)
    assert "`, or leave wandb out of trainer.logger" in str(raised.value)
    assert "trainer.logger=tensorboard: cannot start: ModuleNotFoundError" in str(raised.value)
    assert "pip install tensorboard" in str(raised.value)
    assert out.getvalue() == ""  # no live line over the message


def test_what_started_is_closed_where_another_logger_cannot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recording = Recording()
    monkeypatch.setitem(LOGGERS, Logger.wandb, LoggerRow(lambda _: recording, ""))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"trainer\.logger=tensorboard"):
        open_tracker(tmp_path, (Logger.wandb, Logger.tensorboard))
    assert recording.heard == ["closed"]


def test_samples_that_cannot_be_written_are_warned_about_and_written_later(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tracker = open_tracker(tmp_path)
    (tmp_path / "rollouts").write_text("in the way")
    tracker.samples(1, "rollouts", lambda: [{"a": 1}])
    tracker.samples(1, "validation", lambda: [{"a": 1}])
    assert "warning: run directory: FileExistsError" in capsys.readouterr().err
    (tmp_path / "rollouts").unlink()
    tracker.samples(2, "rollouts", lambda: [{"a": 2}])
    tracker.close()
    assert list(sample_files(tmp_path, "rollouts")) == [1, 2]
    assert list(sample_files(tmp_path, "validation")) == [1]
    assert capsys.readouterr().err == ""


def test_what_a_full_disk_had_no_room_for_is_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    full, write = True, sinks.write_samples

    def written(*given: Any) -> Path:
        if full:
            raise OSError(28, "No space left on device")
        return write(*given)

    monkeypatch.setattr(sinks, "write_samples", written)
    with open_tracker(tmp_path) as tracker:
        for step in range(1, 12):
            tracker.samples(step, "rollouts", lambda step=step: [{"step": step}])
        wait([tracker._sinks[0]._writing])  # type: ignore[attr-defined]
        full = False
    assert list(sample_files(tmp_path, "rollouts")) == [*range(12 - sinks.MAX_UNSENT, 12)]
    assert capsys.readouterr().err.count("warning: ") == 1


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"trainer\.default_local_dir=.*file/run: cannot be written"):
        open_tracker(tmp_path / "file" / "run")
