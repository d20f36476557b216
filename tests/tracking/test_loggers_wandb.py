"""wandb really runs, offline, and its own file is read back as the log of records that it is."""

from __future__ import annotations

import io
import json
import re
import socket
import struct
import types
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import wandb
from rich.console import Console
from wandb.proto.wandb_internal_pb2 import Record

from mcore_rl.config.trainer import Logger, TrainerConfig
from mcore_rl.ground.errors import ConfigError
from mcore_rl.tracking import loggers
from mcore_rl.tracking.sinks import Tracker

TRAINER = TrainerConfig(project_name="words", experiment_name="first", logger=[Logger.wandb], log_val_generations=2)


def records(run: Path) -> Iterator[Any]:
    """Of the file's LevelDB log: a header of 7 bytes, blocks of 32 KiB, records of checksum, length, kind and data."""
    data = next(run.glob("run-*.wandb")).read_bytes()
    assert data[:4] == b":W&B"
    place, parts = 7, b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        length, kind = struct.unpack("<HB", data[place + 4 : place + 7])
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


def history(run: Path) -> list[dict[str, Any]]:
    rows = []
    for record in records(run):
        if record.WhichOneof("record_type") == "history":
            items = (
                (item.key or "/".join(item.nested_key), json.loads(item.value_json)) for item in record.history.item
            )
            rows.append(dict(items))
    return rows


def test_an_offline_run_holds_metrics_config_and_the_first_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with Tracker.open(tmp_path, TRAINER, {"lr": 1e-6}, 2, Console(file=io.StringIO())) as tracker:
        for step in (0, 1):
            rows = [{"prompt": f"p{k}", "score": float(k), "gold": k if k else None} for k in range(5)]
            tracker.samples(step, "validation", partial(list, rows))
            tracker.samples(step, "rollouts", partial(list, rows[2:]))
            tracker.log(step, {"reward/mean": step / 4, "val/a/accuracy": 0.5})
    wandb.teardown()
    (directory,) = (tmp_path / "logs/wandb").glob("offline-run-*")
    rows = history(directory)
    assert [(row["_step"], row["reward/mean"], row["val/a/accuracy"]) for row in rows] == [(0, 0, 0.5), (1, 0.25, 0.5)]
    assert rows[0]["validation/samples/nrows"] == 2
    table = json.loads((directory / "files" / rows[0]["validation/samples/path"]).read_text())
    assert table["columns"] == ["prompt", "score", "gold"]
    assert table["data"] == [["p0", 0.0, None], ["p1", 1.0, 1]]
    run = next(record.run for record in records(directory) if record.WhichOneof("record_type") == "run")
    assert (run.project, run.display_name) == ("words", "first")
    assert {item.key: json.loads(item.value_json) for item in run.config.update}["lr"] == 1e-6
    assert run.run_id == (tmp_path / "logs/wandb_id").read_text().strip()


def test_a_resumed_run_goes_on_as_the_same_run_of_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = list[str]()

    def init(**given: Any) -> Any:
        begun.append(given["id"])
        return types.SimpleNamespace(log=lambda metrics, step: None, finish=lambda: None)

    monkeypatch.setattr(wandb, "init", init)
    path = tmp_path / "logs" / "wandb_id"
    for step, resumed_step in ((0, None), (1, 0), (0, None)):
        kept = path.read_text() if path.exists() else None
        with Tracker.open(tmp_path, TRAINER, {}, 2, resumed_step=resumed_step) as tracker:
            assert (path.read_text() if path.exists() else None) == kept, "a start that fails leaves the id"
            tracker.log(step, {})
        assert path.read_text().strip() == begun[-1]
    assert begun[1] == begun[0] != begun[2]


def test_wandbs_own_refusal_is_shown_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "sometimes")
    with pytest.raises(ConfigError, match=r"(?s)trainer.logger=wandb: cannot start: .*sometimes.*WANDB_MODE=offline"):
        Tracker.open(tmp_path, TRAINER, {}, 2)


@pytest.mark.parametrize("listens", [True, False], ids=["it accepts and never answers", "a closed port"])
def test_a_server_that_does_not_answer_lets_the_run_go_on_offline(
    listens: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    processes: None,
) -> None:
    monkeypatch.setattr(loggers, "INIT_S", 2.0)
    for name, value in (("MODE", "online"), ("SILENT", "true"), ("API_KEY", "0" * 40)):
        monkeypatch.setenv(f"WANDB_{name}", value)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if listens:
            server.listen(50)
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        with Tracker.open(tmp_path, TRAINER, {"lr": 1e-6}, 2, Console(file=io.StringIO())) as tracker:
            tracker.log(1, {"reward/mean": 0.25})
        assert re.search(r"wandb: its server does not answer \(.*\)\. The run goes on offline", capsys.readouterr().err)
        wandb.teardown()
    (directory,) = (tmp_path / "logs/wandb").glob("offline-run-*")
    assert [(row["_step"], row["reward/mean"]) for row in history(directory)] == [(1, 0.25)]
