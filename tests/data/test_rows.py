"""Rows of parquet files: ids that do not collide, chosen samples, types, and files that cannot be read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from mcore_rl.data.rows import (
    BATCH_ROWS,
    Ragged,
    clean_messages,
    distinct_names,
    is_messages,
    is_text,
    named,
    read_files,
)
from tests.support.prompt_files import not_utf8, write


def numbered(path: Path, count: int, **options: int) -> Path:
    return write(path, [{"number": number} for number in range(count)], **options)


def ids(paths: list[Path], **options: int | None) -> list[str]:
    problems: list[str] = []
    read = read_files(paths, problems, **({"max_samples": None, "seed": 1} | options))  # type: ignore[arg-type]
    assert problems == []
    for file in read:
        assert [file.record(row)["number"] for row in range(len(file.numbers))] == file.numbers.tolist()
    return [file.row_id(row) for file in read for row in range(len(file.numbers))]


def test_ids_are_file_and_row_with_as_many_folders_as_it_takes(tmp_path: Path) -> None:
    paths = [tmp_path / "a/x/train.parquet", tmp_path / "b/x/train.parquet", tmp_path / "c/val.parquet"]
    for path in paths:
        numbered(path, 2)
    rows = [f"{name}:{row}" for name in ("a/x/train.parquet", "b/x/train.parquet", "val.parquet") for row in (0, 1)]
    assert ids(paths) == rows
    assert ids(paths[:1]) == ["train.parquet:0", "train.parquet:1"]


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["/a/t", "/b/t"], ["a/t", "b/t"]),
        (["/a/b/t", "/b/t"], ["a/b/t", "//b/t"]),  # the whole path of one is the end of the other
        (["/a/t", "/a/u"], ["t", "u"]),
    ],
)
def test_distinct_names(paths: list[str], names: list[str]) -> None:
    assert distinct_names([Path(path) for path in paths]) == names
    assert len(set(names)) == len(names)


def test_samples_are_of_all_files_in_file_order_and_the_same_for_a_seed(tmp_path: Path) -> None:
    paths = [numbered(tmp_path / "a.parquet", 30, row_group_size=7), numbered(tmp_path / "b.parquet", 20)]
    whole = ids(paths)
    chosen = ids(paths, max_samples=20)
    assert len(set(chosen)) == 20 and chosen == [row for row in whole if row in chosen]
    assert {row[0] for row in chosen} == {"a", "b"}
    assert chosen == ids(paths, max_samples=20) != ids(paths, max_samples=20, seed=2)
    assert set(ids(paths, max_samples=10)) < set(chosen), "fewer are the first of the same shuffle"
    assert ids(paths, max_samples=50) == ids(paths, max_samples=1_000) == whole


def test_batches_cover_everything_and_stop_at_no_bad_row(tmp_path: Path) -> None:
    count = 2 * BATCH_ROWS + 3
    texts = [b"ok"] * count
    texts[BATCH_ROWS + 1] = b"caf\xe9"
    path = tmp_path / "x.parquet"
    pa.parquet.write_table(pa.table({"text": not_utf8(texts)}), path)
    (file,) = read_files([path], problems := [], max_samples=None, seed=0)
    assert problems == []
    by_place = {start + place: record for start, records in file.batches() for place, record in enumerate(records)}
    assert len(by_place) == count
    assert [row for row, record in by_place.items() if record is None] == [BATCH_ROWS + 1]
    assert by_place[0] == by_place[count - 1] == {"text": "ok"}


def test_files_that_cannot_be_read_are_all_named(tmp_path: Path) -> None:
    good = numbered(tmp_path / "good.parquet", 3)
    text, cut = tmp_path / "text.parquet", tmp_path / "cut.parquet"
    text.write_text('{"prompt": 1}')
    cut.write_bytes(good.read_bytes()[:-20])
    problems: list[str] = []
    files = [good, tmp_path / "none.parquet", tmp_path, text, cut, str(good)]
    read = read_files(files, problems, max_samples=None, seed=0)
    assert [len(file.numbers) for file in read] == [3]
    said = "\n".join(problems)
    assert len(problems) == 5
    for part in ("good.parquet: is named twice", "none.parquet: there is no such file", f"{tmp_path}: is a directory"):
        assert part in said
    assert "text.parquet: cannot be read as parquet" in said and "cut.parquet: cannot be read as parquet" in said
    problems.clear()
    assert read_files([], problems, max_samples=None, seed=0) == []
    assert "names no file" in problems[0]


def test_a_damaged_page_is_named(tmp_path: Path) -> None:
    path = numbered(tmp_path / "x.parquet", 5_000)
    held = bytearray(path.read_bytes())
    held[4:400] = bytes(396)
    path.write_bytes(held)
    assert read_files([path], problems := [], max_samples=None, seed=0) == []
    assert "x.parquet: cannot be read as parquet" in problems[0]


def test_types_of_columns() -> None:
    texts = [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())]
    assert all(is_text(kind) for kind in texts)
    assert not any(is_text(kind) for kind in (pa.binary(), pa.int64(), pa.null(), pa.list_(pa.string())))
    message = pa.struct({"role": pa.string(), "content": pa.large_string(), "name": pa.string()})
    assert all(is_messages(kind) for kind in (pa.list_(message), pa.large_list(message), pa.list_(message, 2)))
    no_role = pa.struct({"content": pa.string()})
    parts = pa.struct({"role": pa.string(), "content": pa.list_(pa.string())})
    others = (pa.string(), pa.null(), message, pa.list_(pa.string()), pa.list_(no_role), pa.list_(parts))
    assert not any(is_messages(kind) for kind in others)


def test_messages_lose_what_parquet_adds_and_nothing_else() -> None:
    asked = {"role": "user", "content": "", "name": None}
    calls = {"role": "assistant", "content": None, "tool_calls": [{"id": 1}]}
    assert clean_messages([asked, calls]) == [
        {"role": "user", "content": ""},
        {"role": "assistant", "tool_calls": [{"id": 1}]},
    ]
    assert clean_messages(None) == "is null"
    assert clean_messages([]) == "has no messages"
    assert clean_messages([asked, None]) == "has no role in message 1"
    assert clean_messages([{"role": "", "content": "x"}]) == "has no role in message 0"
    assert clean_messages([{"role": "user", "content": None}]) == "has no content in message 0"


def test_names_are_shown_up_to_twenty() -> None:
    assert named(["a", "b"]) == "a, b"
    assert named([str(number) for number in range(23)]).endswith("18, 19 and 3 more")


def test_ragged_gives_back_what_was_put_in() -> None:
    ragged, rows = Ragged(), [[1, 2, 3], [], [7], [2**31 - 1, 0]]
    for row in rows:
        ragged.append(row)
    ragged.close()
    assert [ragged[index].tolist() for index in range(len(ragged))] == rows
    assert ragged[0].dtype == np.int32 and ragged.lengths == [3, 0, 1, 2]
