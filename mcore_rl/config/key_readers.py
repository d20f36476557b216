"""Which algorithms read a key of ``mcore-rl train``, and what else must be written for that.

A run refuses a key that the user wrote and nothing reads (``config/unread_keys.py``).  Here every published algorithm
is asked about a key.  tests/config/test_key_readers.py holds the answers against computed advantages and losses.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import cache, reduce
from typing import Any

from mcore_rl.config.algorithm_registry import ESTIMATOR_KEY, LOSS_KEY, algorithms
from mcore_rl.config.compose import compose
from mcore_rl.config.names import field_of, has_key, value_at
from mcore_rl.config.run import RunConfig, run_violations
from mcore_rl.config.unread_keys import why_unread


@cache
def runs() -> Mapping[str, RunConfig]:
    """A run of each published algorithm, with nothing else written."""
    return {name: run_with(name) for name in algorithms()}


def readers(key: str) -> dict[str, tuple[str, ...]]:
    """Algorithm -> the overrides without which it would not read ``key``, as a refusal's remedies write them.

    An algorithm is absent if it has no use for the key, or refuses one of these overrides.
    """
    reading = {}
    for name, run in runs().items():
        remedies = tuple(dict.fromkeys(remedy for _, remedy in why_unread(run, key)))
        if all(_is_setting(each) and not _is_refused(name, each) for each in remedies):
            reading[name] = remedies
    return reading


def _is_setting(remedy: str) -> bool:
    """Whether ``remedy`` is an override that leaves the algorithm what it is."""
    key, written, _ = remedy.partition("=")
    return bool(written) and key not in (ESTIMATOR_KEY, LOSS_KEY) and " " not in key


@cache
def _is_refused(name: str, override: str) -> bool:
    """Whether a run of the algorithm ``name`` refuses ``override``."""
    key = override.partition("=")[0]
    run = run_with(name, override.partition(", or ")[0])
    return any(each.key == key for each in run_violations(run, planned=True))


@cache
def run_with(name: str, *overrides: str) -> RunConfig:
    """A run of the algorithm ``name`` with ``overrides``; none counts as written, so that none is refused as unread."""
    run = compose(RunConfig, "train", [f"algorithm={name}", *overrides])
    run.written = frozenset()
    return run


def changed(run: RunConfig, key: str, value: Any) -> RunConfig:
    """A copy of ``run`` with another value."""
    *groups, name = field_of(key).split(".")
    copied = copy.deepcopy(run)
    setattr(reduce(getattr, groups, copied), name, value)
    return copied


def as_condition(remedy: str, key: str) -> str:
    """``remedy`` with every value that makes ``key`` read, where its values are few."""
    switch, _, _ = remedy.partition("=")
    for run in runs().values():
        value = value_at(run, switch) if has_key(run, switch) else None
        if not isinstance(value, Enum) or remedy not in [each for _, each in why_unread(run, key)]:
            continue
        reading = [
            each for each in type(value) if all(remedy != one for _, one in why_unread(changed(run, switch, each), key))
        ]
        if len(reading) > 1 and len(reading) == len(type(value)) - 1:
            (other,) = set(type(value)) - set(reading)
            return f"`{switch}` other than `{other.value}`"
        return f"`{switch}={'` or `'.join(each.value for each in reading)}`"
    return f"`{remedy}`" if remedy.endswith(("=true", "=false")) else f"`{remedy}`, say"


def named(names: Sequence[str], among: Sequence[str], everyone: str) -> str:
    """``names`` in a table: all ``among`` which they are, all but a few, or these.  everyone: the word for all."""
    rest = [each for each in among if each not in names]
    if not rest:
        return everyone
    return f"{everyone} but {_listed(rest)}" if len(rest) < len(names) else _listed(names)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{each}`" for each in names)


def readers_text(key: str) -> str:
    """The algorithms that read ``key``, as markdown; "" if all do, and "no algorithm" if none does."""
    reading = readers(key)
    if not reading:
        return "no algorithm"
    by_themselves = [name for name, remedies in reading.items() if not remedies]
    if len(by_themselves) == len(algorithms()):
        return ""
    told = [named(by_themselves, list(algorithms()), "all")] if by_themselves else []
    asked = [name for name, remedies in reading.items() if remedies]
    if asked:
        remedies = dict.fromkeys(each for name in asked for each in reading[name])
        conditions = " and ".join(as_condition(each, key) for each in remedies)
        rest = [name for name in algorithms() if name not in by_themselves]
        told.append(f"{named(asked, rest, 'the others' if told else 'all')} with {conditions}")
    return "; ".join(told)
