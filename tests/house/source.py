"""The files that the house's rules are about, and how the rules read them.

A rule is a function from a file's path (relative to the repository, with forward slashes) and its text to a list of
complaints, ``path:line: what is wrong and what to do``; so every rule can be shown a bad snippet under any name.
"""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
Rule = Callable[[str, str], list[str]]


@cache
def repository_files() -> tuple[str, ...]:
    """Every file that is tracked or about to be; outside a git repository, as in an archive of one, every file."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    except (OSError, subprocess.CalledProcessError):
        ignored = [".git", *(ROOT / ".gitignore").read_text().split()]
        files = (path.relative_to(ROOT) for path in ROOT.rglob("*"))
        listed = [str(path) for path in files if not any(Path(part).match(i) for part in path.parts for i in ignored)]
    return tuple(sorted(path for path in set(listed) if path and (ROOT / path).is_file()))


def python_files(*folders: str) -> list[str]:
    """The Python files below ``folders``."""
    inside = tuple(f"{folder}/" for folder in folders)
    return [path for path in repository_files() if path.endswith(".py") and path.startswith(inside)]


def complaints(rule: Rule, paths: list[str]) -> list[str]:
    """What ``rule`` says of the files ``paths``."""
    assert paths, "a rule about no file proves nothing"
    return [complaint for path in paths for complaint in rule(path, (ROOT / path).read_text(encoding="utf-8"))]


def refuse(rule: Rule, paths: list[str]) -> None:
    """Fail with everything that ``rule`` says of the files ``paths``, and with nothing else."""
    if complained := complaints(rule, paths):
        pytest.fail("\n".join(complained), pytrace=False)


def is_bare_string(node: ast.AST) -> bool:
    """Whether ``node`` is a docstring or a string that stands alone: words for people, not for the machine."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def code_words(text: str) -> Iterator[tuple[int, str]]:
    """(line, word) of every name and every string of ``text`` that the machine reads: no comment and no docstring."""
    tree = ast.parse(text)
    prose = {id(node.value) for node in ast.walk(tree) if is_bare_string(node)}
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 1)
        if isinstance(node, ast.Constant):
            if isinstance(node.value, str) and id(node) not in prose:
                yield line, node.value
            continue
        for field, value in ast.iter_fields(
            node
        ):  # identifiers are plain strings in the tree: id, attr, name, arg, ...
            if field != "type_comment":
                for word in value if isinstance(value, list) else [value]:
                    if isinstance(word, str):
                        yield line, word
