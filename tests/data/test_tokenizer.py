"""What a tokenizer lacks is named with its file and its remedy, all at once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from mcore_rl.data.tokenizer import end_tokens, load_tokenizer, vocabulary_difference
from mcore_rl.families.registry import FAMILIES
from mcore_rl.ground.errors import DataError
from tests.support import prompt_files


def directory_without(path: Path, *keys: str, template: bool = True) -> Path:
    made = prompt_files.tokenizer()
    made.save_pretrained(path)
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in config.items() if k not in keys}))
    if not template:
        (path / "chat_template.jinja").unlink()
    return path


def refusal(path: Path) -> str:
    with pytest.raises(DataError) as caught:
        load_tokenizer(path)
    return str(caught.value)


def test_a_whole_one_loads(tmp_path: Path) -> None:
    loaded = load_tokenizer(str(directory_without(tmp_path)))
    assert loaded.decode(loaded.encode("Tom has 3")) == "Tom has 3"


@pytest.mark.parametrize("model_type", [None, *FAMILIES])
@pytest.mark.parametrize("named", ["TokenizersBackend", "PreTrainedTokenizerFast", "Qwen2Tokenizer"])
def test_it_is_what_transformers_takes(tmp_path: Path, model_type: str | None, named: str) -> None:
    directory_without(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": named}))
    if model_type:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    ours, theirs = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    text = "Tom has 13 apples, 4  more\n<|end|>"
    assert type(ours) is type(theirs) and ours.encode(text) == theirs.encode(text)
    assert ours.special_tokens_map == theirs.special_tokens_map and ours.chat_template == theirs.chat_template


def test_a_template_that_writes_no_message_is_refused(tmp_path: Path) -> None:
    directory_without(tmp_path)
    template = tmp_path / "chat_template.jinja"
    template.write_text("{% for message in messages %}{{ message.role }}: <|end|>{% endfor %}")
    assert "chat_template.jinja: writes the same text whatever a user's message says" in refusal(tmp_path)
    template.write_text("{{ raise_exception('needs a system message') }}")
    load_tokenizer(tmp_path)


def test_the_tokenizer_of_a_tiny_model_takes_no_seconds_of_imports(tmp_path: Path) -> None:
    directory_without(tmp_path)
    loads = "import sys; from mcore_rl.data.tokenizer import load_tokenizer; load_tokenizer(sys.argv[1])"
    told = "; print(*sorted({'torch._dynamo', 'transformers.models.auto.modeling_auto'} & {*sys.modules}))"
    done = subprocess.run(
        [sys.executable, "-c", loads + told, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout == "\n"


def test_everything_that_is_missing_is_said_at_once(tmp_path: Path) -> None:
    said = refusal(directory_without(tmp_path, "eos_token", template=False))
    assert said.startswith(f"tokenizer {tmp_path}: 2 problems:")
    assert "chat_template.jinja: there is none" in said and "Put the chat template" in said
    assert "tokenizer_config.json: no eos_token. Write" in said


def test_a_tokenizer_as_llama_3_has_it_needs_no_pad_token(tmp_path: Path) -> None:
    assert load_tokenizer(directory_without(tmp_path, "pad_token")).pad_token is None


@pytest.mark.parametrize(
    ("files", "ends"),
    [
        ({"generation_config.json": {"eos_token_id": [3, 5]}, "config.json": {"eos_token_id": 7}}, {3, 5}),
        ({"generation_config.json": {}, "config.json": {"eos_token_id": 7}}, set()),
        ({"config.json": {"eos_token_id": 7}}, {7}),
        ({"config.json": {"eos_token_id": None}}, set()),
        ({}, set()),
    ],
)
def test_tokens_at_which_an_engine_stops(tmp_path: Path, files: dict[str, Any], ends: set[int]) -> None:
    for name, values in files.items():
        (tmp_path / name).write_text(json.dumps(values))
    assert end_tokens(tmp_path) == ends


@pytest.mark.parametrize(("key", "template"), [("eos_token", True), ("", False)])
def test_each_is_missed_by_itself(tmp_path: Path, key: str, template: bool) -> None:
    said = refusal(directory_without(tmp_path, key, template=template))
    assert "1 problem:" in said and (f"no {key}" if key else "chat_template.jinja") in said


def test_no_directory_no_tokenizer_and_broken_files(tmp_path: Path) -> None:
    assert "is no directory" in refusal(tmp_path / "nowhere")
    assert "has no tokenizer: none of tokenizer.json" in refusal(tmp_path)
    directory_without(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    assert "the files cannot be read" in refusal(tmp_path)


def test_a_vocabulary_is_compared_by_its_numbers_alone(tmp_path: Path) -> None:
    whole, plain = directory_without(tmp_path / "whole"), directory_without(tmp_path / "plain", template=False)
    ours = load_tokenizer(whole)
    assert vocabulary_difference(ours, whole) is None and vocabulary_difference(ours, plain) is None
    other = directory_without(tmp_path / "other")
    written = json.loads((other / "tokenizer.json").read_text())
    vocabulary: dict[str, int] = written["model"]["vocab"]
    (first, low), (second, high) = sorted(vocabulary.items(), key=lambda each: each[1])[20:22]
    vocabulary |= {first: high, second: low}
    (other / "tokenizer.json").write_text(json.dumps(written))
    difference = f"the numbers of 2 tokens differ, first of {first!r}: {high} there, and {low} here"
    assert vocabulary_difference(ours, other) == difference
    made = prompt_files.tokenizer()
    made.add_tokens(["<think>"])
    made.save_pretrained(tmp_path / "more")
    assert vocabulary_difference(ours, tmp_path / "more") is None, "a token that nobody draws"
    told = vocabulary_difference(load_tokenizer(tmp_path / "more"), whole)
    assert told == f"the numbers of 1 tokens differ, first of '<think>': none there, and {len(ours)} here"


def test_a_directory_without_a_tokenizer_cannot_be_compared(tmp_path: Path) -> None:
    ours = load_tokenizer(directory_without(tmp_path / "whole"))
    with pytest.raises(DataError, match="has no tokenizer"):
        vocabulary_difference(ours, tmp_path)
