"""What stands outside the package imports what the package has: mypy judges the package alone, and few of these run."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from tests.house.source import ROOT, python_files, refuse

OUTSIDE = ("benchmarks", "tools", "launch", "tests")
OURS = ("mcore_rl", "tests", "benchmarks", "tools")


@cache
def names_of(module: str) -> frozenset[str] | None:
    """The names that a module or folder gives to who imports from it; None: there is neither."""
    place = ROOT / Path(*module.split("."))
    folder = [path.stem for path in place.glob("*")] if place.is_dir() else []
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    if not file.exists():
        return frozenset(folder) if folder else None
    names = set(folder)
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.add(node.name)
            case ast.Name(ctx=ast.Store()):
                names.add(node.id)
            case ast.alias():
                names.add(node.asname or node.name)
            case ast.Constant(value=str()):  # a face that imports lazily names what it has in a table
                names.add(node.value)
    return frozenset(names)


def missing_names(path: str, text: str) -> list[str]:
    """Complaints about names that are imported from our modules, and are not there."""
    complained = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.ImportFrom) or (node.module or "").partition(".")[0] not in OURS:
            continue
        names = names_of(node.module or "")
        if names is None:
            complained.append(f"{path}:{node.lineno}: there is no {node.module}; import from where it went")
        else:
            gone = [alias.name for alias in node.names if alias.name not in names]
            complained += [f"{path}:{node.lineno}: {node.module} has no {name}; import what it has" for name in gone]
    return complained


def test_what_is_imported_is_there() -> None:
    refuse(missing_names, python_files(*OUTSIDE))


@pytest.mark.parametrize(
    ("line", "complains"),
    [
        ("from mcore_rl.checkpoints.safetensors import tensor_bytes", False),
        ("from mcore_rl.checkpoints import safetensors", False),
        ("from mcore_rl.checkpoints.safetensors import no_such_name", True),
        ("from mcore_rl.no_such_module import anything", True),
        ("from mcore_rl.checkpoints import no_such_module", True),
        ("def lazily():\n    from mcore_rl.checkpoints.safetensors import no_such_name", True),
    ],
)
def test_a_name_that_is_gone_is_seen(line: str, *, complains: bool) -> None:
    assert bool(missing_names("x.py", line)) is complains
