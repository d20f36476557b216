"""The checkpoint is read with what the run changes of it, and what nobody reads is said once."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from mcore_rl.config.compose import compose
from mcore_rl.config.engine import Device
from mcore_rl.config.run import RunConfig
from mcore_rl.config.trainer import PolicyModelConfig
from mcore_rl.controller.lifecycle import model_checks
from mcore_rl.controller.lifecycle.preparation import complete, prepare
from mcore_rl.families.config_json import read_config
from mcore_rl.ground.errors import ConfigError
from mcore_rl.parallel.device import detect
from mcore_rl.planning.recipes import run_model
from tests.support import text_parts
from tests.support.run_task import overrides, write_task

CPU = detect(Device.cpu)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A task whose model was saved by a tool with switches of its own, and says fewer positions than it has."""
    directory = write_task(tmp_path_factory.mktemp("task"))
    config = read_config(directory / "model") | {"unsloth_fixed": True, "index_topk": 4}
    (directory / "model" / "config.json").write_text(json.dumps(config))
    return directory


def config(task: Path, run_dir: Path, *more: str) -> RunConfig:
    return complete(compose(RunConfig, "train", overrides(task, run_dir, *more)), CPU)


def test_a_run_reads_what_it_changes_and_says_it_once(
    task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model_checks._say.cache_clear()
    changes = ["model.config_overrides={max_position_embeddings: 999}", "model.ignore_fields=[index_topk]"]
    run = config(task, tmp_path / "run", *changes)
    prepared = [prepare(run, CPU) for _ in range(2)]
    view = tmp_path / "run" / "model"
    assert run.model_directory == str(view)
    assert all(run.weights_of(role) == str(view) for role in run.role_rows if role.weights in (None, "model.path"))
    assert prepared[0].models["actor"].max_position_embeddings == 999 == run_model(run).max_position_embeddings
    identity = prepared[0].identity.model
    assert identity["max_position_embeddings"] == 999 and "index_topk" not in identity
    said = capsys.readouterr().err
    assert said.count("config.json is read with changes: max_position_embeddings") == 1
    assert said.count("and they change nothing: unsloth_fixed") == 1


def test_without_changes_the_checkpoint_itself_is_read(task: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"index_topk=4: .*model\.ignore_fields=\[index_topk\]"):
        prepare(config(task, tmp_path / "run"), CPU)
    plain = shutil.copytree(task, tmp_path / "plain")
    kept = {name: value for name, value in read_config(plain / "model").items() if name != "index_topk"}
    (plain / "model" / "config.json").write_text(json.dumps(kept))
    run = config(plain, tmp_path / "run")
    prepare(run, CPU)
    assert run.model_directory == run.model.path and not (tmp_path / "run" / "model").exists()


def test_a_change_that_nobody_reads_is_refused_before_anything_starts(task: Path, tmp_path: Path) -> None:
    run = config(task, tmp_path / "run", "model.config_overrides={n_layers: 3}", "model.ignore_fields=[nothing]")
    with pytest.raises(ConfigError, match="2 problems") as raised:
        prepare(run, CPU)
    assert "model.config_overrides.n_layers=3" in str(raised.value)
    assert "model.ignore_fields=nothing: config.json has no such field" in str(raised.value)
    with pytest.raises(ConfigError, match="2 problems"):
        run_model(run)


def test_a_multimodal_checkpoint_is_said_to_be_trained_in_part_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model_checks._say.cache_clear()
    (tmp_path / "model").mkdir()
    described = json.dumps(text_parts.config("Gemma3ForConditionalGeneration"))
    (tmp_path / "model" / "config.json").write_text(described)
    for _ in range(2):
        model_checks.prepare_model(PolicyModelConfig(path=str(tmp_path / "model")), tmp_path / "model")
    said = capsys.readouterr().err
    assert said.count("Gemma3ForConditionalGeneration: the text part, Gemma3ForCausalLM, is trained") == 1
    assert "vision_tower.* and multi_modal_projector.* are left as they are" in said
