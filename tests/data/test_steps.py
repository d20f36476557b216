"""Answers by steps: where each ends in tokens, what is cut, and every broken row named at once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.config.data import PreferenceDataConfig, Truncation
from mcore_rl.data.scored_answers import END
from mcore_rl.data.steps import StepSet, joined_steps
from mcore_rl.ground.errors import DataError
from tests.support import prompt_files

CONFIG = PreferenceDataConfig(step_labels_key="labels", max_length=128)
STEPS = ["2 + 3 = 5", "5 + 4 = 8\n", "#### 8"]


def row(steps: list[str] | None = None, labels: list[Any] | None = None, **more: Any) -> dict[str, Any]:
    return {"prompt": "What is 2 + 3 + 4?", "completion": STEPS if steps is None else steps} | {
        "labels": [1.0, 0.0, 0.25] if labels is None else labels
    } | more  # fmt: skip


def load(path: Path, config: PreferenceDataConfig = CONFIG, template: str | None = None) -> StepSet:
    tokenizer = prompt_files.tokenizer(template)
    return StepSet.load([path], config, tokenizer, pad_token_id=None, max_samples=None, title="data.train_files")


def problems(path: Path, config: PreferenceDataConfig = CONFIG, template: str | None = None) -> list[str]:
    with pytest.raises(DataError) as caught:
        load(path, config, template)
    return list(caught.value.problems)


def test_steps_are_joined_by_line_breaks_of_which_they_may_have_their_own() -> None:
    assert joined_steps(STEPS) == ("2 + 3 = 5\n5 + 4 = 8\n#### 8", [9, 19, 26])


@pytest.mark.parametrize("template", [None, prompt_files.CHATML])
def test_each_step_ends_at_its_last_token_and_the_last_with_the_conversation(
    tmp_path: Path, template: str | None
) -> None:
    rows = load(
        prompt_files.write(tmp_path / "a.parquet", [row(), row(["#### 5"], [1], prompt="5?")]), template=template
    )
    tokenizer, first = prompt_files.tokenizer(template), rows[0]
    told = [{"role": "user", "content": "What is 2 + 3 + 4?"}, {"role": "assistant", "content": joined_steps(STEPS)[0]}]
    whole = list(tokenizer.apply_chat_template(told, return_dict=False))
    assert list(first.answer.tokens) == [*whole, END] and first.labels == (1.0, 0.0, 0.25) and first.weight == 1
    ends = [place for place, trained in enumerate(first.answer.mask) if trained]
    texts = [tokenizer.decode(whole[:end]) for end in ends]
    assert texts[0].endswith("2 + 3 = 5") and texts[1].endswith("5 + 4 = 8") and ends[2] == len(whole)
    assert rows.units == [[len(whole) + 1], [len(rows[1].answer.tokens)]] and len(rows) == 2
    parts = first.by_step
    assert [part.labels for part in parts] == [(1.0,), (0.0,), (0.25,)]
    for part, end in zip(parts, ends, strict=True):
        (answer,) = part.answers
        assert answer.tokens == (*whole[:end], END) and answer.mask == (*(False,) * end, True)


def test_what_is_cut_has_no_label(tmp_path: Path) -> None:
    path = prompt_files.write(tmp_path / "a.parquet", [row(labels=[True, False, True])])
    whole = load(path)[0]
    length, ends = len(whole.answer.tokens) - 1, [t for t, trained in enumerate(whole.answer.mask) if trained]
    (problem,) = problems(path, replace(CONFIG, max_length=length - 1))
    assert problem.startswith(
        f"1 have an answer of more than data.max_length={length - 1} tokens, the longest {length}"
    )
    right = load(path, replace(CONFIG, max_length=ends[1], truncation=Truncation.right))[0]
    assert right.answer.tokens == (*whole.answer.tokens[: ends[1]], END) and right.labels == (1.0, 0.0)
    assert [t for t, trained in enumerate(right.answer.mask) if trained] == ends[:2]
    left = load(path, replace(CONFIG, max_length=length - ends[0], truncation=Truncation.left))[0]
    assert left.labels == (0.0, 1.0) and left.answer.tokens == whole.answer.tokens[ends[0] :]
    assert [t for t, trained in enumerate(left.answer.mask) if trained] == [end - ends[0] for end in ends[1:]]
    (problem,) = problems(path, replace(CONFIG, max_length=2, truncation=Truncation.right))
    assert problem.startswith("no row is left with a step")


def test_every_broken_row_is_named(tmp_path: Path) -> None:
    rows = [
        row(labels=[1.0, 0.0]), row([], []), row(["a", " "], [1.0, 0.0]), row(labels=[1.0, 2.0, 0.0]),
        row(labels=[1.0, None, 0.0]), row() | {"prompt": None}, row(),
    ]  # fmt: skip
    said = problems(prompt_files.write(tmp_path / "a.parquet", rows))
    starts = [
        "labels has 2 labels for 3 steps", "completion has no step", "completion has no step, or an empty one",
        "labels holds 2.0. Write numbers from 0 to 1", "labels holds null", "prompt is null",
    ]  # fmt: skip
    assert len(said) == 6
    for number, (problem, start) in enumerate(zip(said, starts, strict=True)):
        assert problem.startswith(f"a.parquet:{number}: {start}"), problem


def test_columns_and_templates_that_cannot_be_read(tmp_path: Path) -> None:
    (problem,) = problems(prompt_files.write(tmp_path / "a.parquet", [row() | {"completion": "a"}]))
    assert problem.startswith("a.parquet: column completion is string, not a list of texts, its steps. Write it so")
    (problem,) = problems(prompt_files.write(tmp_path / "b.parquet", [{"prompt": "a", "completion": ["b"]}]))
    assert problem.startswith("b.parquet: no column labels; it has prompt, completion. Write a list of numbers")
    (problem,) = problems(prompt_files.write(tmp_path / "w.parquet", [row(w="a")]), replace(CONFIG, weight_key="w"))
    assert problem.startswith("w.parquet: column w is string, not a number")
    upper = prompt_files.CHATML.replace("{{ message['content'] }}", "{{ message['content'] | replace('=', 'is') }}")
    (problem,) = problems(prompt_files.write(tmp_path / "c.parquet", [row()]), template=upper)
    assert problem.startswith("c.parquet:0: the chat template changes the answer")
    (problem,) = problems(prompt_files.write(tmp_path / "d.parquet", [row()]), template="{{ raise_exception('no') }}")
    assert problem.startswith("d.parquet:0: the chat template refuses it: no")
