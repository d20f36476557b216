"""tools/prepare_data.py, as a user runs it: files, what it says, and exit codes."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pyarrow.parquet as pq
import pytest

TOOL = Path(__file__).parents[2] / "tools" / "prepare_data.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("prepare_data", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_arithmetic(tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["arithmetic", "--difficulty", "2", "--train", "20", "--val", "5", "--seed", "3", "--out"]
    assert tool.main([*command, str(tmp_path / "a")]) == tool.main([*command, str(tmp_path / "b")]) == 0
    rows = {split: pq.read_table(tmp_path / "a" / f"{split}.parquet") for split in ("train", "val")}
    assert {split: table.num_rows for split, table in rows.items()} == {"train": 20, "val": 5}
    for split in rows:
        assert (tmp_path / f"a/{split}.parquet").read_bytes() == (tmp_path / f"b/{split}.parquet").read_bytes()
    said = "".join(capsys.readouterr().out.split())  # long names are folded
    assert "20" in said and "Howmany" in said


def test_published_files_are_read_and_squared_brackets_shown(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = {"problem": "Where is [/b]?", "solution": "In \\boxed{[0,1]}."}
    (tmp_path / "train.jsonl").write_text(json.dumps(record))
    assert tool.main(["math", "--source", str(tmp_path / "train.jsonl"), "--out", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert "[/b]" in out and "[0,1]" in out
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["train.parquet"]


def test_errors_are_one_message_and_exit_code_2(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", str(tmp_path / "out")]
    assert tool.main(["gsm8k", "--source", str(tmp_path / "none"), *out]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and "there is no such file or folder" in said and "Traceback" not in said
    assert tool.main(["arithmetic", "--train", "0", *out]) == 2
    assert "train=0: must be positive" in capsys.readouterr().err
    (tmp_path / "out").write_text("in the way")
    assert tool.main(["arithmetic", "--train", "3", "--val", "3", *out]) == 2
    assert "is a file, and no directory" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        tool.main(["gsm8k"])


def test_an_interrupt_is_130(tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tool, "write_rows", interrupt)
    assert tool.main(["arithmetic", "--train", "3", "--val", "3", "--out", str(tmp_path)]) == 130
    assert list(tmp_path.iterdir()) == []
