"""Whether a checkpoint is of the run that is to go on: what is refused, what is only told."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.controller.lifecycle.resume_check import RUN, Identity, note_differences
from mcore_rl.errors import CheckpointError, ConfigError


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    for name in ("one", "two"):
        (tmp_path / f"{name}.parquet").write_text(name)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "mixtral", "hidden_size": 64}))
    return {
        "model": {"path": str(tmp_path / "model")},
        "data": {"train_files": [str(tmp_path / "one.parquet"), str(tmp_path / "two.parquet")], "seed": 1},
        "actor": {"optim": {"lr": 1e-6}, "parallel": {"tp": 1}},
        "algorithm": {"adv_estimator": "rloo"},
        "trainer": {"default_local_dir": "runs/a", "resume_mode": "auto", "save_freq": 10},
    }


@pytest.fixture
def checkpoint(config: dict[str, Any], tmp_path: Path) -> Path:
    (tmp_path / "step_1").mkdir()
    Identity.of(config, ["actor"]).keep(tmp_path / "step_1")
    return tmp_path / "step_1"


def test_the_same_run_has_nothing_to_tell(config: dict[str, Any], checkpoint: Path) -> None:
    assert Identity.of(config, ["actor"]).check(checkpoint) == []
    assert Identity.read(checkpoint).config == config


def test_other_settings_are_told(config: dict[str, Any], checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config["actor"]["optim"]["lr"] = 2e-6
    config["actor"]["parallel"] = {"tp": 2, "pp": 2}
    config["trainer"] |= {"default_local_dir": "runs/b", "resume_mode": "path", "save_freq": 5}
    identity = Identity.of(config, ["actor"])
    assert identity.check(checkpoint) == [
        "actor.optim.lr: 1e-06 when the checkpoint was made, now 2e-06",
        "actor.parallel.pp: None when the checkpoint was made, now 2",
        "actor.parallel.tp: 1 when the checkpoint was made, now 2",
        "trainer.save_freq: 10 when the checkpoint was made, now 5",
    ]
    note_differences(identity, checkpoint)
    said = capsys.readouterr().err
    assert said.startswith("note: Resuming from ") and "actor.optim.lr: 1e-06" in said


def test_a_model_and_data_that_moved_are_the_same(config: dict[str, Any], checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    values = {"model_type": "mixtral", "hidden_size": 64, "transformers_version": "9", "use_cache": False}
    (tmp_path / "elsewhere" / "config.json").write_text(json.dumps(values))
    (tmp_path / "elsewhere" / "other.parquet").write_text("two")
    config["model"]["path"] = str(tmp_path / "elsewhere")
    config["data"]["train_files"][1] = str(tmp_path / "elsewhere" / "other.parquet")
    differences = Identity.of(config, ["actor"]).check(checkpoint)
    assert [line.partition(":")[0] for line in differences] == ["data.train_files", "model.path"]


def _other_model(config: dict[str, Any], place: Path) -> None:
    (place / "model" / "config.json").write_text(json.dumps({"model_type": "mixtral", "hidden_size": 128}))


def _other_bytes(config: dict[str, Any], place: Path) -> None:
    (place / "two.parquet").write_text("owt")


def _other_order(config: dict[str, Any], place: Path) -> None:
    config["data"]["train_files"].reverse()


def _fewer(config: dict[str, Any], place: Path) -> None:
    config["data"]["train_files"].pop()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            _other_model,
            r"model\.path=.*is another model than the checkpoint's: hidden_size 64 there, 128 here. Write what",
        ),
        (_other_bytes, r"data\.train_files=.*are other data than the checkpoint's"),
        (_other_order, r"data\.train_files=.*one.parquet of 3 bytes, two.parquet of 3 bytes there, two.parquet of 3"),
        (_fewer, r"data\.train_files=.*two.parquet of 3 bytes there, one.parquet of 3 bytes here. Write what"),
    ],
)
def test_another_run_is_refused(
    config: dict[str, Any], checkpoint: Path, tmp_path: Path, change: Callable[[dict[str, Any], Path], None], said: str
) -> None:
    changed = copy.deepcopy(config)
    change(changed, tmp_path)
    with pytest.raises(ConfigError, match=said):
        Identity.of(changed, ["actor"]).check(checkpoint)


def test_everything_is_refused_at_once(config: dict[str, Any], checkpoint: Path, tmp_path: Path) -> None:
    _other_model(config, tmp_path)
    _fewer(config, tmp_path)
    with pytest.raises(ConfigError) as refused:
        Identity.of(config, ["actor", "critic"]).check(checkpoint)
    keys = [violation.key for violation in refused.value.violations]
    assert keys == ["model.path", "data.train_files", "algorithm.adv_estimator"]
    assert "trains actor and critic; the checkpoint has actor. Write what" in str(refused.value)


def test_validation_alone_needs_no_training_data(config: dict[str, Any], checkpoint: Path) -> None:
    config["data"]["train_files"] = []
    assert len(Identity.of(config, ["actor"]).check(checkpoint)) == 1


@pytest.mark.parametrize("text", ["", "[]", "{}"])
def test_what_cannot_be_read_is_named(config: dict[str, Any], checkpoint: Path, text: str) -> None:
    (checkpoint / RUN).write_text(text)
    with pytest.raises(CheckpointError, match=r"run.json cannot be read: .*Resume from another step"):
        Identity.of(config, ["actor"]).check(checkpoint)
