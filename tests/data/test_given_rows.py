"""Rows of a program as a file of rows, read back by what a run reads its data with."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mcore_rl.data.given_rows import GivenRows, rows_file
from mcore_rl.data.rows import read_files
from mcore_rl.ground.errors import ConfigError
from tests.support.oracles import oracles

ROWS: list[dict[str, Any]] = [
    {"prompt": "Two and two?", "answer": "4", "topic": None, "number": 1},
    {"prompt": "Two and three?", "answer": None, "topic": {"name": "sums"}, "number": 2},
]
CHAT = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Two?"}]


def write(rows: Any, folder: Path, prompt_key: str = "prompt") -> GivenRows:
    given = rows_file(rows, folder, argument="dataset", split="train", prompt_key=prompt_key)
    folder.mkdir(exist_ok=True)
    given.path.write_bytes(given.data)
    return given


def read(path: Path) -> list[dict[str, Any]]:
    problems: list[str] = []
    (file,) = read_files([path], problems, max_samples=None, seed=0)
    assert problems == []
    return [record for _, batch in file.batches() for record in batch if record is not None]


def test_texts_become_questions_and_what_is_missing_is_filled_in(tmp_path: Path) -> None:
    given = write(ROWS, tmp_path)
    assert given.texts and given.path.parent == tmp_path
    first, second = read(given.path)
    assert first["prompt"] == [{"role": "user", "content": "Two and two?"}]
    assert (first["data_source"], first["reward_model"]) == ("dataset", {"style": "rule", "ground_truth": "4"})
    absent = {"data_source": None, "reward_model": None}
    assert read(write([row | absent for row in ROWS], tmp_path).path) == [first, second], "as a Dataset has them"
    assert second["reward_model"]["ground_truth"] == "" and second["topic"] == {"name": "sums"}
    assert write(ROWS, tmp_path) == given and write(ROWS[:1], tmp_path).path != given.path, "named by content"


def test_what_a_row_says_stays(tmp_path: Path) -> None:
    row = {"q": CHAT, "data_source": "openai/gsm8k", "reward_model": {"style": "rule", "ground_truth": "2"}}
    given = write([row | {"ids": np.arange(3), "share": np.float32(0.5)}], tmp_path, "q")
    assert not given.texts
    assert read(given.path) == [row | {"ids": [0, 1, 2], "share": 0.5}]


@pytest.mark.tier("ci")
def test_a_dataset_of_hugging_face(tmp_path: Path) -> None:
    with oracles("datasets"):
        made = import_module("datasets").Dataset.from_list(ROWS)
        assert write(made, tmp_path).path.read_bytes() == write(list(made), tmp_path / "list").path.read_bytes()
        splits = import_module("datasets").DatasetDict({"test": made, "train": made})
        with pytest.raises(ConfigError, match=r"are splits, and no rows. Give one of them: dataset=splits\['test'\]"):
            write(splits, tmp_path)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([], "dataset=: has no rows. Give at least one"),
        ([ROWS[0], {"question": "Two?"}], "dataset=row 1: has no prompt; it has question. Rename the column, or write"),
        ([ROWS[0], "Two?"], "dataset=row 1: is str, and no dict"),
        ([{"prompt": "Two?", "image": object()}], "dataset=row 0: cannot be written: object is no plain value"),
    ],
)
def test_rows_that_cannot_be_used_are_named(tmp_path: Path, rows: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        write(rows, tmp_path / "inputs")
    assert said in str(caught.value) and not (tmp_path / "inputs").exists()
