"""Keys whose names are words of Python's, from the command line to a file and back."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from mcore_rl.config.compose import as_dict, as_yaml, compose
from mcore_rl.config.names import RESERVED, field_of, key_of, value_at
from mcore_rl.config.run import RunConfig
from mcore_rl.ground.errors import ConfigError

KEY = "async.max_staleness"


@pytest.mark.parametrize(
    ("key", "fields"),
    [
        (KEY, "async_.max_staleness"),
        ("async", "async_"),
        ("trainer.async_save", "trainer.async_save"),
        ("a_.b", "a_.b"),
    ],
)
def test_a_field_has_the_name_of_its_key_but_where_python_reserves_it(key: str, fields: str) -> None:
    assert (field_of(key), key_of(fields)) == (fields, key)


def test_every_reserved_name_is_a_group_of_a_run() -> None:
    assert all(hasattr(RunConfig(), field_of(each)) for each in RESERVED)


def test_a_written_key_arrives_and_is_written_as_it_is_called(tmp_path: Path) -> None:
    asked = [f"{KEY}=3", "async.overdue=redraw", "trainer.mode=async", "trainer.placement=separate"]
    run = compose(RunConfig, "train", asked)
    assert value_at(run, KEY) == run.async_.max_staleness == 3
    assert run.written >= {KEY, "async.overdue"}
    assert as_dict(run)["async"] == {"max_staleness": 3, "overdue": "redraw", "partial_rollout": True}
    assert as_dict(run)["trainer"]["mode"] == "async"
    text = as_yaml(run)
    assert yaml.safe_load(text)["async"]["max_staleness"] == 3 and "async_:" not in text
    (tmp_path / "again.yaml").write_text(f"defaults: [train_schema, _self_]\n{text}")
    assert compose(RunConfig, "train", [], tmp_path, "again") == run
    (tmp_path / "own.yaml").write_text("defaults: [train, _self_]\nasync: {max_staleness: 5}\n")
    assert compose(RunConfig, "train", [], tmp_path, "own").async_.max_staleness == 5


@pytest.mark.parametrize("wrong", ["async_.max_staleness=1", "+async_.max_staleness=1", "async.max_stale=1"])
def test_what_is_nearly_the_key_is_refused_with_the_key(wrong: str) -> None:
    with pytest.raises(ConfigError, match=rf"Did you mean {KEY}") as refused:
        compose(RunConfig, "train", [wrong])
    assert "async_" not in str(refused.value).partition(": ")[2]
