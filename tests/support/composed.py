"""Configurations for tests that are not about composing: hydra reads our files once for each algorithm or recipe."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache
from typing import TypeVar

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from mcore_rl.config.compose import ERRORS, compose, read, typed
from mcore_rl.config.launch import load_recipe
from mcore_rl.config.override_text import keep_text
from mcore_rl.config.run import RunConfig
from mcore_rl.config.sft import SftConfig
from mcore_rl.config.written_keys import Composed, written_keys

T = TypeVar("T")


@cache
def recipe(name: str) -> RunConfig | SftConfig:
    """What ``load_recipe`` gives, once for all files of tests.  Callers must not change it."""
    return load_recipe(name)


@cache
def _read(schema: type[T], program: str, choices: tuple[str, ...]) -> DictConfig:
    compose(schema, program, choices)  # so that hydra knows what there is to choose from
    return read(program, None, choices)


def composed(schema: type[T], program: str, overrides: Sequence[str]) -> T:
    """What ``compose`` gives, in a third of the time; what cannot be composed is left to it, for its words."""
    try:
        parsed = OverridesParser.create().parse_overrides([keep_text(each) for each in overrides])
        choices = tuple(text for each, text in zip(parsed, overrides, strict=True) if "." not in each.key_or_group)
        config = copy.deepcopy(_read(schema, program, choices))
        for each in parsed:
            if "." in each.key_or_group:
                assert not (each.is_add() or each.is_delete())
                OmegaConf.update(config, each.key_or_group, each.value())
        made = typed(schema, config)
    except (AssertionError, *ERRORS):
        return compose(schema, program, overrides)
    if isinstance(made, Composed):
        made.written = written_keys(overrides, None, program)
    return made
