"""Composing in a tenth of the time, for all tests: the package's ``compose``, with hydra's reading of files remembered.

Hydra reads and merges our files and the schema once for each file and algorithm; that is pickled.  Each composition
takes a fresh copy of it, to which hydra's own function applies the values, so that their errors are hydra's too.

Everything else is left to the package: types, folders of users, algorithms of users, choices of groups, and sweeps.
What is composed is new each time, so no test can change what another one gets.  ``test_quick_composing.py`` holds it
against the package's own.  A test whose subject is what hydra does asks for the fixture ``whole_composing``.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override

from mcore_rl.config import compose as composing
from mcore_rl.config.algorithm_registry import algorithms
from mcore_rl.config.override_text import keep_text
from mcore_rl.config.resources import RECIPES

T = TypeVar("T")
GROUP = "algorithm"
KNOWN_PLACES = (None, RECIPES)  # whose files no test changes

whole = composing._compose


def quick(schema: type[T], name: str, directory: Path | None, overrides: Sequence[str]) -> T:
    """What ``whole`` gives and raises."""
    if directory not in KNOWN_PLACES:
        return whole(schema, name, directory, overrides)
    parsed = _parsed(tuple(overrides))
    values = [each for each in parsed if each.key_or_group != GROUP]
    choices = tuple(text for text, each in zip(overrides, parsed, strict=True) if each.key_or_group == GROUP)
    if not (all(map(_is_known_choice, choices)) and all(map(_is_value, values))):
        return whole(schema, name, directory, overrides)
    config = pickle.loads(_read(schema, name, directory, choices))
    ConfigLoaderImpl._apply_overrides_to_config(values, config)
    return composing.typed(schema, config)


@cache
def _parsed(overrides: tuple[str, ...]) -> list[Override]:
    texts = [keep_text(composing._of_fields(each)) for each in overrides]
    return OverridesParser.create().parse_overrides(texts)


def _is_known_choice(override: str) -> bool:
    return override.partition("=")[2] in algorithms()


def _is_value(override: Override) -> bool:
    of_group = override.package is not None or "/" in override.key_or_group
    return not (of_group or override.is_sweep_override() or override.key_or_group.split(".")[0] == "hydra")


@cache
def _read(schema: type[Any], name: str, directory: Path | None, choices: tuple[str, ...]) -> bytes:
    """What hydra composes of our files alone.  schema: what hydra was offered for it."""
    return pickle.dumps(composing.read(name, directory, choices))


composing._compose = quick


@pytest.fixture
def whole_composing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package's own composing, with nothing remembered: for tests whose subject is what hydra does."""
    monkeypatch.setattr(composing, "_compose", whole)
