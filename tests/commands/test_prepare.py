"""``mcore-rl prepare``, as a user runs it: files, what it says, and exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from mcore_rl.cli import main
from mcore_rl.commands import prepare


def test_arithmetic(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["arithmetic", "--difficulty", "2", "--train", "20", "--val", "5", "--seed", "3", "--out"]
    assert main(["prepare", *command, str(tmp_path / "a")]) == main(["prepare", *command, str(tmp_path / "b")]) == 0
    rows = {split: pq.read_table(tmp_path / "a" / f"{split}.parquet") for split in ("train", "val")}
    assert {split: table.num_rows for split, table in rows.items()} == {"train": 20, "val": 5}
    for split in rows:
        assert (tmp_path / f"a/{split}.parquet").read_bytes() == (tmp_path / f"b/{split}.parquet").read_bytes()
    said = "".join(capsys.readouterr().out.split())  # long names are folded
    assert "20" in said and "Howmany" in said


def test_products(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prepare", "products", "--train", "20", "--val", "5", "--out", str(tmp_path)]) == 0
    assert {path.stem: pq.read_table(path).num_rows for path in tmp_path.iterdir()} == {
        "train": 20,
        "val": 5,
        "sft": 20,
    }
    assert "tool_agent" in capsys.readouterr().out


def test_squares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        assert main(["prepare", "squares", "--train", "8", "--val", "3", "--out", str(tmp_path / name)]) == 0
    for split, count in (("train", 8), ("val", 3)):
        assert pq.read_table(tmp_path / f"a/{split}.parquet").num_rows == count
        assert (tmp_path / f"a/{split}.parquet").read_bytes() == (tmp_path / f"b/{split}.parquet").read_bytes()
    out = capsys.readouterr().out
    assert "56 x 56 pixels" in out and "PNG" not in out, "a picture is told, and not its bytes"


def test_published_files_are_read_and_squared_brackets_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = {"problem": "Where is [/b]?", "solution": "In \\boxed{[0,1]}."}
    (tmp_path / "train.jsonl").write_text(json.dumps(record))
    assert main(["prepare", "math", "--source", str(tmp_path / "train.jsonl"), "--out", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert "[/b]" in out and "[0,1]" in out
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["train.parquet"]


def test_errors_are_one_message_and_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path / "out")]
    assert main(["prepare", "gsm8k", "--source", str(tmp_path / "none"), *out]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and "there is no such file or folder" in said and "Traceback" not in said
    assert main(["prepare", "arithmetic", "--train", "0", *out]) == 2
    assert "train=0: must be positive" in capsys.readouterr().err
    (tmp_path / "out").write_text("in the way")
    assert main(["prepare", "arithmetic", "--train", "3", "--val", "3", *out]) == 2
    assert "is a file, and no directory" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["prepare", "gsm8k"])


def test_an_interrupt_is_130(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(prepare, "write_rows", interrupt)
    assert main(["prepare", "arithmetic", "--train", "3", "--val", "3", "--out", str(tmp_path)]) == 130
    assert list(tmp_path.iterdir()) == []
