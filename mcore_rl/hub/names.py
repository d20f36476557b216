"""The grammar of Hub ids: ``owner/name``, ``owner/name@revision``, and for data ``owner/name@revision:folder/or/file``.

A path of that name that is there is a path and no id.  Asks nobody.

Invariant: ``named`` of a file in the Hub's cache is an id that means this file, of the same commit, on any machine.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MODEL, DATASET = "model", "dataset"  # kinds of repositories, as huggingface_hub calls them
NO_NAME = "is no name of a repository"
A_NAME = "Write OWNER/NAME, of letters, digits, -, _ and ."
TABLES = (".parquet", ".jsonl", ".jsonl.gz")  # what rows are read from
# Folders that recipes and people keep things in.  One that is missing is a mistake to be told of: asked for as an
# owner, it would be whatever somebody else has put there.
FOLDERS = ("checkpoints", "data", "datasets", "exports", "models", "outputs", "results", "runs", "tmp")
MAX_NAME = 96  # characters, as huggingface_hub's validate_repo_id
PART = r"[A-Za-z0-9_](?:[\w.-]*[A-Za-z0-9_])?"
ID = re.compile(rf"({PART}/{PART})(?:@([A-Za-z0-9_][\w./-]*))?(?::([^:@]+))?", re.ASCII)
CACHED = re.compile(
    r"(?:^|/)(models|datasets)--((?:(?!--)[^/])+)--((?:(?!--)[^/])+)/snapshots/([0-9a-f]{40})(?:/(.*))?$"
)


@dataclass(frozen=True)
class HubName:
    """A repository of the Hub.

    kind: MODEL or DATASET.  name: ``owner/name``.  revision: a branch, tag or commit; None is the main branch.
    path: of data, a folder or file in it; "" is all of it.
    """

    kind: str
    name: str
    revision: str | None = None
    path: str = ""

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return f"{self.name}{revision}{f':{self.path}' if self.path else ''}"


def hub_name(text: str, kind: str) -> HubName | None:
    """The repository of ``kind`` that ``text`` names; None where it is a path."""
    matched = ID.fullmatch(text)
    if not matched or os.path.lexists(text):
        return None
    name = matched[1]
    revision = matched[2]
    path = matched[3] or ""
    if name.partition("/")[0].lower() in FOLDERS:
        return None
    if ".." in name or "--" in name or len(name) > MAX_NAME or ".." in (revision or "") or not is_inside(path):
        return None
    if kind == MODEL and path:
        return None
    if kind == DATASET and not (revision or path) and text.endswith((*TABLES, ".json", ".arrow")):
        return None  # a file that is not there
    return HubName(kind, name, revision, path)


def is_repository(name: str) -> bool:
    """Tells if ``name`` is ``owner/name`` of a repository to write to, without revision or path."""
    if "/" not in name or "@" in name:
        return False
    repository = hub_name(f"{name}@main", MODEL)  # with a revision, which no folder of that name has
    return repository is not None and repository.name == name


def is_inside(path: str) -> bool:
    """Tells if ``path``, of a repository, stays in the folder that it is written to."""
    plain = path.isprintable() and "\\" not in path and not path.startswith("/")
    return plain and not {"..", "."} & set(path.split("/")) and "//" not in path


def named(path: str) -> str:
    """The id, with its commit, of a file or folder in the Hub's cache; any other path as it is."""
    matched = CACHED.search(path)
    if not matched:
        return path
    kind, owner, name, commit, inner = matched.groups()
    return str(HubName(MODEL if kind == "models" else DATASET, f"{owner}/{name}", commit, inner or ""))


def with_names(values: Any) -> Any:
    """``values``, of plain types, with ``named`` of every text."""
    if isinstance(values, Mapping):
        return {key: with_names(each) for key, each in values.items()}
    if isinstance(values, list):
        return [with_names(each) for each in values]
    return named(values) if isinstance(values, str) else values
