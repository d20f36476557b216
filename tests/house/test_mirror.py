"""The tests mirror the package: what proves a module is found without searching."""

from __future__ import annotations

from tests.house.source import python_files, refuse

# Tests of more than one module, and what tests are made of.
ACROSS = ("accelerators", "house", "invariance", "parity", "e2e", "crash", "gpu", "launch", "support")


def unmirrored(path: str, _: str) -> list[str]:
    """``tests/a/test_b.py`` proves ``mcore_rl/a/b.py``, as does ``tests/a/test_b_aspect.py``."""
    folders, _, name = path.removeprefix("tests/").rpartition("/")
    if folders.partition("/")[0] in ACROSS or not name.startswith("test_"):
        return []
    stem = name.removeprefix("test_").removesuffix(".py")
    prefix = f"mcore_rl/{folders}/" if folders else "mcore_rl/"
    modules = [module.removeprefix(prefix).removesuffix(".py") for module in python_files(prefix.rstrip("/"))]
    if any(stem == module or stem.startswith(f"{module}_") for module in modules):
        return []
    return [f"{path}:1: there is no {prefix}{stem}.py. Name the test after its module, or put it into one of {ACROSS}"]


def test_every_test_has_its_module() -> None:
    refuse(unmirrored, python_files("tests"))


def test_the_rule_refuses_a_test_of_nothing() -> None:
    assert unmirrored("tests/parallel/test_nothing.py", "")
    assert unmirrored("tests/training/test_layout.py", "")  # right name, wrong place
    assert unmirrored("tests/test_nothing.py", "")


def test_the_rule_allows_modules_and_their_aspects() -> None:
    assert not unmirrored("tests/parallel/test_layout.py", "")
    assert not unmirrored("tests/parallel/test_layout_placement.py", "")
    assert not unmirrored("tests/test_types.py", "")
    assert not unmirrored("tests/invariance/test_everything.py", "")
