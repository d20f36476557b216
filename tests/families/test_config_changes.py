"""What a user changes of config.json: every reader reads it, and what nobody would read is refused."""

from __future__ import annotations

import argparse
import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from mcore_rl.config.model import RopeType
from mcore_rl.data.tiny_tokenizer import build_tokenizer
from mcore_rl.families.config_changes import (
    ConfigChanges,
    add_change_options,
    changed_directory,
    changes_asked,
    merged,
)
from mcore_rl.families.config_json import read_config
from mcore_rl.families.registry import model_of
from mcore_rl.ground.errors import CheckpointError, ConfigError
from tests.support.published import TINY, class_config

LLAMA = {**TINY["llama"], "index_topk": 4, "rope_interleaved": False}


def changes(ignored: tuple[str, ...] = (), **overrides: Any) -> ConfigChanges:
    return ConfigChanges(overrides=overrides, ignored=ignored)


def refusal(made: ConfigChanges, config: dict[str, Any] = LLAMA) -> str:
    with pytest.raises(ConfigError) as raised:
        made.apply(config)
    return str(raised.value)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "llama"
    AutoModelForCausalLM.from_config(class_config(TINY["llama"])).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(LLAMA))
    build_tokenizer(["one text", "and another"], folder)
    (folder / "additional_chat_templates").mkdir()
    return folder


def test_a_field_has_another_value_and_another_is_not_there() -> None:
    made = changes(("index_topk",), max_position_embeddings=777, rope_scaling={"type": "linear", "factor": 2.0})
    before = json.dumps(LLAMA["rope_scaling"])
    changed = made.apply(LLAMA)
    assert "index_topk" not in changed and LLAMA["index_topk"] == 4
    _, model = model_of(changed)
    assert model.max_position_embeddings == 777 and model.rope.type is RopeType.linear
    assert made.describe(LLAMA) == (
        f"max_position_embeddings {LLAMA['max_position_embeddings']} -> 777, "
        f'rope_scaling {before} -> {{"type": "linear", "factor": 2.0}}, index_topk 4 is left out'
    )
    assert not ConfigChanges() and ConfigChanges().apply(LLAMA) == LLAMA


def test_what_nobody_would_read_is_refused_all_at_once() -> None:
    said = refusal(changes(("missing_field",), max_position_embedings=9, rope_interleaved=True))
    assert "3 problems" in said
    assert "model.ignore_fields=missing_field: config.json has no such field" in said
    assert "model.config_overrides.max_position_embedings=9: neither" in said
    assert "or write max_position_embeddings" in said
    assert "model.config_overrides.rope_interleaved=true: neither" in said


def test_what_makes_another_model_is_refused() -> None:
    assert "write its default" not in refusal(changes(("hidden_size",)))
    assert "model.config_overrides.hidden_size=VALUE" in refusal(changes(("hidden_size",)))
    assert "which weights these are" in refusal(changes(model_type="mistral"))
    assert "Write one of the two" in refusal(changes(("index_topk",), index_topk=8))
    with pytest.raises(ConfigError, match="attention_bias=true: adds biases"):
        model_of(changes(attention_bias=True).apply(LLAMA))  # an override is read like the file's own


def test_a_view_is_the_checkpoint_with_the_changed_file(checkpoint: Path, tmp_path: Path) -> None:
    before = (checkpoint / "config.json").read_bytes()
    view = tmp_path / "run" / "model"
    for longest in (512, 1024):  # a second start writes it anew
        changes(("index_topk",), max_position_embeddings=longest).view(checkpoint, view)
        assert read_config(view)["max_position_embeddings"] == longest
    assert (checkpoint / "config.json").read_bytes() == before
    assert {path.name for path in view.iterdir()} == {path.name for path in checkpoint.iterdir()}
    reference = AutoConfig.from_pretrained(view)
    assert reference.max_position_embeddings == 1024 and not hasattr(reference, "index_topk")
    assert AutoTokenizer.from_pretrained(view).vocab_size == AutoTokenizer.from_pretrained(checkpoint).vocab_size
    loaded, plain = (AutoModelForCausalLM.from_pretrained(each).state_dict() for each in (view, checkpoint))
    assert all((loaded[name] == plain[name]).all() for name in plain)
    (checkpoint / "late.json").touch()
    changes(max_position_embeddings=9).view(checkpoint, view)
    (checkpoint / "late.json").unlink()
    changes(max_position_embeddings=9).view(checkpoint, view)
    assert not (view / "late.json").is_symlink(), "links of an earlier view are removed"


def test_a_view_that_cannot_be_written_is_an_error_with_its_place(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"changed config\.json cannot be written"):
        changes(max_position_embeddings=9).view(checkpoint, tmp_path / "file" / "model")


def test_options_of_a_tool(checkpoint: Path) -> None:
    parser = argparse.ArgumentParser()
    add_change_options(parser)

    def asked(*words: str) -> ConfigChanges:
        return changes_asked(parser.parse_args(words))

    words = "--config-override rope_theta=1e6 --config-override hidden_act=silu --ignore-field index_topk"
    made = asked(*words.split())
    assert made.overrides == {"rope_theta": 1e6, "hidden_act": "silu"} and made.ignored == ("index_topk",)
    assert "--ignore-field=nothing: config.json has no such field" in refusal(asked("--ignore-field", "nothing"))
    assert "--config-override.zzz=1: neither" in refusal(asked("--config-override", "zzz=1"))
    with pytest.raises(ConfigError, match="is not FIELD=VALUE"):
        asked("--config-override", "rope_theta")
    with ExitStack() as stack:
        assert changed_directory(checkpoint, asked(), stack) == checkpoint
        view = changed_directory(checkpoint, made, stack)
        assert read_config(view)["rope_theta"] == 1e6
    assert not view.exists() and (checkpoint / "config.json").exists()


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("written", "changed", "expected"),
    [
        # transformers 5 has theta among the fields: it stays where it is not named
        ({"rope_type": "default", "rope_theta": 1e6}, YARN, YARN | {"rope_theta": 1e6}),
        ({"rope_type": "default", "rope_theta": 1e6}, YARN | {"rope_theta": 5e5}, YARN | {"rope_theta": 5e5}),
        (YARN | {"rope_theta": 1e6}, {"factor": 8.0}, YARN | {"rope_theta": 1e6, "factor": 8.0}),
        # what is of another type goes
        (YARN | {"rope_theta": 1e6}, {"rope_type": "default"}, {"rope_type": "default", "rope_theta": 1e6}),
    ],
)
def test_fields_of_a_field_that_are_not_named_keep_their_values(
    written: dict[str, Any], changed: dict[str, Any], expected: dict[str, Any]
) -> None:
    config = {name: value for name, value in TINY["llama"].items() if name not in ("rope_theta", "rope_scaling")}
    config["rope_parameters"] = written
    made = changes(rope_parameters=changed)
    assert made.apply(config)["rope_parameters"] == expected
    _, model = model_of(made.apply(config))
    assert model.rotary_base == expected["rope_theta"]
    assert json.dumps(written) in made.describe(config) and str(expected["rope_theta"]) in made.describe(config)


def test_every_kind_of_layer_keeps_its_own_rotation() -> None:
    local, whole = {"rope_type": "default", "rope_theta": 1e4}, {"rope_type": "default", "rope_theta": 1e6}
    config = {"rope_parameters": {"sliding_attention": local, "full_attention": whole}}
    new = {"full_attention": {"rope_type": "linear", "factor": 8.0}}
    assert merged(config["rope_parameters"], new) == {
        "sliding_attention": local,
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    }
