"""Looks algorithms, estimators and policy losses up by name: those of ``config/algorithms`` and of the user's files.

A user's file is chosen by its path, ``algorithm=FILE.py``.  The configuration then names its estimator and loss
``FILE.py:NAME``, so that every process that receives the configuration can load them; there is no registration.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TypeVar

from mcore_rl.config import algorithms as folder
from mcore_rl.config.algorithm_object import Algorithm, Estimator, PolicyLoss
from mcore_rl.config.files import input_problem
from mcore_rl.config.names import meant
from mcore_rl.config.user_files import import_file
from mcore_rl.ground.errors import ConfigError, Violation

P = TypeVar("P", Estimator, PolicyLoss)
ESTIMATOR_KEY = "algorithm.adv_estimator"
LOSS_KEY = "actor.loss_mode"


@cache
def algorithms() -> Mapping[str, Algorithm]:
    """The algorithms of ``config/algorithms``, by name, in alphabetical order."""
    by_name = {}
    for module in pkgutil.iter_modules(folder.__path__):
        (by_name[module.name],) = (
            value
            for value in vars(import_module(f"{folder.__name__}.{module.name}")).values()
            if isinstance(value, Algorithm) and value.name == module.name
        )
    return dict(sorted(by_name.items()))


@cache
def estimators() -> Mapping[str, Estimator]:
    """The estimators of ``algorithms``, by name."""
    by_name = {each.advantages.name: each.advantages for each in algorithms().values()}
    return dict(sorted(by_name.items()))


@cache
def policy_losses() -> Mapping[str, PolicyLoss]:
    """The losses of ``algorithms``, by name."""
    by_name = {each.loss.name: each.loss for each in algorithms().values()}
    return dict(sorted(by_name.items()))


def estimator(name: str) -> Estimator:
    """The estimator that ``algorithm.adv_estimator=name`` chooses.  Raises ConfigError if there is none."""
    return _part(ESTIMATOR_KEY, name, estimators(), Estimator)


def policy_loss(name: str) -> PolicyLoss:
    """The policy loss that ``actor.loss_mode=name`` chooses.  Raises ConfigError if there is none."""
    return _part(LOSS_KEY, name, policy_losses(), PolicyLoss)


def _part(key: str, name: str, ours: Mapping[str, P], kind: type[P]) -> P:
    if name in ours:
        return ours[name]
    path, _, own = name.rpartition(":")
    if not path.endswith(".py"):
        otherwise = f"Choose one of {', '.join(ours)}, or write FILE.py:NAME"
        raise ConfigError([Violation(key, name, "there is none of that name", meant(name, ours, otherwise))])
    if not Path(path).is_absolute():
        remedy = f"Write {Path(path).resolve()}:{own}"
        problem = "is a relative path, which means another file in a process that runs elsewhere"
        raise ConfigError([Violation(key, name, problem, remedy)])
    theirs = {
        each.name: each for each in _parts(algorithms_of_file(Path(path), key, name).values()) if isinstance(each, kind)
    }
    if own in theirs:
        return theirs[own]
    remedy = meant(own, theirs, f"Choose one of {', '.join(theirs) or 'none'}")
    raise ConfigError([Violation(key, name, f"no algorithm of the file has a part called {own}", remedy)])


def _parts(among: Iterable[Algorithm]) -> list[Estimator | PolicyLoss]:
    return [part for each in among for part in (each.advantages, each.loss)]


class _UnfitFileError(Exception):
    """A file that does not define a usable algorithm.  args: the problem and the remedy."""


def algorithms_of_file(path: Path, key: str, written: str) -> Mapping[str, Algorithm]:
    """The algorithms that a Python file defines, by name.  Runs the file, once per process.

    key, written: the configuration key and its value that name the file, for the message.
    Raises ConfigError if the file is missing, raises, defines no algorithm, or reuses the name of a built-in one.
    """
    try:
        return _run_file(path.resolve())
    except _UnfitFileError as error:
        problem, remedy = error.args
        raise ConfigError([Violation(key, written, problem, remedy)]) from error.__cause__


@cache
def _run_file(path: Path) -> Mapping[str, Algorithm]:
    if problem := input_problem(path):
        raise _UnfitFileError(problem[0], "Write the path of a Python file")
    try:
        module = import_file(path)
    except (Exception, SystemExit) as error:  # whatever the user's file does
        raise _UnfitFileError(f"running it raised {type(error).__name__}: {error}", "Correct the file") from error
    among = [value for value in vars(module).values() if isinstance(value, Algorithm)]
    by_name = {
        each.name: each for each in among if algorithms().get(each.name) is not each
    }  # it may import built-in ones
    if not by_name:
        raise _UnfitFileError("defines no Algorithm", "See docs/algorithms.md for an example")
    if taken := sorted(by_name.keys() & algorithms().keys()):
        raise _UnfitFileError(f"calls an algorithm {taken[0]}, as one of ours is", "Give it another name")
    ours = {role for each in estimators().values() for role in each.roles}
    for role in {role for each in by_name.values() for role in each.advantages.roles} - ours:
        if not isinstance(role, str) and role.phase != f"{role.name}_scores":
            said = f"names the phase of its role {role.name}: {role.phase}"
            raise _UnfitFileError(said, f"Leave phase out: it is {role.name}_scores, which reports know by its form")
    return by_name
