"""Recipes, each composed once for all files of tests."""

from __future__ import annotations

from functools import cache

from mcore_rl.config.launch import load_recipe
from mcore_rl.config.run import RunConfig
from mcore_rl.config.sft import SftConfig


@cache
def recipe(name: str) -> RunConfig | SftConfig:
    """What ``load_recipe`` gives.  Callers must not change it."""
    return load_recipe(name)
