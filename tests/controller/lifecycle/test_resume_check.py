"""Whether a checkpoint is of the run that is to go on: what is refused, what is only told."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mcore_rl.controller.lifecycle import resume_check
from mcore_rl.controller.lifecycle.resume_check import MAX_SUMS, RUN, Identity, note_differences, pictures_of
from mcore_rl.data.media.placed import Grid, ImageRef, Placed
from mcore_rl.ground.errors import CheckpointError, ConfigError


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own.py").write_text("def estimate(): ...")
    for name in ("one", "two"):
        (tmp_path / f"{name}.parquet").write_text(name)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "mixtral", "hidden_size": 64}))
    save_file({"norm.weight": torch.arange(8.0)}, tmp_path / "model" / "model.safetensors")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    settings = {"model_max_length": 9, "chat_template": "{{ messages }}", "transformers_version": "5"}
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "reward.py").write_text("def compute_score(*_): return 1.0")
    (tmp_path / "val.parquet").write_text("val")
    return {
        "model": {"path": str(tmp_path / "model")},
        "data": {
            "train_files": [str(tmp_path / "one.parquet"), str(tmp_path / "two.parquet")],
            "val_files": [str(tmp_path / "val.parquet")],
            "seed": 1,
        },
        "custom_reward_function": {"path": str(tmp_path / "reward.py")},
        "rollout": {"agent": agent(tmp_path)},
        "actor": {"optim": {"lr": 1e-6}, "parallel": {"tp": 1}, "loss_mode": "ppo_clip"},
        "algorithm": {"adv_estimator": f"{tmp_path}/own.py:own"},
        "trainer": {"default_local_dir": "runs/a", "resume_mode": "auto", "save_freq": 10},
    }


AGENT_FILES = {
    "tools": "tool.py",
    "loops": "loop.py",
    "tool_parser": "parser.py",
    "program.function": "program.py",
    "program.command": "solve.sh",
    "tool_config_path": "tools.yaml",
    "mcp_config_path": "mcp.yaml",
    "interaction_config_path": "interactions.yaml",
    "search_corpus": "corpus/b.jsonl",
}
# What the yaml files name, by their keys.
NAMED = {
    "tool_config_path": "own_tools.py",
    "mcp_config_path": "server.py",
    "interaction_config_path": "own_user.py",
}


def agent(place: Path) -> dict[str, Any]:
    """``rollout.agent`` with a file of each kind."""
    (place / "corpus").mkdir()
    (place / "corpus" / "a.jsonl").write_text("a")
    for name in (*AGENT_FILES.values(), *NAMED.values()):
        (place / name).write_text("before = 1")
    (place / "tools.yaml").write_text("tools: [{class_name: own_tools.Tool}, {class_name: mcore_rl.agents.tools.T}]")
    (place / "interactions.yaml").write_text("interaction: [{class_name: own_user.User}]")
    servers = "mcpServers: {a: {command: python, args: [server.py, ., 3], cwd: PLACE}, b: {url: 'http://x'}}"
    (place / "mcp.yaml").write_text(servers.replace("PLACE", str(place)))
    return {
        "tools": ["calculator", f"{place}/tool.py:search"],
        "loops": {"own": f"{place}/loop.py:Loop"},
        "tool_parser": f"{place}/parser.py:read",
        "program": {"function": f"{place}/program.py:solve", "command": ["bash", f"{place}/solve.sh"]},
        "search_corpus": f"{place}/corpus",
        **{key: f"{place}/{AGENT_FILES[key]}" for key in AGENT_FILES if key.endswith("config_path")},
    }


@pytest.fixture
def checkpoint(config: dict[str, Any], tmp_path: Path) -> Path:
    (tmp_path / "step_1").mkdir()
    identity_of(config).keep(tmp_path / "step_1")
    return tmp_path / "step_1"


def identity_of(config: dict[str, Any], roles: Sequence[str] = ("actor",)) -> Identity:
    return Identity.of(config, roles, {"model.path": Path(config["model"]["path"])})


def test_the_same_run_has_nothing_to_tell(config: dict[str, Any], checkpoint: Path) -> None:
    assert identity_of(config).check(checkpoint) == []
    assert Identity.read(checkpoint).config == config


def test_other_settings_are_told(config: dict[str, Any], checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config["actor"]["optim"]["lr"] = 2e-6
    config["actor"]["parallel"] = {"tp": 2, "pp": 2}
    config["trainer"] |= {"default_local_dir": "runs/b", "resume_mode": "path", "save_freq": 5}
    identity = identity_of(config)
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
    shutil.copytree(tmp_path / "model", tmp_path / "elsewhere")  # written now: times do not count
    for name in ("reward.py", "val.parquet"):
        shutil.copy(tmp_path / name, tmp_path / "elsewhere")
    config["custom_reward_function"]["path"] = str(tmp_path / "elsewhere" / "reward.py")
    config["data"]["val_files"] = [str(tmp_path / "elsewhere" / "val.parquet")]
    values = {"model_type": "mixtral", "hidden_size": 64, "transformers_version": "9", "use_cache": False}
    (tmp_path / "elsewhere" / "config.json").write_text(json.dumps(values))
    (tmp_path / "elsewhere" / "other.parquet").write_text("two")
    config["model"]["path"] = str(tmp_path / "elsewhere")
    config["data"]["train_files"][1] = str(tmp_path / "elsewhere" / "other.parquet")
    differences = identity_of(config).check(checkpoint)
    assert [line.partition(":")[0] for line in differences] == [
        "custom_reward_function.path", "data.train_files", "data.val_files", "model.path",
    ]  # fmt: skip


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
        identity_of(changed).check(checkpoint)


def test_everything_is_refused_at_once(config: dict[str, Any], checkpoint: Path, tmp_path: Path) -> None:
    _other_model(config, tmp_path)
    _fewer(config, tmp_path)
    with pytest.raises(ConfigError) as refused:
        identity_of(config, ["actor", "critic"]).check(checkpoint)
    keys = [violation.key for violation in refused.value.violations]
    assert keys == ["model.path", "data.train_files", "algorithm.adv_estimator"]
    assert "trains actor and critic; the checkpoint has actor. Write what" in str(refused.value)


def test_validation_alone_needs_no_training_data(config: dict[str, Any], checkpoint: Path) -> None:
    config["data"]["train_files"] = []
    assert len(identity_of(config).check(checkpoint)) == 1


@pytest.mark.parametrize("text", ["", "[]", "{}"])
def test_what_cannot_be_read_is_named(config: dict[str, Any], checkpoint: Path, text: str) -> None:
    (checkpoint / RUN).write_text(text)
    with pytest.raises(CheckpointError, match=r"run.json cannot be read: .*Resume from another step"):
        identity_of(config).check(checkpoint)


def _settings(place: Path, **changes: str) -> None:
    path = place / "model" / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


CONTENTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "weights": (
        lambda place: save_file({"norm.weight": torch.arange(8.0) + 1}, place / "model" / "model.safetensors"),
        r"model\.path=.*: model.safetensors differs from .*; the KL reference would be another one\. Write what",
    ),
    "a weight's file": (
        lambda place: shutil.copy(place / "model" / "model.safetensors", place / "model" / "more.safetensors"),
        r"model\.path=.*: more.safetensors differs",
    ),
    "tokenizer": (
        lambda place: (place / "model" / "tokenizer.json").write_text("[]"),
        r"model\.tokenizer_path=.*: its tokenizer: tokenizer.json differs",
    ),
    "its settings": (
        lambda place: _settings(place, unk_token="?"),
        r"model\.tokenizer_path=.*: its tokenizer: tokenizer_config.json differs",
    ),
    "chat template": (
        lambda place: _settings(place, chat_template="{{ m }}"),
        r"model\.tokenizer_path=.*: its chat template: tokenizer_config.json differs",
    ),
    "a template's file": (
        lambda place: (place / "model" / "chat_template.jinja").write_text("{{ m }}"),
        r"model\.tokenizer_path=.*: its chat template: chat_template.jinja differs",
    ),
    "rewards": (
        lambda place: (place / "reward.py").write_text("def compute_score(*_): return 0.0"),
        r"custom_reward_function\.path=.*: reward.py differs .*If the change is meant, name the checkpoint: trainer",
    ),
    "algorithm": (
        lambda place: (place / "own.py").write_text("def estimate(): return 1"),
        r"algorithm\.adv_estimator=.*own.py:own: own.py \(1\) differs .*If the change is meant, name the checkpoint",
    ),
    "validation data": (
        lambda place: (place / "val.parquet").write_text("lav"),
        r"data\.val_files=.*: file 1 differs from .*trainer\.resume_mode=path trainer\.resume_from_path=.*step_1",
    ),
}


@pytest.mark.parametrize("changed", CONTENTS)
def test_other_content_at_the_same_place_is_refused(
    changed: str, config: dict[str, Any], checkpoint: Path, tmp_path: Path
) -> None:
    change, said = CONTENTS[changed]
    change(tmp_path)
    with pytest.raises(ConfigError, match=said) as refused:
        identity_of(config).check(checkpoint)
    assert len(refused.value.violations) == 1
    config["trainer"]["resume_mode"] = "path"
    if changed in ("rewards", "algorithm", "validation data"):
        (told,) = identity_of(config).check(checkpoint)
        assert "differs from what the checkpoint was made with" in told
    else:
        with pytest.raises(ConfigError, match="differs"):
            identity_of(config).check(checkpoint)


def pictures(folder: str, shas: Sequence[str]) -> list[list[Placed]]:
    """Rows of a picture in a file each, and one whose row holds it."""
    files = [ImageRef(sha, f"{folder}/{number}.png") for number, sha in enumerate(shas)]
    return [[Placed(image, 1, Grid(1, 2, 2))] for image in (*files, ImageRef("held", "t.parquet:0 images[0]"))]


def test_another_picture_is_refused_by_the_name_of_its_file(config: dict[str, Any], tmp_path: Path) -> None:
    weights = {"model.path": Path(config["model"]["path"])}
    (tmp_path / "step_1").mkdir()
    Identity.of(config, ("actor",), weights, pictures("/a", "abc")).keep(tmp_path / "step_1")
    moved = Identity.of(config, ("actor",), weights, pictures("/b", "abc"))
    assert moved.check(tmp_path / "step_1") == []
    other = Identity.of(config, ("actor",), weights, pictures("/a", "abd"))
    with pytest.raises(
        ConfigError, match=r"data\.image_key=.*: 2\.png \(3\) differs from .*resume_mode=off"
    ) as refused:
        other.check(tmp_path / "step_1")
    assert len(refused.value.violations) == 1
    fewer = Identity.of(config, ("actor",), weights, pictures("/a", "ab"))
    assert fewer.check(tmp_path / "step_1") == [], "another number of rows is said by the sampler"


def test_of_many_pictures_several_have_one_sum() -> None:
    shas = [f"{number}" for number in range(2 * MAX_SUMS + 1)]
    sums = pictures_of(pictures("/a", shas))
    assert len(sums) == -(-len(shas) // 3) <= MAX_SUMS and next(iter(sums)) == "0.png (1 to 3)"
    changed = pictures_of(pictures("/a", [*shas[:-1], "other"]))
    assert [name for name in sums if sums[name] != changed[name]] == [list(sums)[-1]]


@pytest.mark.parametrize("key", AGENT_FILES)
def test_files_of_agents_that_changed_are_refused_and_may_be_meant(
    key: str, config: dict[str, Any], checkpoint: Path, tmp_path: Path
) -> None:
    file = tmp_path / AGENT_FILES[key]
    file.write_text(f"{file.read_text()}\n# after")
    with pytest.raises(ConfigError, match=r"differs from .*If the change is meant, name the checkpoint") as refused:
        identity_of(config).check(checkpoint)
    (violation,) = refused.value.violations
    assert violation.key == f"rollout.agent.{key}" and Path(AGENT_FILES[key]).name in violation.problem
    config["trainer"]["resume_mode"] = "path"
    (told,) = identity_of(config).check(checkpoint)
    assert told.startswith(f"rollout.agent.{key}: ")


@pytest.mark.parametrize("key", NAMED)
def test_what_yaml_files_name_is_looked_at_too(
    key: str, config: dict[str, Any], checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / NAMED[key]).write_text("after = 1")
    with pytest.raises(ConfigError, match=r"differs from .*If the change is meant, name the checkpoint") as refused:
        identity_of(config).check(checkpoint)
    (violation,) = refused.value.violations
    assert violation.key == f"rollout.agent.{key}" and NAMED[key] in violation.problem
    config["trainer"]["resume_mode"] = "path"
    (told,) = identity_of(config).check(checkpoint)
    assert told.startswith(f"rollout.agent.{key}: ")


@pytest.mark.parametrize(
    "text",
    [
        "tools: 5",
        "interaction: [5]",
        "mcpServers: [a]",
        "mcpServers: {a: {args: 5, cwd: [1]}}",
        "[",
        "- 1",
        "tools: [{class_name: broken.part.Tool}, {class_name: Tool}, {class_name: ..}]",
    ],
)
def test_a_yaml_file_of_another_form_is_a_file(text: str, config: dict[str, Any], tmp_path: Path) -> None:
    """Whoever reads it says what is wrong, of a package that cannot be imported too."""
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "__init__.py").write_text("raise KeyError")
    (tmp_path / "tools.yaml").write_text(text)
    assert list(identity_of(config).contents["rollout.agent.tool_config_path"]) == ["tools.yaml (1)"]


def test_a_folder_that_a_command_names_is_not_read(config: dict[str, Any], checkpoint: Path, tmp_path: Path) -> None:
    """It may hold the run itself, or a whole disk."""
    config["rollout"]["agent"]["program"]["command"] += [str(tmp_path), "/"]
    (told,) = identity_of(config).check(checkpoint)
    assert told.startswith("rollout.agent.program.command: ['bash', ")


def test_files_of_agents_that_moved_are_the_same(config: dict[str, Any], checkpoint: Path, tmp_path: Path) -> None:
    for name in AGENT_FILES.values():
        if "corpus" not in name:
            (tmp_path / name).rename(tmp_path / f"moved_{name}")
    moved = json.loads(re.sub(r"/([a-z]+\.(?:py|sh|yaml))", r"/moved_\1", json.dumps(config["rollout"])))
    config["rollout"] = moved
    assert all(each.startswith("rollout.agent.") and " now " in each for each in identity_of(config).check(checkpoint))


def test_all_contents_are_told_at_once(config: dict[str, Any], checkpoint: Path, tmp_path: Path) -> None:
    for change, _ in CONTENTS.values():
        change(tmp_path)
    with pytest.raises(ConfigError) as refused:
        identity_of(config).check(checkpoint)
    keys = [violation.key for violation in refused.value.violations]
    assert keys == [
        "model.path", "model.tokenizer_path", "model.tokenizer_path", "custom_reward_function.path", "data.val_files",
        "algorithm.adv_estimator",
    ]  # fmt: skip


def test_what_makes_no_difference_is_none(config: dict[str, Any], checkpoint: Path, tmp_path: Path) -> None:
    _settings(tmp_path, transformers_version="9", name_or_path="elsewhere")
    for path in tmp_path.rglob("*"):
        os.utime(path, (1, 1))
    grader = (tmp_path / "reward.py").rename(tmp_path / "grader.py")
    config["custom_reward_function"]["path"] = str(grader)
    (told,) = identity_of(config).check(checkpoint)
    assert told.startswith("custom_reward_function.path: ") and "grader.py" in told, "the key, and not its content"


ADAPTERS = {"rank": 8, "alpha": 16.0, "use_rslora": False, "path": None}


@pytest.mark.parametrize(
    ("before", "now", "keys"),
    [
        ({}, {}, []),
        ({}, {"alpha": 32.0}, ["actor.lora.alpha"]),
        ({}, {"use_rslora": True, "rank": 4}, ["actor.lora.rank"]),
        ({}, {"rank": 0, "alpha": 32.0}, ["actor.lora.rank"]),
        ({"rank": 0}, {"rank": 0, "alpha": 32.0}, []),
        ({}, {"path": "first"}, ["actor.lora.path"]),
        ({"path": "first"}, {}, ["actor.lora.path"]),
        ({"path": "first"}, {"path": "second"}, ["actor.lora.path"]),
        ({"path": "first"}, {"path": "copy"}, []),
    ],
)
def test_other_adapters_are_refused(
    config: dict[str, Any], tmp_path: Path, before: dict[str, Any], now: dict[str, Any], keys: list[str]
) -> None:
    for number, name in enumerate(("first", "second", "copy")):
        (tmp_path / name).mkdir()
        save_file({"a": torch.full((2,), float(number % 2))}, tmp_path / name / "adapter_model.safetensors")

    def identity(changes: dict[str, Any]) -> Identity:
        lora = ADAPTERS | changes
        config["actor"]["lora"] = lora | {"path": lora["path"] and str(tmp_path / lora["path"])}
        return identity_of(config)

    identity(before).keep(tmp_path)
    resumed = identity(now)
    if not keys:
        resumed.check(tmp_path)
        return
    with pytest.raises(ConfigError) as caught:
        resumed.check(tmp_path)
    assert [each.key for each in caught.value.violations] == keys


def test_a_checkpoint_of_an_older_version_is_taken(config: dict[str, Any], checkpoint: Path, tmp_path: Path) -> None:
    values = json.loads((checkpoint / RUN).read_text())
    del values["contents"]
    (checkpoint / RUN).write_text(json.dumps(values))
    CONTENTS["weights"][0](tmp_path)
    assert identity_of(config).check(checkpoint) == []


def test_no_length_of_a_schedule_is_none_as_0_of_an_older_version_was(config: dict[str, Any], tmp_path: Path) -> None:
    told = {}
    for before in (0, 7):
        config["actor"]["optim"]["total_steps"] = before
        identity_of(config).keep(tmp_path)
        config["actor"]["optim"]["total_steps"] = None
        told[before] = identity_of(config).check(tmp_path)
    assert told == {0: [], 7: ["actor.optim.total_steps: 7 when the checkpoint was made, now None"]}


def test_of_large_weights_pieces_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, limit in (("WHOLE_BYTES", 1000), ("HEADER_BYTES", 100), ("PIECES", 5), ("PIECE_BYTES", 10)):
        monkeypatch.setattr(resume_check, name, limit)
    path, data = tmp_path / "model.safetensors", bytearray(2000)
    path.write_bytes(data)
    before = resume_check.weights_of(tmp_path)
    assert before["model.safetensors"].startswith("2000 bytes, sampled xxh3:")
    seen = 0
    for place in range(0, 2000, 5):
        path.write_bytes(data[:place] + b"x" + data[place + 1 :])
        seen += resume_check.weights_of(tmp_path) != before
    assert seen == (100 + 5 * 10) / 5, "the header and five pieces"
    path.write_bytes(data[:-10] + b"x" * 10)
    assert resume_check.weights_of(tmp_path) != before, "the last bytes too"
    path.write_bytes(data[:-1])
    assert resume_check.weights_of(tmp_path) != before
