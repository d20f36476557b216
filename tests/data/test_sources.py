"""Records of published data sets from the files and folders that they come in."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mcore_rl.data.sources import read_splits
from mcore_rl.ground.errors import DataError

SPLITS = ("train", "test")


def lines(path: Path, *numbers: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"n": number}) + "\n" for number in numbers))
    return path


def numbers(source: Path, splits: tuple[str, ...] = SPLITS, folder: str = "") -> dict[str, list[int]]:
    return {
        split: [r.fields["n"] for r in of_split] for split, of_split in read_splits(str(source), splits, folder).items()
    }


def refusal(source: Path | str, splits: tuple[str, ...] = SPLITS) -> str:
    with pytest.raises(DataError) as caught:
        read_splits(str(source), splits)
    return str(caught.value)


def test_a_folder_of_jsonl_json_and_parquet(tmp_path: Path) -> None:
    lines(tmp_path / "train.jsonl", 1, 2)
    (tmp_path / "test.json").write_text('[{"n": 3}, {"n": 4}]')
    pq.write_table(pa.table({"n": [5]}), tmp_path / "test-00001-of-00002.parquet")
    lines(tmp_path / "README.txt", 9)
    lines(tmp_path / ".cache/train.jsonl", 9)
    assert {split: sorted(of_split) for split, of_split in numbers(tmp_path).items()} == {
        "train": [1, 2],
        "test": [3, 4, 5],
    }


def test_one_file_a_record_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    """As MATH comes."""
    for split in SPLITS:
        for number in (10, 2, 1):
            (tmp_path / split / "algebra").mkdir(parents=True, exist_ok=True)
            (tmp_path / split / "algebra" / f"{number}.json").write_text(json.dumps({"n": number}))
    assert numbers(tmp_path) == {"train": [1, 2, 10], "test": [1, 2, 10]}


def test_the_folder_of_a_configuration_goes_first(tmp_path: Path) -> None:
    for name, number in (("main", 1), ("socratic", 2)):
        for split in SPLITS:
            lines(tmp_path / name / f"{split}-0.jsonl", number)
    assert numbers(tmp_path, folder="main") == {"train": [1], "test": [1]}


def test_one_file_is_of_the_split_it_is_named_after(tmp_path: Path) -> None:
    assert numbers(lines(tmp_path / "test.jsonl", 1)) == {"test": [1]}
    assert numbers(lines(tmp_path / "problems.jsonl", 2)) == {"train": [2]}
    lines(tmp_path / "x/anything.jsonl", 3)
    assert numbers(tmp_path / "x", ("test",)) == {"test": [3]}


def test_places_name_the_line(tmp_path: Path) -> None:
    lines(tmp_path / "train.jsonl", 1, 2)
    assert [record.place for record in read_splits(str(tmp_path / "train.jsonl"), SPLITS)["train"]] == [
        "train.jsonl line 1",
        "train.jsonl line 2",
    ]


def test_everything_wrong_is_named_at_once(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_bytes(b'{"n": 1}\n{"n": \n\n[3]\n"caf\xe9"\n')
    (tmp_path / "train.json").write_text("{")
    (tmp_path / "train.parquet").write_text("no")
    said = refusal(tmp_path)
    assert "6 problems" in said
    for part in (
        "train.jsonl line 2: is no JSON",
        "train.jsonl line 4: is list, not an object",
        "train.jsonl line 5: is no JSON",
        "train.json: cannot be read",
        "train.parquet: cannot be read",
        "no file of split test. Put test.jsonl",
    ):
        assert part in said


def test_no_such_source(tmp_path: Path) -> None:
    for source in (str(tmp_path / "nothing"), "./nothing/here", "nothing", "a/b/c"):
        assert "there is no such file or folder. Give a folder, a file" in refusal(source)


def test_a_hub_id_is_fetched_once_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def snapshot_download(repo_id: str, **options: object) -> str:
        asked.append((repo_id, options))
        lines(tmp_path / "main/train.jsonl", 1)
        lines(tmp_path / "main/test.jsonl", 2)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    splits = read_splits("openai/gsm8k", SPLITS, "main")
    assert {split: len(records) for split, records in splits.items()} == {"train": 1, "test": 1}
    patterns = ["main/*.jsonl", "main/*.json", "main/*.parquet"]
    assert asked == [("openai/gsm8k", {"repo_type": "dataset", "allow_patterns": patterns})]


def test_a_hub_that_cannot_be_reached_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(repo_id: str, **options: object) -> str:
        raise ConnectionError("no network\nand more")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    said = refusal("openai/gsm8k")
    assert "cannot be fetched: ConnectionError: no network. Check the id; or download" in said
