"""Prompts as the field writes them, through a tokenizer of a few words."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mcore_rl.ground.errors import ConfigError
from mcore_rl.reports.prompts import load_tokenizer, read_prompts

WORDS = {word: number for number, word in enumerate(("?", "user", "assistant", "two", "and", "three", "five"))}
TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}{% if add_generation_prompt %}assistant{% endif %}"
)
QUESTION = [{"role": "user", "content": "two and three"}]


def write(path: Path, **columns: list[object]) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


def save_tokenizer(directory: Path, template: str | None) -> Path:
    words = Tokenizer(models.WordLevel(WORDS, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)
    return directory


def test_messages_go_through_the_chat_template(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save_tokenizer(tmp_path / "model", TEMPLATE))
    data = write(tmp_path / "x.parquet", prompt=[QUESTION, [*QUESTION, {"role": "assistant", "content": "five"}]])
    first, second = read_prompts(data, tokenizer, 10)
    assert first.tokens == (1, 3, 4, 5, 2), "user two and three assistant"
    assert second.tokens == (1, 3, 4, 5, 2, 6, 2)
    assert (first.id, second.id) == ("0", "1")
    assert read_prompts(data, tokenizer, 1) == [first]


def test_fields_that_other_rows_have_are_absent(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ 'five' if 'name' in m else 'three' }} {{ m.content }} {% endfor %}"
    tokenizer = load_tokenizer(save_tokenizer(tmp_path / "model", template))
    named = [{"role": "user", "content": "two", "name": "and"}]
    data = write(tmp_path / "x.parquet", prompt=[QUESTION, named])
    drawn = [tokenizer.decode(prompt.tokens).split() for prompt in read_prompts(data, tokenizer, 10)]
    assert drawn == [["three", "two", "and", "three"], ["five", "two"]]


def test_without_a_template_messages_are_lines(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save_tokenizer(tmp_path / "model", None))
    (prompt,) = read_prompts(write(tmp_path / "x.parquet", prompt=[QUESTION]), tokenizer, 10)
    assert prompt.tokens == (3, 4, 5)


def test_text_and_tokens(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save_tokenizer(tmp_path / "model", TEMPLATE))
    (prompt,) = read_prompts(write(tmp_path / "x.parquet", prompt=["two three"]), tokenizer, 10)
    assert prompt.tokens == (3, 5), "a string is encoded as it is"
    tokens = write(tmp_path / "y.parquet", prompt=["two three"], prompt_token_ids=[[5, 5]])
    assert read_prompts(tokens, None, 10)[0].tokens == (5, 5)


def test_a_directory_without_tokenizer(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="the tokenizer cannot be read"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"question": ["two"]}, "has the columns question and none of prompts"),
        ({"prompt": ["two"]}, "has no tokenizer.* or write a column prompt_token_ids"),
        ({"prompt_token_ids": pa.array([], pa.list_(pa.int64()))}, "has no rows"),
        ({"prompt_token_ids": [[1], []]}, "row 1 is neither"),
        ({"prompt_token_ids": [1.5]}, "row 0 is neither"),
    ],
)
def test_mistakes(tmp_path: Path, columns: dict[str, list[object]], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_prompts(write(tmp_path / "x.parquet", **columns), None, 10)


def test_what_is_no_parquet(tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_text("prompt\ntwo\n")
    for name in ("x.parquet", "nowhere.parquet"):
        with pytest.raises(ConfigError, match="cannot be read"):
            read_prompts(tmp_path / name, None, 10)
