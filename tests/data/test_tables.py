"""Files of rows: each kind gives the rows that parquet gives, and what is wrong is named with its row."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from mcore_rl.config.data import DataConfig
from mcore_rl.data.prompts import PromptSet
from mcore_rl.data.tables import read_table
from mcore_rl.ground.errors import DataError
from tests.support import prompt_files
from tests.support.prompt_files import write_as

ROWS = [
    {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": f"{number} + 1 = ? ä€"}],
        "reward_model": {"style": "rule", "ground_truth": str(number + 1)},
        "extra_info": {"index": number, "tags": ["a"] if number else []},
    }
    for number in range(5)
]


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl", "a.jsonl.gz", "a.arrow"])
def test_every_kind_holds_the_same_prompts(name: str, tmp_path: Path) -> None:
    tokenizer = prompt_files.tokenizer()

    def rows(path: Path) -> list[Any]:
        prompts = PromptSet.load([path], DataConfig(), tokenizer, max_samples=None, title="data.train_files")
        return [prompts[index] for index in range(len(prompts))]

    theirs, ours = rows(write_as(tmp_path / "reference.parquet", ROWS)), rows(write_as(tmp_path / name, ROWS))
    assert [each.id for each in ours] == [f"{name}:{number}" for number in range(5)]
    assert [(each.messages, each.tokens, each.ground_truth, each.extra_info) for each in ours] == [
        (each.messages, each.tokens, each.ground_truth, each.extra_info) for each in theirs
    ]


@pytest.mark.parametrize("name", ["a.jsonl", "a.arrow"])
def test_a_wrong_row_has_its_number(name: str, tmp_path: Path) -> None:
    rows = [dict(row) for row in ROWS]
    rows[3] = rows[3] | {"prompt": []}
    path = write_as(tmp_path / name, rows)
    with pytest.raises(DataError, match=rf"{name}:3"):
        PromptSet.load([path], DataConfig(), prompt_files.tokenizer(), max_samples=None, title="data.train_files")


def problems_of(path: Path) -> list[str]:
    problems: list[str] = []
    assert read_table(path, path.name, problems) is None
    return problems


def test_lines_that_are_no_rows_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\n\n{"a": }\n[1]\n{"a": NaN}\n{"a": "\xff"}\n' + b"[" * 100_000 + b"\n")
    (problem,) = problems_of(path)
    for said in ("line 3 is no JSON", "line 4 is list", "line 5 is no JSON (NaN", "line 6 is no JSON", "line 7 is no"):
        assert said in problem


@pytest.mark.parametrize(
    ("values", "row"),
    [
        ([1, 2, "three", 4], 2),
        ([{"a": 1}, {"a": "x"}], 1),
        (["a", ["b"]], 1),
        ([1] * 700 + ["x"] + [1] * 300, 700),
        ([1, 2**70], 1),
        (["a", "\ud800"], 1),
    ],
)
def test_a_column_has_one_type(values: list[Any], row: int, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"first": 0, "c": each}) + "\n" for each in values))
    (problem,) = problems_of(path)
    assert problem.startswith(f"a.jsonl:{row}: c: ")


def test_what_rows_lack_is_null(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1, "e": {}}\n\n{"b": {"c": 2}, "a": 2.5}\n{"b": {"d": "x"}, "e": {}}\n')
    rows = read_table(path, path.name, [])
    assert rows is not None
    assert rows.table.to_pylist() == [
        {"a": 1.0, "e": None, "b": None},
        {"a": 2.5, "e": None, "b": {"c": 2, "d": None}},
        {"a": None, "e": None, "b": {"c": None, "d": "x"}},
    ]
    pq.write_table(rows.table, tmp_path / "again.parquet")


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("a.arrow", b"no arrow", "cannot be read as arrow"),
        ("a.parquet", b"no parquet", "cannot be read as parquet"),
        ("a.jsonl.gz", b"no gzip", "cannot be read as gz"),
        ("a.jsonl.gz", gzip.compress(b'{"a": 1}\n' * 1000, mtime=0)[:-9], "cannot be read as gz"),
        ("a.json", b"[]", "jsonl: an object a line"),
        ("a.csv", b"a,b", "is no table"),
    ],
)
def test_files_that_are_none(name: str, data: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(data)
    (problem,) = problems_of(tmp_path / name)
    assert said in problem
