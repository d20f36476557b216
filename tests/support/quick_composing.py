"""Composing in a tenth of the time, for all tests: the package's ``compose``, with hydra's reading of files remembered.

Hydra reads and merges our files once for each file and choice.  Everything else is the package's, each time anew.  A
test whose subject is what hydra does asks for the fixture ``whole_composing``.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from mcore_rl.config import compose as composing
from mcore_rl.config.algorithm_registry import algorithms
from mcore_rl.config.resources import RECIPES
from mcore_rl.config.typed import Tree

KNOWN_PLACES = (None, RECIPES)  # whose files no test changes

whole = composing.read


def quick(program: str, name: str, directory: Path | None, choices: Sequence[str]) -> Tree:
    """What ``whole`` gives and raises."""
    if directory not in KNOWN_PLACES or any(each.partition("=")[2] not in algorithms() for each in choices):
        return whole(program, name, directory, choices)
    return copy.deepcopy(_read(program, name, directory, tuple(choices)))


_read = cache(whole)
composing.read = quick


@pytest.fixture
def whole_composing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package's own composing, with nothing remembered: for tests whose subject is what hydra does."""
    monkeypatch.setattr(composing, "read", whole)
