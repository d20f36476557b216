"""Rows' own answers: the tokens that the model would have said, cut at the limit, and every broken row named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mcore_rl.config.data import DataConfig, Truncation
from mcore_rl.data.answers import OwnAnswers
from mcore_rl.data.prompts import PromptSet
from mcore_rl.data.turns import Turns
from mcore_rl.ground.errors import DataError
from tests.support import prompt_files
from tests.support.prompt_files import row, write

PLAIN, CHATML = prompt_files.tokenizer(), prompt_files.tokenizer(prompt_files.CHATML)
ANSWERS = ["4", "Tom has 12 books.\n#### 12", "Tom wins 3 pens."]
KEY = "extra_info.answer"


def rows(*answers: str | None) -> list[dict[str, Any]]:
    made = [row(f"Tom has {n}.", str(n)) for n in range(len(answers))]
    return [each | {"extra_info": {"index": 0, "answer": said}} for each, said in zip(made, answers, strict=True)]


def load(path: Path, tokenizer: Any = PLAIN, key: str = KEY, **options: Any) -> PromptSet:
    config = DataConfig(answer_key=key, **options)
    answers = OwnAnswers(Turns.of(tokenizer, {}), key, config.prompt_key)
    return PromptSet.load([path], config, tokenizer, max_samples=None, title="data.train_files", answers=answers)


def refusal(path: Path, *words: Any, **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        load(path, *words, **options)
    return str(caught.value)


@pytest.mark.parametrize("tokenizer", [PLAIN, CHATML, prompt_files.tokenizer(prompt_files.TAGGED)])
def test_an_answer_is_what_follows_the_prompt_up_to_the_end_of_the_turn(tmp_path: Path, tokenizer: Any) -> None:
    prompts = load(write(tmp_path / "train.parquet", rows(*ANSWERS)), tokenizer)
    assert len(prompts) == len(ANSWERS)
    for number, said in enumerate(ANSWERS):
        each = prompts[number]
        assert each.answer == tuple(tokenizer.encode(f"{said}<|end|>", add_special_tokens=False))
        asked = [{"role": "user", "content": f"Tom has {number}."}, {"role": "assistant", "content": said}]
        whole = tokenizer.apply_chat_template(asked, tokenize=True, return_dict=False)
        assert tuple(whole[: len(each.tokens) + len(each.answer)]) == each.tokens + each.answer
        assert each.extra_info["answer"] == said, "the row is still whole"


def test_a_column_of_its_own_may_have_it_and_without_a_reader_there_is_none(tmp_path: Path) -> None:
    path = write(tmp_path / "train.parquet", [row("Tom has 1.", "1", solution="It is 1.")])
    (end,) = PLAIN.encode("<|end|>", add_special_tokens=False)
    assert load(path, key="solution")[0].answer[-1] == end
    plain = PromptSet.load([path], DataConfig(), PLAIN, max_samples=None, title="data.train_files")
    assert plain[0].answer == ()


def test_broken_answers_are_named_together(tmp_path: Path) -> None:
    path = write(tmp_path / "train.parquet", rows("4", None, ""))
    said = refusal(path)
    assert "train.parquet:1: extra_info.answer is null or empty. Write the answer" in said
    assert "train.parquet:2: extra_info.answer is null or empty" in said and "train.parquet:0" not in said
    assert "no column extra_info.no; it has" in refusal(path, key="extra_info.no")
    assert "extra_info.index is int64, not text" in refusal(path, key="extra_info.index")


def test_long_answers_are_refused_left_out_or_cut(tmp_path: Path) -> None:
    path = write(tmp_path / "train.parquet", rows(*ANSWERS))
    sizes = [len(PLAIN.encode(f"{said}<|end|>", add_special_tokens=False)) for said in ANSWERS]
    longest = max(sizes)
    said = refusal(path, max_response_length=2)
    assert "2 answers have more than data.max_response_length=2 tokens" in said and f"or {longest} tokens" in said
    left = load(path, max_response_length=2, filter_overlong_prompts=True)
    assert len(left) == left.num_rows - left.num_left_out == 1 and left[0].ground_truth == "0"
    assert "2 of 3 left out, longer than 512 tokens, or 2 of the answer" in left.describe()
    cut, whole = load(path, max_response_length=2, truncation=Truncation.right), load(path)
    assert [each.answer for each in map(cut.__getitem__, range(3))] == [
        each.answer[:2] for each in map(whole.__getitem__, range(3))
    ]
    assert cut.num_truncated == 2
    said = refusal(path, max_response_length=1, filter_overlong_prompts=True)
    assert "no prompt is left: the answers of all have more than data.max_response_length=1 tokens" in said


def test_a_cut_prompt_keeps_its_answer(tmp_path: Path) -> None:
    path = write(tmp_path / "train.parquet", rows(*ANSWERS))
    cut, whole = load(path, max_prompt_length=4, truncation=Truncation.left), load(path)
    assert [(each.tokens, each.answer) for each in map(cut.__getitem__, range(3))] == [
        (each.tokens[-4:], each.answer) for each in map(whole.__getitem__, range(3))
    ]


def test_an_answer_follows_the_prompt_where_one_token_would_span_both(tmp_path: Path) -> None:
    path = write(tmp_path / "glued.parquet", [row("How many keys does Tom ha", "1", solution="ve?")])
    glued = prompt_files.tokenizer(
        "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if not add_generation_prompt %}<|end|>{% endif %}"
    )
    (read,) = load(path, glued, key="solution")
    assert list(read.tokens) == glued.encode("How many keys does Tom ha")
    assert list(read.answer) == [*glued.encode("ve?"), glued.eos_token_id]
    assert glued.encode("Tom have?") != [*glued.encode("Tom ha"), *glued.encode("ve?")], "else it shows nothing"


def test_a_template_that_writes_the_prompt_otherwise_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "train.parquet", rows("4"))
    changed = prompt_files.tokenizer(
        "{{ messages | length }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    assert "the chat template's prefixes do not agree" in refusal(path, changed)
