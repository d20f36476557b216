"""Typed options for command lines: the bounds of ``bounds.py`` and the paths of ``files.py``, all violations at once.

    parser.add_argument("--num-prompts", type=typed(PositiveInt), default=32)
    options = read_options(parser, arguments)

``typed`` never raises, so that argparse goes on to the next option; ``read_options`` raises for all of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from inspect import isfunction
from pathlib import Path
from typing import Any

from mcore_rl.config.bounds import PathKind, is_name, setting_of, value_problem
from mcore_rl.config.files import input_problem, output_problem
from mcore_rl.ground.errors import ConfigError, Violation, refuse_if_any

MAX_DIGITS = 40  # Python reads no more than 4300, and takes long for them


def typed(kind: Any) -> Callable[[str], Any]:
    """What ``add_argument`` takes as ``type``: makes a value of ``kind``, or its violations.

    kind: a type of ``bounds.py`` (``PositiveInt``, ``Seconds``, ``InputFile``, ...), whose paths become ``Path``; or a
    function of the text that raises ConfigError.
    """
    return partial(_read, kind) if isfunction(kind) else partial(_typed, kind)


def read_options(parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of ``parser``.  Raises ConfigError with every value that is out of bounds."""
    options = parser.parse_args(arguments)
    check_options(options, parser)
    return options


def check_options(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Raises ConfigError with every violation that ``typed`` left in ``options``, which ``parser`` made.

    Then downloads what Hub ids name, and has the paths in ``options`` instead.  ConfigError, where one cannot be had.
    """
    positional = set(_positional(parser))
    wrong = list[Violation]()
    keys = {name: name if name in positional else f"--{name.replace('_', '-')}" for name in vars(options)}
    for name, value in vars(options).items():
        for each in value if isinstance(value, list) else [value]:
            wrong += [replace(one, key=keys[name]) for one in each.violations] if isinstance(each, ConfigError) else []
    refuse_if_any(wrong)
    for name, value in list(vars(options).items()):
        if isinstance(value, _Named):
            from mcore_rl.config.hub_files import local_paths

            (path,) = local_paths(keys[name], value.text, value.place)
            setattr(options, name, Path(path))


def _positional(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Names of the arguments without dashes, subcommands' too; argparse has no public way to ask for them."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from _positional(each)
        elif not action.option_strings:
            yield action.dest


def _read(kind: Callable[[str], Any], text: str) -> Any:
    try:
        return kind(text)
    except ConfigError as error:
        return error


def _typed(kind: Any, text: str) -> Any:
    setting = setting_of("", kind, None)
    place = setting.mark(PathKind)
    value: Any = text
    if setting.range is not None:
        try:
            value = setting.kind(text if len(text) <= MAX_DIGITS else "")
        except ValueError:
            wanted = "a whole number" if setting.kind is int else "a number"
            return ConfigError([Violation("", text, f"must be {wanted}", f"Write {wanted}")])
    problem = value_problem(setting, value)
    if problem is None and place is not None and is_name(text, place):
        return _Named(text, place)
    if problem is None and place is not None:
        problem = (output_problem if place.written else input_problem)(text, place.kind)
    if problem:
        return ConfigError([Violation("", text, *problem)])
    return Path(text).expanduser() if place is not None else value


@dataclass(frozen=True)
class _Named:
    """A Hub id, until everything else is seen to be right."""

    text: str
    place: PathKind


def spelt_as_options(error: Exception, options: Mapping[str, str]) -> str:
    """The message of ``error`` in the words of a tool: its option wherever a key of a run's configuration stands.

    options: beginning of a key -> what the tool's user writes instead, as ``parallel.`` -> ``--layout ``.
    """
    text = str(error)
    for key in sorted(options, key=len, reverse=True):
        text = text.replace(key, options[key])
    return text
