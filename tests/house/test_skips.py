"""Every skip says first what is lacking (tests/support/skips.py); what tests hold ours against is pinned."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.house.source import ROOT
from tests.house.test_pins import EXTRAS, locked
from tests.support import skips

WORDS = {name for name in vars(skips) if name.isupper() and name != "REASONS"} | {"not_installed"}
LISTS = ("tests/oracles.txt", "tests/framework.txt")


def first_word(reason: ast.expr | None, known: dict[str, ast.expr]) -> str:
    """The name that a reason begins with; "" where it begins with none.  known: what names of the module stand for."""
    match reason:
        case ast.BinOp(left=left):
            return first_word(left, known)
        case ast.JoinedStr(values=[ast.FormattedValue(value=value), *_]):
            return first_word(value, known)
        case ast.Call(func=ast.Name(id=name)):
            return name
        case ast.Name(id=name):
            return first_word(known[name], known) if name in known else name
    return ""


def wrong_skips(source: str) -> Iterator[int]:
    """The lines of skips whose reason begins with no word of ours."""
    tree = ast.parse(source)
    known = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        said = {keyword.arg: keyword.value for keyword in node.keywords}.get("reason")
        match node.func.attr:
            case "importorskip":
                yield node.lineno  # it takes what cannot be imported for what is not there
            case "skipif" if first_word(said, known) not in WORDS:
                yield node.lineno
            case "skip" if first_word(node.args[0] if node.args else said, known) not in WORDS:
                yield node.lineno


def test_every_reason_begins_with_what_is_lacking() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        if "skip" in (source := path.read_text(encoding="utf-8"))
        for line in wrong_skips(source)
    ]
    assert not wrong, "tests/support/skips.py has the words; a parameter for which there is nothing to test is no case"


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        ("pytest.skip(f'{KERNEL}no mounts')", False),
        ("pytest.skip(not_installed('TRL'))", False),
        ("pytest.mark.skipif(a, reason=KERNEL + '; '.join(b))", False),
        ("WHY = f'{ACCELERATOR}there is one'\npytest.mark.skipif(a, reason=WHY)", False),
        ("pytest.skip('kernel: no mounts')", True),
        ("pytest.skip(reason='it has no engines')", True),
        ("pytest.mark.skipif(a, reason='no Chromium')", True),
        ("WHY = 'no Chromium'\npytest.mark.skipif(a, reason=WHY)", True),
        ("pytest.mark.skip", False),  # a mark without a call skips always, and pytest says so
        ("pytest.importorskip('trl')", True),
    ],
)
def test_a_reason_with_other_words_is_seen(source: str, wrong: bool) -> None:
    assert bool(list(wrong_skips(source))) == wrong


def pinned(path: str) -> dict[str, Version]:
    """The packages of a list and their versions."""
    lines = [line.partition("#")[0].strip() for line in (ROOT / path).read_text(encoding="utf-8").splitlines()]
    pairs = [line.split("==") for line in lines if line]
    return {canonicalize_name(name): Version(version) for name, version in pairs}


def test_oracles_replace_nothing_of_the_environment_and_services_are_those_of_the_extras() -> None:
    oracles = pinned(LISTS[0])
    assert oracles.keys() & locked().keys() == set()
    services: list[Requirement] = [each for name in ("mlflow", "swanlab", "trackio") for each in EXTRAS[name]]
    assert [str(each) for each in services if oracles[canonicalize_name(each.name)] not in each.specifier] == []


def test_the_script_reads_the_lists() -> None:
    script = (ROOT / "tools" / "set_up_oracles.sh").read_text(encoding="utf-8")
    assert all(f"--requirement {path}" in script for path in LISTS)
    assert '--requirement <(grep "^$1=" tests/megatron.txt)' in script
    assert "==" not in script.replace(" == ", ""), "versions stand in the lists alone"
