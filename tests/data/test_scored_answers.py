"""The tokens that a reward model reads, and where its score is."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.config.data import PreferenceDataConfig, Truncation
from mcore_rl.controller.step.reward_model import Encoder
from mcore_rl.data.preferences import RowForm
from mcore_rl.data.scored_answers import END, ScoredSet, conversation_tokens, encoder
from mcore_rl.ground.errors import DataError
from tests.support import prompt_files

PAIRS = [
    {"prompt": "2 + 3?", "chosen": "5", "rejected": ""},
    {"prompt": "1 + 1?", "chosen": "it is 2", "rejected": "3"},
]
LABELLED = [
    {"prompt": "2 + 3?", "completion": "5", "label": 1.0},
    {"prompt": "1 + 1?", "completion": "it is 3", "label": -0.25},
]
PREFERRED, LABELS = RowForm(), RowForm(pairs=False, labels=True)


def load(tmp_path: Path, rows: list[dict[str, Any]], form: RowForm = PREFERRED, **changes: Any) -> ScoredSet:
    path = prompt_files.write(tmp_path / "rows.parquet", rows)
    encode = encoder(prompt_files.tokenizer(), None, {})
    config = PreferenceDataConfig(**changes)
    return ScoredSet.load([path], config, encode, max_samples=None, title="data.train_files", form=form)


def test_an_answer_is_what_engines_are_given_and_its_end(tmp_path: Path) -> None:
    rows, engines = load(tmp_path, PAIRS), Encoder(prompt_files.tokenizer(), None, 100, Truncation.error)
    for number, row in enumerate(PAIRS):
        for key, answer in zip(("chosen", "rejected"), rows[number].answers, strict=True):
            told = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row[key]}]
            assert answer.tokens == (*engines.tokens(told), END)
            assert answer.mask == (*(False,) * (len(answer.tokens) - 1), True)
    assert rows.units == [[len(answer.tokens) for answer in rows[number].answers] for number in range(2)]


def test_padding_at_the_end_is_not_read() -> None:
    """Where the token that ends a turn is the padding, transformers reads the score before it."""
    tokenizer = prompt_files.tokenizer()
    told = [{"role": "user", "content": "2?"}, {"role": "assistant", "content": "2"}]
    tokens = conversation_tokens(tokenizer, told, None)
    last = next(place for place in reversed(range(len(tokens))) if tokens[place] != tokens[-1])
    assert conversation_tokens(tokenizer, told, tokens[-1]) == tokens[: last + 1]


def test_what_is_cut_is_scored_at_its_last_token(tmp_path: Path) -> None:
    whole = load(tmp_path, LABELLED, LABELS)[1].answers[0].tokens
    for truncation, kept in ((Truncation.right, whole[:4]), (Truncation.left, whole[-5:-1])):
        cut = load(tmp_path, LABELLED, LABELS, max_length=4, truncation=truncation)
        assert cut[1].answers[0].tokens == (*kept, END) and cut.num_truncated == 2 and cut.num_left_out == 0


def test_labels_are_numbers(tmp_path: Path) -> None:
    rows = load(tmp_path, LABELLED, LABELS)
    assert [rows[number].labels for number in range(2)] == [(1.0,), (-0.25,)]
    both = [row | {"chosen": "a", "rejected": "b"} for row in LABELLED]
    assert not load(tmp_path, both, LABELS)[0].is_pair and load(tmp_path, both)[0].is_pair


@pytest.mark.parametrize("label", [math.nan, math.inf, None, -0.25, 1.5])
def test_labels_beyond_the_bounds_are_refused(tmp_path: Path, label: float | None) -> None:
    rows = [LABELLED[0], LABELLED[1] | {"label": label}]
    with pytest.raises(DataError, match=r"rows.parquet:1: label is .*\. Write a number from 0 to 1, true or false"):
        load(tmp_path, rows, RowForm(pairs=False, labels=True, least=0.0, most=1.0))
