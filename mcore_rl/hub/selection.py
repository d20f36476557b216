"""Which files are meant: of a model's repository by what they are for, of a data set by its split.

Works on names, of a listing of the Hub or of a folder; opens ``state.json`` of a folder alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path, PurePosixPath

from mcore_rl.ground.json_text import read_json
from mcore_rl.hub.names import TABLES, is_inside

MAX_ENTRIES = 100_000  # files and folders in a folder of data
CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# Beside the weights: as ``checkpoints/hf_sidecar_files.py``, but for code, which is not taken from the Hub.
SMALL = ("*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken", "*.bpe")
TEMPLATES = "additional_chat_templates/*.jinja"
# By the key's meaning: words that the name of a file or folder begins with, the best first.
SPLITS = {"train": ("train",), "val": ("validation", "valid", "val", "dev", "eval", "test"), "": ()}
EVERY_SPLIT = (*SPLITS["train"], *SPLITS["val"])
ARROW, STATE = ".arrow", "state.json"  # as ``datasets`` save_to_disk writes them
MAX_SHOWN = 8


class ModelPart(Enum):
    """How much of a model's repository: its config.json, that and its tokenizer, or its weights too."""

    config = "config.json"
    tokenizer = "configuration and tokenizer"
    weights = "weights, configuration and tokenizer"


class SelectionError(Exception):
    """No files can be told; (what is wrong, what to write instead)."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.remedy = remedy


def small_files(names: Sequence[str]) -> list[str]:
    """The files of a model's repository beside its weights that are needed."""
    return [
        name
        for name in names
        if fnmatchcase(name, TEMPLATES) or ("/" not in name and any(fnmatchcase(name, each) for each in SMALL))
    ]


def weight_files(names: Sequence[str], index: Path) -> list[str]:
    """The safetensors of a model's repository: those of its index, which was downloaded to ``index``, or the one.

    Raises SelectionError if there are none, or the index names others than are there.
    """
    if INDEX in names:
        try:
            shards = sorted(set(read_json(index.read_bytes())["weight_map"].values()))
            absent = [each for each in shards if each not in names or "/" in each]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise SelectionError(f"its {INDEX} cannot be read ({error})", "Name another model or revision") from error
        if absent:
            said = f"its {INDEX} names {_few(map(str, absent))}, which is no file beside it"
            raise SelectionError(said, "Name another model or revision")
        return shards
    if SINGLE in names:
        return [SINGLE]
    pickles = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".gguf"))]
    had = f"only {_few(pickles)}" if pickles else "no weights"
    raise SelectionError(f"has {had}, and neither {SINGLE} nor {INDEX}", "Name a model that has safetensors")


def tables_of(
    names: Sequence[str], split: str, path: str = "", *, prefix: str, endings: Sequence[str] = TABLES
) -> list[str]:
    """The files of a data set that belong to ``split``, one of ``SPLITS``, below ``path`` or at it; sorted.

    Files of which none is named after a split are all meant.  prefix: what is written before a name, in remedies.
    Raises SelectionError if none is there, none belongs to the split, or they lie in several folders, as those of
    several configurations do.
    """
    under = [name for name in names if not path or name == path or name.startswith(f"{path}/")]
    tables = sorted(
        name for name in under if name.endswith(tuple(endings)) and is_inside(name) and "/." not in f"/{name}"
    )
    if not tables:
        there = _few(sorted({PurePosixPath(name).suffix or name for name in under}))
        said = f"has no {', '.join(endings)} files{f' below {path}' if path else ''}"
        remedy = "Name a data set that has, or convert it to parquet or jsonl"
        raise SelectionError(f"{said}, only {there}" if there else said, remedy)
    if path in tables:
        return [path]
    tables = _of_split(tables, split, path, prefix)
    folders = sorted({str(PurePosixPath(name).parent) for name in tables})
    if len(folders) > 1:
        raise SelectionError(f"has files in the folders {_few(folders)}", f"Name one of them, as {prefix}{folders[0]}")
    best = next(ending for ending in endings if any(name.endswith(ending) for name in tables))
    return [name for name in tables if name.endswith(best)]


def _of_split(tables: list[str], split: str, path: str, prefix: str) -> list[str]:
    splits = {name: _split(name.removeprefix(path)) for name in tables}
    there = sorted({each for each in splits.values() if each})
    if not there:
        return tables
    wanted = [each for each in SPLITS[split] if each in there]
    if not split and len(there) == 1:
        wanted = there
    if not wanted:
        remedy = f"Name the file or folder that is meant, as {prefix}{tables[0]}"
        raise SelectionError(f"has the splits {', '.join(there)}, and which is meant does not follow", remedy)
    return [name for name in tables if splits[name] == wanted[0]]


def folder_tables(folder: Path, split: str) -> list[Path]:
    """The files of ``split`` in a local folder: of tables, or one that ``datasets`` save_to_disk wrote.

    Raises SelectionError as ``tables_of``.
    """
    entries = list(islice(folder.rglob("*"), MAX_ENTRIES + 1))
    if len(entries) > MAX_ENTRIES:
        problem = f"holds more than {MAX_ENTRIES:,} files and folders, and so is no data set"
        raise SelectionError(problem, "Write the folder of the data set, or its files")
    names = [path.relative_to(folder).as_posix() for path in entries if path.is_file()]
    saved = {name for name in names if PurePosixPath(name).name == STATE}
    written = [name for each in sorted(saved) for name in _arrow_files(folder / each, folder)]
    if not written:
        return [folder / name for name in tables_of(names, split, prefix=f"{folder}/")]
    if STATE in saved:
        return [folder / name for name in written]
    return [folder / name for name in tables_of(written, split, prefix=f"{folder}/", endings=[ARROW])]


def _arrow_files(state: Path, folder: Path) -> list[str]:
    """The files that a ``state.json`` of ``datasets`` names, relative to ``folder``; none where it is another's."""
    try:
        files = [each["filename"] for each in read_json(state.read_bytes())["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    if odd := [each for each in files if not (isinstance(each, str) and is_inside(each))]:
        raise SelectionError(f"its {STATE} names {_few(map(str, odd))}", "Write the data set again")
    return [(state.parent / each).relative_to(folder).as_posix() for each in files]


def _split(name: str) -> str:
    """The word of ``EVERY_SPLIT`` that the file's name, else the nearest of its folders, begins with; "" if none."""
    for part in reversed(name.lower().split("/")):
        for word in EVERY_SPLIT:
            if part.startswith(word) and not part[len(word) : len(word) + 1].isalpha():
                return word
    return ""


def _few(names: Iterable[str]) -> str:
    shown = list(names)
    return ", ".join(shown[:MAX_SHOWN]) + (f" and {len(shown) - MAX_SHOWN} more" if shown[MAX_SHOWN:] else "")
