"""One name, one thing: no two public classes or type aliases of the package share a name.

So a reader who searches for a name finds one definition, and an import says by itself which thing is meant.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping

import pytest

from tests.house.source import ROOT, python_files

# Names that still stand for several things.  The list only shrinks: a name that is unique again must leave it.
STILL_SHARED = {"Answer"}


def public_types(text: str) -> Iterator[tuple[int, str]]:
    """(line, name) of each public class and type alias that the module ``text`` defines."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef):
            name = node.name
        elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
        else:
            continue
        if name[0].isupper() and not name.isupper():  # CapWords; CAPITALS are constants and type variables
            yield node.lineno, name


def shared_names(files: Mapping[str, str]) -> dict[str, list[str]]:
    """Name -> ``path:line`` of each definition, for every name that is defined more than once."""
    definitions = defaultdict(list)
    for path, text in files.items():
        for line, name in public_types(text):
            definitions[name].append(f"{path}:{line}")
    return {name: places for name, places in definitions.items() if len(places) > 1}


def test_no_two_public_types_share_a_name() -> None:
    paths = python_files("mcore_rl")
    shared = shared_names({path: (ROOT / path).read_text(encoding="utf-8") for path in paths})
    new = [f"{name} is defined in {' and '.join(shared[name])}" for name in sorted(shared.keys() - STILL_SHARED)]
    old = [f"{name} is unique: remove it from STILL_SHARED" for name in sorted(STILL_SHARED - shared.keys())]
    if new or old:
        pytest.fail("\n".join([*(f"{line}. Call each by what it is" for line in new), *old]), pytrace=False)


def test_the_rule_sees_classes_and_aliases() -> None:
    files = {"a.py": "class Part:\n    pass\nRow = dict[str, int]\n", "b.py": "import x\nPart = tuple[int, ...]\n"}
    assert shared_names(files) == {"Part": ["a.py:1", "b.py:2"]}
    assert shared_names({"a.py": "Row: TypeAlias = int\n", "b.py": "class Row: pass\n"}).keys() == {"Row"}


def test_the_rule_allows_private_names_constants_and_what_is_inside() -> None:
    text = "_Part = int\nLIMIT = 1\nT = TypeVar('T')\nfrom a import Part\nclass {}:\n    class Inner: ...\n"
    assert shared_names({name: text.format(name) for name in ("One", "Two")}) == {}
