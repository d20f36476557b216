"""Finished pieces are there after a kill, and no others."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

import pytest

from mcore_rl.ground.errors import ConfigError
from mcore_rl.tracking.journal import journal, journal_of

WORK = {"settings": {"seed": 1}}


def begun(out: Path, *entries: int) -> None:
    """A journal of a work that was killed after ``entries``."""
    with suppress(KeyboardInterrupt), journal(out, WORK, afresh=False) as kept:
        for entry in entries:
            kept.append({"n": entry})
        raise KeyboardInterrupt


def test_a_work_goes_on_where_it_was(tmp_path: Path) -> None:
    out = tmp_path / "new" / "a.json"
    begun(out, 1, 2)
    begun(out, 3)
    with journal(out, WORK, afresh=False) as kept:
        assert kept.entries == ({"n": 1}, {"n": 2}, {"n": 3})
        assert journal_of(out).exists()
    assert not journal_of(out).exists(), "it is of no use when the work is done"
    with journal(out, WORK, afresh=False) as kept:
        assert kept.entries == ()


def test_a_line_that_was_cut_short_is_dropped_and_the_next_stands_by_itself(tmp_path: Path) -> None:
    out = tmp_path / "a.json"
    begun(out, 1)
    with open(journal_of(out), "a") as file:
        file.write('{"n": 2')
    begun(out, 3)
    lines = journal_of(out).read_text().splitlines()[1:]
    assert [json.loads(line) for line in lines] == [{"n": 1}, {"n": 3}]


def test_pieces_of_other_work_are_not_taken(tmp_path: Path) -> None:
    out = tmp_path / "a.json"
    begun(out, 1)
    other = {"settings": {"seed": 2}}
    with pytest.raises(ConfigError, match="was begun by another command"), journal(out, other, afresh=False):
        pass
    with journal(out, other, afresh=True) as kept:
        assert kept.entries == ()


def test_two_processes_do_not_write_one_file(tmp_path: Path) -> None:
    out = tmp_path / "a.json"
    second = journal(out, WORK, afresh=True)
    with journal(out, WORK, afresh=False), pytest.raises(ConfigError, match="another process is writing it"):
        second.__enter__()


def test_a_place_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file" / "a.json", Path("/proc/none/a.json")):
        with pytest.raises(ConfigError, match="cannot be written"), journal(out, WORK, afresh=False):
            pass
    os.mkfifo(journal_of(tmp_path / "a.json"))
    with pytest.raises(ConfigError), journal(tmp_path / "a.json", WORK, afresh=False):
        pass
