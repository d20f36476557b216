"""Who may import whom, where import-linter (pyproject.toml) cannot say it: third parties, also those not used yet."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator

from tests.house.source import ROOT, python_files, refuse

# Third party -> the packages and modules of mcore_rl that may import it.
ALLOWED = {
    "megatron": ("training", "parallel"),
    "transformer_engine": ("training",),
    "vllm": ("rollout",),
    "ray": ("runtime", "controller"),
    "hydra": ("config", "cli"),
    "omegaconf": ("config", "cli"),
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
    found = []
    for line, module in imported_modules(text):
        third_party = module.partition(".")[0]
        places = ALLOWED.get(third_party)
        if places is not None and not any(inside == place or inside.startswith(f"{place}/") for place in places):
            found.append(f"{path}:{line}: imports {module}; {third_party} is for {' and '.join(places)} only")
        if third_party in OTHER_FOLDERS:
            found.append(f"{path}:{line}: the package imports {module}, which is not installed with it")
    return found


def test_third_parties_are_imported_where_they_belong() -> None:
    refuse(misplaced_import, python_files("mcore_rl"))


def test_the_rule_refuses_misplaced_imports_at_any_depth() -> None:
    bad = """import hydra.core
def f():
    from megatron.core import mpu
    import ray as r
from tests.support import x
"""
    found = misplaced_import("mcore_rl/data/packing.py", bad)
    assert [complaint.split(":")[1] for complaint in sorted(found)] == ["1", "3", "4", "5"]


def test_the_rule_allows_each_third_party_its_places() -> None:
    assert (
        misplaced_import("mcore_rl/training/model.py", "from megatron.core import mpu\nimport torch, raytracer") == []
    )


def test_every_package_has_a_level() -> None:
    """import-linter only knows packages with an ``__init__.py``; one without would stand outside the house."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    levels = next(contract for contract in contracts if contract["type"] == "layers")
    named = {name.strip("() ") for row in levels["layers"] for name in row.replace(":", "|").split("|")}
    paths = [path.split("/") for path in python_files("mcore_rl")]
    named |= set(levels["exhaustive_ignores"])
    assert {parts[1].removesuffix(".py") for parts in paths} - {"__init__"} <= named
    assert all((ROOT / "/".join(parts[:-1]) / "__init__.py").is_file() for parts in paths)
