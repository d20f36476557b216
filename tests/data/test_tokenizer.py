"""What a tokenizer lacks is named with its file and its remedy, all at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mcore_rl.data.tokenizer import load_tokenizer
from mcore_rl.errors import DataError
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


def test_everything_that_is_missing_is_said_at_once(tmp_path: Path) -> None:
    said = refusal(directory_without(tmp_path, "pad_token", "eos_token", template=False))
    assert said.startswith(f"tokenizer {tmp_path}: 3 problems:")
    assert "chat_template.jinja: there is none" in said and "Put the chat template" in said
    assert "tokenizer_config.json: no eos_token. Write" in said
    assert "tokenizer_config.json: no pad_token. Write" in said


@pytest.mark.parametrize(("key", "template"), [("pad_token", True), ("eos_token", True), ("", False)])
def test_each_is_missed_by_itself(tmp_path: Path, key: str, template: bool) -> None:
    said = refusal(directory_without(tmp_path, key, template=template))
    assert "1 problem:" in said and (f"no {key}" if key else "chat_template.jinja") in said


def test_no_directory_no_tokenizer_and_broken_files(tmp_path: Path) -> None:
    assert "is no directory" in refusal(tmp_path / "nowhere")
    assert "has no tokenizer: none of tokenizer.json" in refusal(tmp_path)
    directory_without(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    assert "the files cannot be read" in refusal(tmp_path)
