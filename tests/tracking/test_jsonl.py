from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mcore_rl.tracking.jsonl import MetricsFile, read_metrics
from tests.house.source import ROOT

WRITER = """
import sys
from pathlib import Path
from mcore_rl.tracking.jsonl import MetricsFile
file = MetricsFile(Path(sys.argv[1]), -1)
for step in range(10**9):
    file.write(step, {"reward/mean": step / 7, "reward/std": 0.5})
    print(step, flush=True)
"""


def test_lines_are_json_objects_with_the_step_first(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, -1)
    file.write(0, {"reward/mean": 0.25})
    file.write(1, {"reward/mean": float("nan"), "reward/max": float("inf")})
    assert (
        path.read_text() == '{"step": 0, "reward/mean": 0.25}\n{"step": 1, "reward/mean": null, "reward/max": null}\n'
    )
    file.close()


def test_a_killed_writer_leaves_every_line_that_it_had_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = subprocess.Popen([sys.executable, "-c", WRITER, path], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert writer.stdout is not None
    said = -1
    for _ in range(500):
        said = int(writer.stdout.readline())
    writer.kill()
    said = max([said, *map(int, writer.stdout.read().split("\n")[:-1])])  # what it still said before it died
    writer.wait()
    rows = read_metrics(path)
    assert [row["step"] for row in rows] == list(range(len(rows)))
    assert len(rows) > said >= 499
    assert all(row["reward/mean"] == row["step"] / 7 for row in rows)


def test_a_resumed_run_drops_later_steps_and_the_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        "".join(json.dumps({"step": step, "reward/mean": step}) + "\n" for step in range(6)) + '{"step": 6, "rew'
    )
    file = MetricsFile(path, keep=3)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 1, 2, 3]
    file.write(4, {"reward/mean": 40.0})
    file.close()
    assert [(row["step"], row["reward/mean"]) for row in read_metrics(path)][3:] == [(3, 3), (4, 40)]
    MetricsFile(path, keep=-1).close()
    assert path.read_text() == ""


@pytest.mark.parametrize("bad", ['{"step": 1, "rewa', "[1, 2]", '{"reward/mean": 1}', "", "\x00\x00", '{"step": "1"}'])
def test_a_line_that_is_none_is_left_out(tmp_path: Path, bad: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 0}}\n{bad}\n{{"step": 2}}\n')
    assert [row["step"] for row in read_metrics(path)] == [0, 2]


def test_bytes_that_are_no_text_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n\xff\xfe\x80\n{"step": 2}\n')
    assert [row["step"] for row in read_metrics(path)] == [0, 2]


def test_no_file_is_no_step_and_the_last_line_of_a_step_counts(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert read_metrics(path) == []
    path.write_text('{"step": 1, "a": 1}\n{"step": 0, "a": 0}\n{"step": 1, "a": 2}\n')
    assert read_metrics(path) == [{"step": 0, "a": 0}, {"step": 1, "a": 2}]


@pytest.mark.parametrize("written", [0, 1, 8])
def test_what_a_full_disk_has_no_room_for_is_written_with_the_next(
    written: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, -1)
    file.write(0, {})
    real = file._file

    class Full:
        room = written

        def write(self, line: bytes) -> int:
            if not self.room:
                raise OSError(28, "No space left on device")
            self.room, room = 0, self.room
            return real.write(line[:room])

        def fileno(self) -> int:
            return real.fileno()

    for step in (1, 2):
        monkeypatch.setattr(file, "_file", Full())
        with pytest.raises(OSError, match="No space"):
            file.write(step, {})
        assert path.read_text() == '{"step": 0}\n'  # no half line
    monkeypatch.setattr(file, "_file", real)
    file.write(3, {})
    file.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 1, 2, 3]
