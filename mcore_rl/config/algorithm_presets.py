"""Offers every ``Algorithm`` to hydra as the choice ``algorithm=NAME``, when a configuration is composed.

Algorithms have no yaml files.  ``algorithm=FILE.py`` chooses the algorithm of a Python file, ``FILE.py:NAME`` one of
several.  Algorithms in the user's folder, ``FOLDER/algorithm/*.py``, may also be chosen by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from functools import cache
from pathlib import Path

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from mcore_rl.config.algorithm_object import Algorithm
from mcore_rl.config.algorithm_registry import (
    ESTIMATOR_KEY,
    LOSS_KEY,
    algorithms,
    algorithms_of_file,
    estimators,
    policy_losses,
)
from mcore_rl.config.names import meant
from mcore_rl.errors import ConfigError, Violation

GROUP = "algorithm"


def preset(algorithm: Algorithm, home: Path | None = None) -> dict[str, object]:
    """The dotted keys that ``algorithm`` sets, with plain values.

    home: the user's file that defines it; an estimator or loss of that file is named ``FILE.py:NAME``.
    """
    values = {key: each.value for key, each in algorithm.all_settings().items()}
    if home is not None and estimators().get(algorithm.advantages.name) is not algorithm.advantages:
        values[ESTIMATOR_KEY] = f"{home.resolve()}:{algorithm.advantages.name}"
    if home is not None and policy_losses().get(algorithm.loss.name) is not algorithm.loss:
        values[LOSS_KEY] = f"{home.resolve()}:{algorithm.loss.name}"
    return {key: value.value if isinstance(value, Enum) else value for key, value in values.items()}


def offer_algorithms(overrides: Sequence[str], directory: Path | None) -> list[str]:
    """Offers hydra the package's algorithms, those of ``directory/algorithm``, and that of ``algorithm=FILE.py``.

    Returns ``overrides``, in which ``algorithm=FILE.py`` is replaced by the name of that file's algorithm.
    Raises ConfigError if a file defines no usable algorithm.
    """
    _offer_own()
    for path in sorted((directory / GROUP).glob("*.py")) if directory else ():
        _store(algorithms_of_file(path, GROUP, str(path)).values(), path)
    return [_by_name(override) for override in overrides]


@cache
def _offer_own() -> None:
    """Once: it takes a fifth of the time of a composition, and no file of a user's may reuse a name of these."""
    _store(algorithms().values())


def _store(among: Iterable[Algorithm], home: Path | None = None) -> None:
    for algorithm in among:
        values = OmegaConf.create()
        for key, value in preset(algorithm, home).items():
            OmegaConf.update(values, key, value)
        ConfigStore.instance().store(group=GROUP, name=algorithm.name, node=values, package="_global_")


def offered() -> set[str]:
    """The names that ``algorithm=NAME`` may choose, of all that was offered."""
    _offer_own()
    return {each.removesuffix(".yaml") for each in ConfigStore.instance().list(GROUP)}


def _by_name(override: str) -> str:
    key, _, value = override.partition("=")
    if key != GROUP or not (value.endswith(".py") or ".py:" in value):
        return override
    file, _, name = value.rpartition(":") if ".py:" in value else (value, "", "")
    theirs = algorithms_of_file(Path(file), GROUP, value)
    if not name and len(theirs) == 1:
        name = next(iter(theirs))
    if name not in theirs:
        remedy = meant(name, theirs, f"Write {GROUP}={file}:NAME, one of {', '.join(theirs)}")
        raise ConfigError([Violation(GROUP, value, "does not say which algorithm of the file", remedy)])
    _store([theirs[name]], Path(file))
    return f"{GROUP}={name}"
