"""Records of a published data set, from files as their authors wrote them: a folder, one file, or a Hub id.

Reads jsonl, json (a list, or one record a file) and parquet.  The split of a file follows from its name or its
folders': ``train.jsonl``, ``main/test-00000-of-00001.parquet``, ``train/algebra/7.json``.

Only a Hub id needs the network: ``owner/name``, if there is no such path.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mcore_rl.data.tables import BATCH
from mcore_rl.ground.errors import DataError
from mcore_rl.ground.json_text import read_json
from mcore_rl.hub.selection import MAX_ENTRIES

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
SUFFIXES = (".jsonl", ".json", ".parquet")


@dataclass(frozen=True)
class Record:
    """One record of a file.  place: file and line or row, for messages.  fields: as in the file."""

    place: str
    fields: dict[str, Any]


def read_splits(source: str, splits: Sequence[str], folder: str = "") -> dict[str, list[Record]]:
    """The records of each of ``splits``; a single file is of the split in its name, else of the first.

    source: a folder, a file, or a Hub id.  folder: a subfolder of ``source`` to read if it exists; Hub data sets have
    one per configuration.

    Raises DataError with every violation: no such source, no file of a split, a file that cannot be read.
    """
    root = Path(source).expanduser()
    if not root.exists():
        if source.startswith((".", "/", "~")) or not HUB_ID.fullmatch(source):
            remedy = "Give a folder, a file (jsonl, json or parquet) or a Hugging Face id as owner/name"
            raise DataError(source, [f"there is no such file or folder. {remedy}"])
        root = _download(source, folder)
    if folder and (root / folder).is_dir():
        root = root / folder
    problems: list[str] = []
    try:
        files = {split: list(_files_of(root, split, splits)) for split in splits}
    except OSError as error:
        raise DataError(source, [f"cannot be read: {error}. Give the folder of the data set"]) from error
    if root.is_file():
        files = {split: paths for split, paths in files.items() if paths}
    for split in [split for split, paths in files.items() if not paths]:
        problems.append(f"no file of split {split}. Put {split}.jsonl, {split}.json or {split}.parquet there")
    records = {
        split: [record for path in paths for record in _records(path, problems)] for split, paths in files.items()
    }
    if problems:
        raise DataError(source, problems)
    return records


def _files_of(root: Path, split: str, splits: Sequence[str]) -> Iterator[Path]:
    """The files of ``split``, sorted by name, with numbers as numbers: 2.json before 10.json."""
    if root.is_file():
        named = [each for each in splits if root.name.lower().startswith(each)]
        if split == (named or splits)[0]:
            yield root
        return
    entries = list(islice(root.rglob("*"), MAX_ENTRIES + 1))
    if len(entries) > MAX_ENTRIES:
        problem = f"it holds more than {MAX_ENTRIES:,} files and folders, and so is no data set"
        raise DataError(str(root), [f"{problem}. Give the folder of the data set"])
    paths = [path for path in entries if path.suffix in SUFFIXES and path.is_file()]
    for path in sorted(paths, key=lambda path: [(len(part), part) for part in re.split(r"(\d+)", str(path))]):
        parts = path.relative_to(root).parts
        hidden = any(part.startswith(".") for part in parts)
        if not hidden and (len(splits) == 1 or any(part.lower().startswith(split) for part in parts)):
            yield path


def _records(path: Path, problems: list[str]) -> Iterator[Record]:
    try:
        if path.suffix == ".parquet":
            with pq.ParquetFile(path) as file:  # in batches: a column of text in one piece holds 2 GiB at most
                read = (fields for batch in file.iter_batches(BATCH) for fields in batch.to_pylist())
                yield from (Record(f"{path.name}:{row}", fields) for row, fields in enumerate(read))
        elif path.suffix == ".json":
            held = read_json(path.read_text(encoding="utf-8"))
            rows = held if isinstance(held, list) else [held]
            for row, fields in enumerate(rows):
                yield from _object(f"{path.name}:{row}", fields, problems)
        else:
            yield from _lines(path, problems)
    except (OSError, ValueError, pa.ArrowException) as error:  # broken JSON, no UTF-8
        problems.append(f"{path.name}: cannot be read: {error}. Download it again")


def _lines(path: Path, problems: list[str]) -> Iterator[Record]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                fields = read_json(line)
            except ValueError as error:
                problems.append(f"{path.name} line {number}: is no JSON: {error}. Download the file again")
                continue
            yield from _object(f"{path.name} line {number}", fields, problems)


def _object(place: str, fields: object, problems: list[str]) -> Iterator[Record]:
    if isinstance(fields, dict):
        yield Record(place, fields)
    else:
        problems.append(f"{place}: is {type(fields).__name__}, not an object with fields. Download the file again")


def _download(hub_id: str, folder: str) -> Path:
    """The folder of a Hub data set's files; downloads only files that are not in the cache."""
    from huggingface_hub import snapshot_download  # seconds, and only where the network is asked for

    patterns = [f"{folder}/*{suffix}" if folder else f"*{suffix}" for suffix in SUFFIXES]
    try:
        return Path(snapshot_download(hub_id, repo_type="dataset", allow_patterns=patterns))
    except Exception as error:  # networks, proxies and the Hub can do anything
        message = str(error).partition("\n")[0]
        remedy = "Check the id; or download its files where there is a network, and give their folder"
        raise DataError(hub_id, [f"cannot be fetched: {type(error).__name__}: {message}. {remedy}"]) from error
