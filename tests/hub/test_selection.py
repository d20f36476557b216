"""Which files of a repository or folder are meant."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mcore_rl.hub import selection
from mcore_rl.hub.selection import SelectionError, folder_tables, tables_of

AT = "ID:"


@pytest.mark.parametrize(
    ("names", "split", "expected"),
    [
        (["train.jsonl", "test.jsonl"], "train", ["train.jsonl"]),
        (["train.jsonl", "test.jsonl"], "val", ["test.jsonl"]),
        (["train.jsonl", "test.jsonl", "validation.jsonl"], "val", ["validation.jsonl"]),
        (["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet", "data/test-0.parquet"], "train",
         ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"]),
        (["train/0000.parquet", "test/0000.parquet"], "val", ["test/0000.parquet"]),
        (["data/dapo-math-17k.parquet"], "train", ["data/dapo-math-17k.parquet"]),
        (["data/aime-2024.parquet"], "val", ["data/aime-2024.parquet"]),
        (["data/aime-2024.parquet"], "", ["data/aime-2024.parquet"]),
        (["training_notes.parquet", "rows.parquet"], "train", ["rows.parquet", "training_notes.parquet"]),
        (["train.jsonl", "train.parquet", "README.md", ".cache/train.parquet"], "train", ["train.parquet"]),
        (["validation.jsonl.gz"], "", ["validation.jsonl.gz"]),
    ],
)  # fmt: skip
def test_the_files_of_a_split(names: list[str], split: str, expected: list[str]) -> None:
    assert tables_of(names, split, prefix=AT) == expected


@pytest.mark.parametrize(
    ("names", "split", "path", "said"),
    [
        (["a.csv", "b.csv"], "train", "", "only .csv"),
        ([], "train", "", "has no .parquet"),
        (["test.parquet"], "train", "", "splits test"),
        (["train.parquet", "test.parquet"], "", "", "splits test, train"),
        (["main/train.parquet", "socratic/train.parquet"], "train", "", "folders main, socratic"),
        (["main/train.parquet"], "train", "other", "below other"),
    ],
)
def test_what_does_not_follow_is_refused(names: list[str], split: str, path: str, said: str) -> None:
    with pytest.raises(SelectionError) as caught:
        tables_of(names, split, path, prefix=AT)
    assert said in caught.value.problem


def saved(folder: Path, *files: str) -> None:
    """As ``Dataset.save_to_disk`` of ``datasets`` 4 lays them out."""
    folder.mkdir(parents=True)
    for name in (*files, "cache-0123.arrow"):
        (folder / name).write_bytes(b"")
    state = {"_data_files": [{"filename": name} for name in files], "_fingerprint": "0", "_split": None}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")


def test_folders_that_datasets_saved(tmp_path: Path) -> None:
    parts = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    saved(tmp_path / "one", *parts)
    assert folder_tables(tmp_path / "one", "train") == [tmp_path / "one" / each for each in parts]
    for split in ("train", "test"):
        saved(tmp_path / "both" / split, parts[0])
    (tmp_path / "both" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert folder_tables(tmp_path / "both", "val") == [tmp_path / "both" / "test" / parts[0]]
    with pytest.raises(SelectionError) as caught:
        folder_tables(tmp_path / "both", "")
    assert f"{tmp_path}/both/test/{parts[0]}" in caught.value.remedy
    saved(tmp_path / "evil", "data-0.arrow")
    (tmp_path / "evil" / "state.json").write_text('{"_data_files": [{"filename": "../../secret.arrow"}]}')
    with pytest.raises(SelectionError, match=r"names \.\./\.\./secret\.arrow"):
        folder_tables(tmp_path / "evil", "train")


def test_a_folder_of_tables(tmp_path: Path) -> None:
    for name in ("train.parquet", "test.parquet", "state.json"):
        (tmp_path / name).write_bytes(b"{}")
    assert folder_tables(tmp_path, "train") == [tmp_path / "train.parquet"]


def test_a_folder_of_very_many_files_is_no_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "MAX_ENTRIES", 10)
    for number in range(11):
        (tmp_path / f"{number}.parquet").touch()
    with pytest.raises(SelectionError, match="holds more than 10 files and folders"):
        folder_tables(tmp_path, "train")
