from __future__ import annotations

from pathlib import Path

import pytest

from mcore_rl.tracking.atomic import replaced


def test_it_takes_the_name_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    with replaced(path) as new:
        new.write_text("whole")
        assert not path.exists()
        inode = new.stat().st_ino
    assert path.read_text() == "whole"
    assert path.stat().st_ino == inode  # renamed, not copied
    assert list(path.parent.iterdir()) == [path]


def test_an_error_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("before")
    with pytest.raises(UnicodeEncodeError), replaced(path) as new:
        new.write_text("ha" * 10_000 + "\ud800", encoding="utf-8")
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]
