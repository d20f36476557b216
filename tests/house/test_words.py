"""Plain words, as far as a test can check them: a result is named after what it is, and a docstring says something."""

from __future__ import annotations

import ast
import re

import pytest

from tests.house.source import python_files, refuse

FEWEST_WORDS = 3


def local_called_found(path: str, text: str) -> list[str]:
    """Local variables called ``found``, which says of no result what it is."""
    if "found" not in text:
        return []  # without parsing it
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    lines = {
        node.lineno
        for function in functions
        for node in ast.walk(function)
        if (isinstance(node, ast.Name) and node.id == "found" and isinstance(node.ctx, ast.Store))
        or (isinstance(node, ast.arg) and node.arg == "found")
    }
    remedy = "Name the result after what it is: violations, pieces, lines"
    return [f"{path}:{line}: a variable called found. {remedy}" for line in sorted(lines)]


def empty_docstring(path: str, text: str) -> list[str]:
    """Docstrings of fewer than three words; ``Engine.sleep`` counts as two."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = [
        (node.body[0].lineno, ast.get_docstring(node))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, documented)
        if ast.get_docstring(node) is not None
    ]
    remedy = "Say what it is or does, with its unit or error, or leave it out if the name says that"
    return [
        f"{path}:{line}: a docstring of fewer than {FEWEST_WORDS} words. {remedy}"
        for line, docstring in docstrings
        if len(re.findall(r"\w+", str(docstring))) < FEWEST_WORDS
    ]


FOLDERS = ("mcore_rl", "tests", "tools", "benchmarks", "launch")


def test_no_variable_is_called_found() -> None:
    refuse(local_called_found, python_files(*FOLDERS))


def test_no_docstring_is_empty() -> None:
    refuse(empty_docstring, python_files(*FOLDERS))


@pytest.mark.parametrize(
    "bad",
    [
        "def f():\n    found = []\n    return found",
        "async def f():\n    found, rest = g()",
        "class C:\n    def f(self):\n        return [found for found in self]",
        "def f(found): ...",
    ],
)
def test_the_rule_refuses_a_variable_called_found(bad: str) -> None:
    assert len(local_called_found("mcore_rl/x.py", bad)) == 1


def test_the_rule_allows_a_field_and_a_word_called_found() -> None:
    good = "class Finding:\n    found: bool\ndef f(x):\n    return Finding(found=x.found), 'found'"
    assert local_called_found("mcore_rl/x.py", good) == []


@pytest.mark.parametrize("docstring", ["It is.", "Nothing.", "See ``there``.", ""])
def test_the_rule_refuses_an_empty_docstring(docstring: str) -> None:
    assert len(empty_docstring("mcore_rl/x.py", f"def f():\n    '''{docstring}'''")) == 1


@pytest.mark.parametrize("text", ["def f():\n    '''See ``Engine.sleep``.'''", "def f(): ...", "'''All of it.'''"])
def test_the_rule_allows_a_docstring_of_three_words_and_none(text: str) -> None:
    assert empty_docstring("mcore_rl/x.py", text) == []
