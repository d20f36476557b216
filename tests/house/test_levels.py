"""Who may import whom, where import-linter (pyproject.toml) cannot say it: third parties, also those not used yet.

README.md and CONTRIBUTING.md show the levels: their picture and table are compared with those made from pyproject.toml.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.house.source import ROOT, python_files, refuse

# Third party -> the packages and modules of mcore_rl that may import it.
ALLOWED = {
    "megatron": ("training", "parallel", "rehearsal"),
    "transformer_engine": ("training",),
    "vllm": ("rollout/vllm",),
    "ray": ("runtime", "controller"),
    "hydra": ("config", "cli", "from_verl"),
    "omegaconf": ("config", "cli", "from_verl"),
}
OTHER_FOLDERS = ("tests", "tools", "benchmarks", "launch")


def imported_modules(text: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import, wherever it stands."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.lineno, node.module


def misplaced_import(path: str, text: str) -> list[str]:
    inside = path.removeprefix("mcore_rl/").removesuffix(".py")
    misplaced = []
    for line, module in imported_modules(text):
        third_party = module.partition(".")[0]
        places = ALLOWED.get(third_party)
        if places is not None and not any(inside == place or inside.startswith(f"{place}/") for place in places):
            misplaced.append(f"{path}:{line}: imports {module}; {third_party} is for {' and '.join(places)} only")
        if third_party in OTHER_FOLDERS:
            misplaced.append(f"{path}:{line}: the package imports {module}, which is not installed with it")
    return misplaced


def test_third_parties_are_imported_where_they_belong() -> None:
    refuse(misplaced_import, python_files("mcore_rl"))


def test_the_rule_refuses_misplaced_imports_at_any_depth() -> None:
    bad = """import hydra.core
def f():
    from megatron.core import mpu
    import ray as r
from tests.support import x
"""
    misplaced = misplaced_import("mcore_rl/data/packing.py", bad)
    assert [complaint.split(":")[1] for complaint in sorted(misplaced)] == ["1", "3", "4", "5"]


def test_the_rule_allows_each_third_party_its_places() -> None:
    assert (
        misplaced_import("mcore_rl/training/model.py", "from megatron.core import mpu\nimport torch, raytracer") == []
    )


def contract(kind: str) -> dict[str, Any]:
    """The first import-linter contract of type ``kind`` in pyproject.toml; of ``layers``, that of all packages."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    return dict(next(each for each in contracts if each["type"] == kind))


def packages_by_level() -> list[list[str]]:
    """The packages of each level in pyproject.toml, the highest level first."""
    return [[name.strip("() ") for name in re.split("[|:]", row)] for row in contract("layers")["layers"]]


def levels_picture(levels: list[list[str]]) -> str:
    """The lines of README.md's flowchart: the levels in a row; one of several packages is a box with their names."""
    boxes = {number: packages for number, packages in enumerate(reversed(levels)) if len(packages) > 1}
    numbers = range(len(levels) - 1, -1, -1)
    chain = [f"L{number}" if number in boxes else packages[0] for number, packages in zip(numbers, levels, strict=True)]
    lines = [f'L{number}["{"<br/>".join(packages)}"]' for number, packages in sorted(boxes.items(), reverse=True)]
    return "\n".join(f"    {line}" for line in [" --> ".join(chain), *lines])


def levels_table(levels: list[list[str]]) -> str:
    """The rows of CONTRIBUTING.md's table: level, packages, and the third parties of ``ALLOWED`` that they import."""
    rows = []
    parties = dict[str, list[str]]()
    for name, places in ALLOWED.items():
        for place in places:
            parties.setdefault(place, []).append(name)
    for number, packages in zip(range(len(levels) - 1, -1, -1), levels, strict=True):
        inside = [place for package in packages for place in parties if place.partition("/")[0] == package]
        cells = [f"`{place}`: {', '.join(parties[place])}" for place in inside]
        named = ", ".join(f"`{package}`" for package in packages)
        rows.append(f"| {number} | {named} | {'; '.join(cells)} |".replace("|  |", "| |"))
    return "\n".join(rows)


def test_every_package_has_a_level() -> None:
    """import-linter only knows packages with an ``__init__.py``; one without would stand outside the house."""
    named = {name for packages in packages_by_level() for name in packages}
    paths = [path.split("/") for path in python_files("mcore_rl")]
    named |= set(contract("layers")["exhaustive_ignores"])
    assert {parts[1].removesuffix(".py") for parts in paths} - {"__init__"} <= named
    assert all((ROOT / "/".join(parts[:-1]) / "__init__.py").is_file() for parts in paths)


@pytest.mark.parametrize(("page", "made"), [("README.md", levels_picture), ("CONTRIBUTING.md", levels_table)])
def test_the_pages_show_the_levels_of_pyproject(page: str, made: Callable[[list[list[str]]], str]) -> None:
    expected = made(packages_by_level())
    if f"\n{expected}\n" not in (ROOT / page).read_text(encoding="utf-8"):
        pytest.fail(f"{page} shows other levels than pyproject.toml. Write there:\n{expected}", pytrace=False)


def test_the_pages_name_the_modules_that_load_without_torch() -> None:
    names = [module.removeprefix("mcore_rl.") for module in contract("forbidden")["source_modules"]]
    *most, last = (f"`{name}`" for name in names)
    sentence = f"{', '.join(most)} and {last} load without torch."
    assert sentence in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_a_picture_and_a_table_of_levels() -> None:
    levels = [["controller"], ["training", "rollout"], ["errors"]]
    assert levels_picture(levels) == '    controller --> L1 --> errors\n    L1["training<br/>rollout"]'
    assert levels_table(levels) == (
        "| 2 | `controller` | `controller`: ray |\n"
        "| 1 | `training`, `rollout` | `training`: megatron, transformer_engine; `rollout/vllm`: vllm |\n"
        "| 0 | `errors` | |"
    )
