"""The manifest of a directory: which files it must hold, how long each is, and the checksum of its bytes.

The manifest is written last and has a checksum of its own, so a directory with a manifest was once complete, and every
later damage can be named: a file that is missing, cut off, or has another byte.

The checksum is XXH3 (64 bits; https://xxhash.com): it detects damage, not forgery.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import xxhash

from mcore_rl.checkpoints.new_directory import wait_for_disk
from mcore_rl.parallel.device import num_cores

MANIFEST = "manifest.json"
FORMAT = 2
BLOCK_BYTES = 4 << 20  # per read or write: small enough to be in the cache still when it is summed


@dataclass(frozen=True)
class FileSum:
    """A file's length and checksum (``xxh3:0123456789abcdef``)."""

    num_bytes: int
    checksum: str


def sum_text(hashed: xxhash.xxh3_64) -> str:
    """A checksum as the manifest spells it."""
    return f"xxh3:{hashed.hexdigest()}"


def sum_of(path: Path) -> FileSum:
    """Read ``path`` to its end.  OSError: it cannot be."""
    hashed = xxhash.xxh3_64()
    memory = memoryview(bytearray(BLOCK_BYTES))
    size = 0
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(memory):
            hashed.update(memory[:count])
            size += count
    return FileSum(size, sum_text(hashed))


def write_manifest(directory: Path, known: Mapping[str, FileSum]) -> None:
    """Sum the files in ``directory`` that are not ``known``, write ``manifest.json``, and wait for the disk.

    known: path below ``directory`` -> sum, of files that their writer has summed and flushed.
    OSError: the disk is full, or fails.
    """
    files = dict(known)
    for path in _files(directory):
        if (name := str(path.relative_to(directory))) not in files:
            wait_for_disk(path)
            files[name] = sum_of(path)
    listed = {name: [each.num_bytes, each.checksum] for name, each in sorted(files.items())}
    content = {"format": FORMAT, "files": listed}
    with (directory / MANIFEST).open("w", encoding="utf-8") as file:
        json.dump(content | {"checksum": _own_sum(content)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    for path in (*(path for path in directory.rglob("*") if path.is_dir()), directory):
        wait_for_disk(path)


def damage(directory: Path, *, only: str = "") -> list[str]:
    """Every difference between ``directory`` and its manifest; empty if it is sound.

    Reads every byte, with as many threads as there are cores.  only: check this subdirectory alone.
    """
    try:
        files = read_manifest(directory)
    except OSError:
        return [f"{MANIFEST} is missing: it was never finished, or another version wrote it"]
    except (ValueError, RecursionError) as error:
        return [f"{MANIFEST} is damaged: {error}"]
    files = {name: each for name, each in files.items() if name.startswith(f"{only}/" if only else "")}
    present = {str(path.relative_to(directory)) for path in _files(directory / only)} - {MANIFEST}
    problems = [f"{name} is in no manifest" for name in sorted(present - files.keys())]
    intact = []
    for name, expected in files.items():
        if name not in present:
            problems.append(f"{name} is missing")
        elif (difference := (directory / name).stat().st_size - expected.num_bytes) != 0:
            problems.append(f"{name} is {abs(difference):,} bytes {'too long' if difference > 0 else 'short'}")
        else:
            intact.append(name)
    with ThreadPoolExecutor(num_cores()) as pool:
        problems += [problem for problem in pool.map(lambda name: _differs(directory, name, files), intact) if problem]
    return problems


def read_manifest(directory: Path) -> dict[str, FileSum]:
    """Path below ``directory`` -> the file's length and checksum.

    OSError: there is no manifest.  ValueError: it has another format, or is damaged.
    """
    content = json.loads((directory / MANIFEST).read_bytes())
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"it is not of format {FORMAT}")
    if content.pop("checksum", None) != _own_sum(content):
        raise ValueError("its checksum is not that of what it says")
    return {name: FileSum(*entry) for name, entry in content["files"].items()}


def _own_sum(content: Mapping[str, object]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return sum_text(xxhash.xxh3_64(text.encode()))


def _files(directory: Path) -> Iterable[Path]:
    return (path for path in directory.rglob("*") if path.is_file())


def _differs(directory: Path, name: str, files: Mapping[str, FileSum]) -> str | None:
    try:
        actual = sum_of(directory / name)
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"
    if actual == files[name]:
        return None
    return f"{name} has other bytes than were written: expected {files[name].checksum}, found {actual.checksum}"
