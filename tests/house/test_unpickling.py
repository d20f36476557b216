"""Unpickling runs what a pickle says, so it happens only where docs/security.md says whose pickles these are."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

import pytest

from tests.house.source import ROOT, complaints, python_files, refuse

PICKLERS = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "joblib", "shelve", "jsonpickle", "ForkingPickler"}
LOADS = {"load", "loads", "open", "Unpickler"}
COLLECTIVES = {"all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "recv_object_list"}
WORDS = ("allow_pickle", "recv", "torch", *PICKLERS, *COLLECTIVES)  # a text without any unpickles nothing
TABLE = re.compile(r"^\| `([\w/.]+\.py)` \|", re.MULTILINE)
REMEDY = "Send typed messages (msgspec), or say in docs/security.md who alone can write this pickle"


def unpickling(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, what) of everything in ``tree`` that unpickles, or lets torch or multiprocessing do so."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if owner in PICKLERS and node.attr in LOADS:
                yield node.lineno, f"{owner}.{node.attr}"
            if owner == "torch" and node.attr == "load":
                yield node.lineno, "torch.load"
            if node.attr in COLLECTIVES:
                yield node.lineno, node.attr
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr == "recv" and not node.args and not node.keywords:
                yield node.lineno, "Connection.recv"  # unpickles; a socket's takes a number of bytes
            if any(each.arg == "allow_pickle" for each in node.keywords):
                yield node.lineno, "allow_pickle"
        if isinstance(node, ast.ImportFrom) and node.module in PICKLERS:
            for name in {alias.name for alias in node.names} & LOADS:
                yield node.lineno, f"{node.module}.{name}"


@cache
def listed() -> set[str]:
    return set(TABLE.findall((ROOT / "docs" / "security.md").read_text()))


def unlisted_pickle(path: str, text: str) -> list[str]:
    if path in listed() or not any(word in text for word in WORDS):
        return []
    return [f"{path}:{line}: {what} runs what it is sent. {REMEDY}" for line, what in unpickling(ast.parse(text))]


def test_only_the_listed_files_unpickle() -> None:
    refuse(unlisted_pickle, python_files("mcore_rl", "tools", "launch"))


def test_the_list_has_no_file_that_does_not() -> None:
    for path in listed():
        assert list(unpickling(ast.parse((ROOT / path).read_text()))), f"{path} unpickles nothing: take it off the list"


@pytest.mark.parametrize(
    "bad",
    [
        "import pickle\npickle.loads(message)",
        "import pickle\nclass Own(pickle.Unpickler): ...",
        "from pickle import loads",
        "import torch\ntorch.load(path)",
        "import cloudpickle as c, cloudpickle\ncloudpickle.loads(x)",
        "connection.recv()",
        "dist.all_gather_object(a, b)",
        "torch.distributed.broadcast_object_list(a)",
        "numpy.load(path, allow_pickle=True)",
    ],
)
def test_each_way_is_refused_elsewhere(bad: str) -> None:
    assert unlisted_pickle("mcore_rl/new.py", bad)


def test_what_reads_bytes_is_no_such_way() -> None:
    good = "import pickle, json\npickle.dumps(x)\nsocket.recv(10)\nconnection.recv_bytes()\njson.loads(x)"
    assert unlisted_pickle("mcore_rl/new.py", good) == []
    assert complaints(unlisted_pickle, ["mcore_rl/sync/members.py"]) == []
