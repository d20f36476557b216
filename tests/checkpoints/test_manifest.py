"""Whatever becomes of a directory after its manifest was written is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash

from mcore_rl.checkpoints.manifest import BLOCK_BYTES, MANIFEST, FileSum, damage, read_manifest, sum_of, write_manifest


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "actor" / "hf").mkdir(parents=True)
    (tmp_path / "actor" / "rank_00000").write_bytes(bytes(range(256)) * 40)
    (tmp_path / "actor" / "rank_00001").write_bytes(b"x" * 4096)
    (tmp_path / "actor" / "hf" / "config.json").write_text("{}")
    (tmp_path / "state.json").write_text("{}")
    write_manifest(tmp_path, {})
    return tmp_path


def _edit(path: Path, change: Callable[[bytearray], object]) -> None:
    content = bytearray(path.read_bytes())
    change(content)
    path.write_bytes(content)


def test_what_was_written_is_sound(directory: Path) -> None:
    assert damage(directory) == []
    assert damage(directory, only="actor") == []
    assert sorted(read_manifest(directory)) == [
        "actor/hf/config.json",
        "actor/rank_00000",
        "actor/rank_00001",
        "state.json",
    ]


@pytest.mark.parametrize("size", [0, 1, BLOCK_BYTES, 2 * BLOCK_BYTES + 17])
def test_sums_are_xxh3_of_all_bytes(tmp_path: Path, size: int) -> None:
    content = bytes(index % 251 for index in range(1000)) * (size // 1000 + 1)
    (tmp_path / "file").write_bytes(content[:size])
    assert sum_of(tmp_path / "file") == FileSum(size, f"xxh3:{xxhash.xxh3_64_hexdigest(content[:size])}")


def test_everything_wrong_is_named_at_once(directory: Path) -> None:
    _edit(directory / "actor" / "rank_00000", lambda content: content.__setitem__(777, content[777] ^ 1))
    _edit(directory / "actor" / "rank_00001", lambda content: content.__delitem__(slice(3072, None)))
    (directory / "state.json").unlink()
    (directory / "extra").touch()
    _edit(directory / "actor" / "hf" / "config.json", lambda content: content.extend(b"  "))
    problems = damage(directory)
    assert len(problems) == 5
    said = "\n".join(problems)
    assert "actor/rank_00000 has other bytes than were written: expected xxh3:" in said
    assert "actor/rank_00001 is 1,024 bytes short" in said
    assert "actor/hf/config.json is 2 bytes too long" in said
    assert "state.json is missing" in said
    assert "extra is in no manifest" in said
    assert len(damage(directory, only="actor")) == 3


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (
            lambda content: content.__setitem__(content.index(b"4096"), ord("5")),
            "its checksum is not that of what it says",
        ),
        (lambda content: content.__delitem__(slice(9, None)), "manifest.json is damaged: "),
        (lambda content: content.clear(), "manifest.json is damaged: "),
        (lambda content: content.__setitem__(slice(0, None), b"[]"), "it is not of format 2"),
    ],
)
def test_the_manifest_itself_is_protected(directory: Path, edit: Callable[[bytearray], object], said: str) -> None:
    _edit(directory / MANIFEST, edit)
    (problem,) = damage(directory)
    assert said in problem


def test_without_a_manifest_it_was_never_finished(directory: Path) -> None:
    (directory / MANIFEST).unlink()
    assert damage(directory) == ["manifest.json is missing: it was never finished, or another version wrote it"]


def test_sums_that_are_known_are_taken(directory: Path) -> None:
    """Of files that were summed while they were written: they are not read again."""
    (directory / MANIFEST).unlink()
    known = FileSum(10, "xxh3:0")
    write_manifest(directory, {"actor/rank_00000": known})
    assert read_manifest(directory)["actor/rank_00000"] == known
    assert json.loads((directory / MANIFEST).read_text())["format"] == 2
    assert len(damage(directory)) == 1
