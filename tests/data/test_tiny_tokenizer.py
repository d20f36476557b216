"""The tiny tokenizer: exact round trips, one token a digit, short prompts, and loads as any other."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from mcore_rl.data.arithmetic import Split, generate
from mcore_rl.data.tiny_tokenizer import build_tokenizer
from mcore_rl.data.tokenizer import load_tokenizer


def texts(difficulty: int, split: Split = Split.train, count: int = 1_000) -> list[str]:
    return [text for each in generate(difficulty, count, 0, split) for text in (each.question, each.solution)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    directory = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer([*texts(1), *texts(2)], directory)
    return AutoTokenizer.from_pretrained(directory)


def test_every_text_comes_back_exactly(tokenizer: PreTrainedTokenizerBase) -> None:
    odd = ["", " ", "\n\n  a\t", "don't", "1 , 2 .", "naïve 日本語 🙂", "\u200bx\r\n", " lead", "####7"]
    for text in [*texts(1), *texts(2), *texts(4, Split.validation, 200), *odd]:
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_digits_are_tokens_and_words_of_the_corpus_too(tokenizer: PreTrainedTokenizerBase) -> None:
    assert tokenizer.tokenize("Tom has 12 apples") == ["Tom", "Ġhas", "Ġ", "1", "2", "Ġapples"]
    assert " ".join(tokenizer.tokenize("3 + 14 = 17\n#### 17")) == "3 Ġ+ Ġ 1 4 Ġ= Ġ 1 7 Ċ #### Ġ 1 7"
    assert len(tokenizer) < 512


def test_prompts_and_responses_are_short(tokenizer: PreTrainedTokenizerBase) -> None:
    for difficulty in (1, 2):
        for each in generate(difficulty, 1_000, 1, Split.validation):
            prompt = tokenizer.apply_chat_template(
                [{"role": "user", "content": each.question}], add_generation_prompt=True, return_dict=False
            )
            assert len(prompt) <= 48
            assert len(tokenizer.encode(each.solution, add_special_tokens=False)) + 1 <= 32


def test_the_chat_template_and_the_special_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "5"}]
    text = "<|begin|><|user|>2 + 3?<|end|><|assistant|>5<|end|>"
    tokens = tokenizer.apply_chat_template(messages, return_dict=False)
    assert tokenizer.decode(tokens) == text
    assert (tokens[0], tokens[1], tokens[-1]) == (1, 4, 2)
    assert [tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id] == [0, 1, 2]
    asked = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, return_dict=False)
    assert tokens[: len(asked)] == asked
    assert tokenizer.decode(tokens, skip_special_tokens=True) == "2 + 3?5"


def test_equal_texts_give_equal_files_and_it_is_fit_for_training(tmp_path: Path) -> None:
    for name in ("one", "two"):
        build_tokenizer(iter(texts(1)), tmp_path / name, 300)
    assert (tmp_path / "one/tokenizer.json").read_bytes() == (tmp_path / "two/tokenizer.json").read_bytes()
    assert len(load_tokenizer(tmp_path / "one")) == 300


def test_a_vocabulary_without_every_byte_is_a_mistake_of_ours(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="vocab_size=200"):
        build_tokenizer(["x"], tmp_path, 200)
