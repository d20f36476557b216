from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq

from mcore_rl.tracking.samples import sample_files, write_samples


def test_rows_come_back(tmp_path: Path) -> None:
    rows = [
        {"step": 3, "prompt": "a", "score": 0.5, "correct": True, "ground_truth": None},
        {"step": 3, "prompt": "ü\n", "score": 1.0, "correct": False, "ground_truth": "4"},
    ]
    path = write_samples(tmp_path, 3, "rollouts", rows)
    assert path == tmp_path / "rollouts/step_3.parquet"
    assert pq.read_table(path).to_pylist() == rows
    assert list(path.parent.iterdir()) == [path]


def test_what_has_no_common_type_is_text(tmp_path: Path) -> None:
    rows = [
        {"gold": 4, "extra": {"a": [1]}, "big": 2**70, "text": "half \ud800 pair"},
        {"gold": "four", "extra": {"b": object}, "big": 1, "text": "whole", "late": 1.5},
        {"gold": None, "extra": None, "big": None, "text": None},
    ]
    columns = pq.read_table(write_samples(tmp_path, 1, "rollouts", rows)).to_pydict()
    assert columns["gold"] == ["4", "four", None]
    assert json.loads(columns["extra"][0]) == {"a": [1]}
    assert columns["extra"][1:] == ['{"b": "<class \'object\'>"}', None]
    assert columns["big"] == [str(2**70), "1", None]
    assert columns["text"] == ["half ? pair", "whole", None]
    assert columns["late"] == [None, 1.5, None]


def test_messages_are_json(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "2+2?"}]
    columns = pq.read_table(write_samples(tmp_path, 1, "validation", [{"prompt": messages}])).to_pydict()
    assert json.loads(columns["prompt"][0]) == messages


def test_no_rows_are_a_file_too(tmp_path: Path) -> None:
    assert pq.read_table(write_samples(tmp_path, 1, "validation", [])).num_rows == 0


def test_files_are_listed_by_step(tmp_path: Path) -> None:
    for step in (10, 2, 0):
        write_samples(tmp_path, step, "validation", [{"a": step}])
    (tmp_path / "validation/.step_3.parquet.incomplete").write_bytes(b"half")
    (tmp_path / "validation/notes.parquet").write_bytes(b"")
    assert list(sample_files(tmp_path, "validation")) == [0, 2, 10]
    assert sample_files(tmp_path, "rollouts") == {}
