"""Composes one typed configuration: command-line overrides over yaml values over the defaults of dataclasses.

Hydra reads the yaml files with their ``defaults``, and the grammar of overrides.  What it gives is a tree of plain
values, each number and boolean as the text that was written (``yaml_files.py``, ``keep_text``).  ``typed.py`` makes
the dataclasses of it, which are the only schema.

The yaml files of ``mcore_rl/conf`` and the objects of ``config/algorithms`` hold values; a directory of the user's may
hold more of both.  Algorithms have no yaml files: each is offered to hydra as the choice ``algorithm=NAME``, and
``algorithm=FILE.py`` chooses that of a Python file, ``FILE.py:NAME`` one of several.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from enum import Enum
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import hydra
import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mcore_rl.config.algorithm_object import Algorithm
from mcore_rl.config.algorithm_registry import (
    ESTIMATOR_KEY,
    LOSS_KEY,
    algorithms,
    algorithms_of_file,
    estimators,
    policy_losses,
)
from mcore_rl.config.generate import dtype_of
from mcore_rl.config.names import NO_KEY, Composed, leaves, meant
from mcore_rl.config.trl_names import trl_remedy
from mcore_rl.config.typed import Tree, composed, defaults, merge, plain, put, typed
from mcore_rl.config.yaml_files import FREE, YamlFile, read_defaults, searched
from mcore_rl.ground.errors import ConfigError, Violation, refuse_if_any

T = TypeVar("T")
OURS = "mcore_rl.conf"
ALGORITHM = "algorithm"  # the group of hydra's in which the algorithms are offered
ERRORS = (HydraException, OmegaConfBaseException, yaml.YAMLError, RecursionError, ValueError)
MAX_KEY = 200  # characters of a key, or of the name of a choice: hydra looks for files of these names
MAX_OVERRIDE, MAX_BRACKETS = 65_536, 64  # hydra's parser takes seconds for more
OmegaConf.register_new_resolver("dtype_of", dtype_of, replace=True)  # of conf/generate.yaml


def compose(
    schema: type[T], program: str, overrides: Sequence[str], directory: Path | None = None, name: str | None = None
) -> T:
    """An instance of ``schema`` with the values of ``conf/PROGRAM.yaml`` and then of ``overrides``, in hydra's syntax.

    directory: yaml files of the user's; their defaults may name files of ``mcore_rl/conf``.
    name: the file to begin with, without ``.yaml``; None is PROGRAM.
    If ``schema`` is a ``Composed``, its ``written`` is set to the keys that the user wrote.
    Raises ConfigError, which names each wrong override or key and a remedy.
    """
    begin = name or program
    if directory is not None and not (directory / f"{begin}.yaml").is_file():
        there = ", ".join(sorted(path.stem for path in directory.glob("*.yaml"))) or "none"
        problem = f"there is no {begin}.yaml in {directory}"
        raise ConfigError([Violation("--config-name", begin, problem, f"Choose one of those there: {there}")])
    parsed, wrong = _parsed(offer_algorithms(overrides, directory))
    choices = [each for each in parsed if _chooses(each, directory)]
    values = [each for each in parsed if each not in choices]
    unknown = [violation for each in choices if (violation := _choice_violation(each, directory))]
    wrong += unknown
    known = [each for each in choices if each.key_or_group not in {violation.key for violation in unknown}]
    files = read_defaults(directory, begin, [f"{each.key_or_group}/{each.value()}" for each in known])
    try:
        tree = read(program, begin, directory, [str(each.input_line) for each in known])
    except ERRORS as error:
        raise ConfigError([*wrong, _of_hydra(begin, error)]) from error
    for each in values:
        put(tree, each.key_or_group, each.value())
    try:
        config = composed(schema, tree, _written(parsed, files))
    except ConfigError as error:
        said = [_placed(each, values, files) for each in sorted(error.violations, key=partial(_place, values))]
        raise ConfigError([*wrong, *said]) from error
    refuse_if_any(wrong)
    return config


def read(program: str, name: str, directory: Path | None, choices: Sequence[str]) -> Tree:
    """What hydra composes of ``name``.yaml and its defaults, with ``choices``; interpolations are not yet resolved."""
    _offer(program)
    with searched(directory), hydra.initialize_config_module(OURS, version_base="1.3"):
        values = OmegaConf.to_container(hydra.compose(name, overrides=list(choices)))
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


@cache
def _offer(program: str) -> None:
    """Offers hydra ``PROGRAM_schema``, with which files begin.  It is empty: the schema has the defaults."""
    ConfigStore.instance().store(name=f"{program}_schema", node={})


def as_yaml(config: object) -> str:
    """A configuration as yaml text, which composes to the same configuration."""
    return OmegaConf.to_yaml(OmegaConf.create(plain(config)))


def changes_as_yaml(config: object, program: str) -> str:
    """What differs in ``config`` from ``conf/PROGRAM.yaml``, as a yaml file that composes to the same configuration.

    A key whose default follows another key is there only where it does not.
    """
    begun = read(program, program, None, [])
    values = plain(config)
    schema = type(config).schema_for(values) if isinstance(config, Composed) else type(config)
    written = defaults(schema)
    merge(written, begun)
    changes: Tree = {}
    for follows in (False, True):
        merge(begun, changes)
        merge(changes, _changes(values, plain(typed(schema, begun)), written, follows))
    text = OmegaConf.to_yaml(OmegaConf.create(changes)) if changes else ""
    return f"defaults: [{program}, _self_]\n{text}"


def _changes(tree: Tree, usual: Tree, written: Tree, follows: bool) -> Tree:
    """The values of ``tree`` that differ from ``usual``.

    written: the defaults, with their interpolations.  follows: only of keys with one; else only of the others.
    """
    changes: Tree = {}
    for key, value in tree.items():
        before = usual.get(key)
        default = written.get(key)
        if isinstance(value, dict) and value and isinstance(before, dict):
            inner = _changes(value, before, default if isinstance(default, dict) else {}, follows)
            if inner:
                changes[key] = inner
        elif (key not in usual or before != value) and ("${" in str(default)) is follows:
            changes[key] = value
    return changes


def as_dict(config: object) -> dict[str, Any]:
    """A configuration as nested dicts of plain values; enums as their names."""
    values: dict[str, Any] = plain(config)
    return values


def words(error: BaseException) -> str:
    """The message of the innermost cause of ``error``, in one line: omegaconf's, without what hydra wraps around it."""
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, yaml.YAMLError):
        return ", ".join(line.strip() for line in str(error).splitlines())
    lines = str(error).strip().splitlines()
    line = f"{lines[0]} {lines[1]}" if lines[0].endswith(":") and len(lines) > 1 else lines[0]
    return line.rstrip(".")


def _parsed(overrides: Iterable[str]) -> tuple[list[Override], list[Violation]]:
    """(the overrides that hydra can read, a violation for each of the others)."""
    parsed = list[Override]()
    wrong = list[Violation]()
    for text in overrides:
        if (violation := _front_violation(text)) is not None:
            wrong.append(violation)
            continue
        key, _, value = text.partition("=")
        key = key.lstrip("+~")
        try:
            (each,) = OverridesParser.create().parse_overrides([keep_text(text)])
        except ERRORS:
            remedy = f"""Write it in quotes, which the shell leaves: "{key}='...'\""""
            wrong.append(Violation(key, value, "has a character that hydra reads only in quotes", remedy))
            continue
        if each.is_sweep_override():
            wrong.append(Violation(key, value, "are several values for one run", f"Write a list: {key}=[a,b]"))
        else:
            parsed.append(each)
    return parsed, wrong


def _front_violation(override: str) -> Violation | None:
    """What is wrong with an override before hydra may read it."""
    key, written, value = override.partition("=")
    name = key.lstrip("+~")
    if name.split(".")[0].split("/")[0] == "hydra":
        return Violation(key, value, NO_KEY, "Leave it out: hydra composes, and runs nothing")
    if len(key) > MAX_KEY:
        problem = f"is a key of {len(key):,} characters"
        return Violation(f"{key[:80]}...", "", problem, "mcore-rl train --cfg all shows all keys")
    if name == ALGORITHM and len(value) > MAX_KEY:
        return Violation(key, f"{value[:80]}...", "there is none of that name", "mcore-rl train --help shows all")
    depth = max(override.count(bracket) for bracket in "[{(")
    if len(override) > MAX_OVERRIDE or depth > MAX_BRACKETS:
        problem = f"has {len(override):,} characters with {depth:,} brackets; {MAX_OVERRIDE:,} with {MAX_BRACKETS} are"
        remedy = trl_remedy(name) or "Write it into a yaml file, --config-dir DIR --config-name NAME"
        return Violation(key, f"{value[:80]}...", f"{problem} read", remedy)
    if key.startswith("~"):
        return Violation(name, value, "takes a key away, and every key has a value", "Leave it out")
    if not written or not name:
        return Violation(name, "", "is no override", "Write key=value; lists as key=[a,b]")
    return None


def _chooses(override: Override, directory: Path | None) -> bool:
    """Whether an override chooses a file or an algorithm, and is no value of a key."""
    group = override.key_or_group
    return group == ALGORITHM or (directory is not None and "." not in group and (directory / group).is_dir())


def _choice_violation(choice: Override, directory: Path | None) -> Violation | None:
    group = choice.key_or_group
    name = str(choice.value())
    if choice.package is not None:
        return Violation(group, name, f"takes no package, as @{choice.package}", f"Write {group}={name}")
    files = (directory / group).glob("*.yaml") if directory is not None else ()
    there = sorted({each.stem for each in files} | (offered() if group == ALGORITHM else set()))
    if name in there:
        return None
    remedy = meant(name, there, f"Choose one of {', '.join(there) or 'none'}")
    return Violation(group, name, "there is none of that name", remedy)


def _of_hydra(name: str, error: Exception) -> Violation:
    """What hydra says of a file."""
    return Violation(f"{name}.yaml", "", words(error), "Mend it in the yaml file that says so, or override it")


def _place(values: Sequence[Override], violation: Violation) -> int:
    """The number of the override that is to blame for ``violation``; after all of them where none is."""
    key = violation.key.partition("[")[0]
    for number, each in enumerate(values):
        if f"{key}.".startswith(f"{each.key_or_group}."):
            return number
    return len(values)


def _placed(violation: Violation, values: Sequence[Override], files: Iterable[YamlFile]) -> Violation:
    """``violation``, before whose key stands the yaml file that has it, unless an override is to blame."""
    if _place(values, violation) < len(values):
        return violation
    key = violation.key.partition("[")[0]
    for file in files:
        if any(f"{each}.".startswith(f"{key}.") for each in leaves(file.values)):
            return Violation(f"{file.path}: {violation.key}", violation.value, violation.problem, violation.remedy)
    return violation


def _written(overrides: Iterable[Override], files: Sequence[YamlFile]) -> set[str]:
    """The dotted keys that the user wrote.

    Those of files count if a file chooses an algorithm: a complete configuration, such as a run's config.yaml, does
    not, and has every key.
    """
    written = {key for each in overrides for key in leaves({each.key_or_group: each.value()})}
    if any(file.chooses for file in files):
        written |= {key for file in files for key in leaves(file.values)}
    return written


# What hydra would read in another way than the type of its key, before it looks at that: 1e3 is 1000.0 to it, and
# ``~/x`` has characters that its grammar has no use for.  In quotes each stays the text that was written.
TOKENS = re.compile(
    r"""'(?:\\.|[^'\\])*' | "(?:\\.|[^"\\])*" | \$\{[^{}]*\}  # quoted, or an interpolation: as it is
      | [\[\]{},] | (?:\\.|[^\[\]{},'"\\$]|\$(?!\{))+""",
    re.VERBOSE,
)
READ_BY_HYDRA = re.compile(r"[+-]?[\d.][\d._]*(?:e[+-]?[\d_]+)?|[+-]?(?:inf|nan)|true|false", re.IGNORECASE)
UNREADABLE = re.compile(r"[^()'\"\\$]*[^\w\s()'\"\\$/\-+.*:%?@|,][^()'\"\\$]*", re.ASCII)


def is_free(key: str) -> bool:
    """Whether no dataclass declares the type of a dotted key, which is a ``FREE`` group or in one."""
    return not set(FREE).isdisjoint(key.lstrip("+~").split("."))


def keep_text(override: str) -> str:
    """``override`` with the numbers, booleans and unreadable texts of its value in quotes, but in ``FREE`` groups."""
    key, equals, value = override.partition("=")
    if is_free(key) or not equals:
        return override
    inside: list[tuple[str, bool]] = []  # of each bracket that is open: itself, and whether it is a free group's
    name = ""

    def kept(match: re.Match[str]) -> str:
        nonlocal name
        token = match[0]
        if token in ("[", "{"):
            free = bool(inside and inside[-1][1]) or is_free(name)
            inside.append((token, free))
        elif token in ("]", "}") and inside:
            inside.pop()
        elif inside and inside[-1][0] == "{" and ":" in token:
            name, _, rest = token.partition(":")
            name = name.strip()
            return token if inside[-1][1] or is_free(name) else f"{token[: len(token) - len(rest)]}{_quoted(rest)}"
        elif not inside or (inside[-1][0] == "[" and not inside[-1][1]):
            token = _quoted(token)
        name = ""
        return token

    return f"{key}={TOKENS.sub(kept, value)}"


def _quoted(text: str) -> str:
    word = text.strip()
    quoted = READ_BY_HYDRA.fullmatch(word) or UNREADABLE.fullmatch(word)
    return text.replace(word, f"'{word}'") if quoted else text


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
    for path in sorted((directory / ALGORITHM).glob("*.py")) if directory else ():
        _store(algorithms_of_file(path, ALGORITHM, str(path)).values(), path)
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
        ConfigStore.instance().store(group=ALGORITHM, name=algorithm.name, node=values, package="_global_")


def offered() -> set[str]:
    """The names that ``algorithm=NAME`` may choose, of all that was offered."""
    _offer_own()
    return {each.removesuffix(".yaml") for each in ConfigStore.instance().list(ALGORITHM)}


def _by_name(override: str) -> str:
    key, _, value = override.partition("=")
    if key != ALGORITHM or not (value.endswith(".py") or ".py:" in value):
        return override
    file, _, name = value.rpartition(":") if ".py:" in value else (value, "", "")
    theirs = algorithms_of_file(Path(file), ALGORITHM, value)
    if not name and len(theirs) == 1:
        name = next(iter(theirs))
    if name not in theirs:
        remedy = meant(name, theirs, f"Write {ALGORITHM}={file}:NAME, one of {', '.join(theirs)}")
        raise ConfigError([Violation(ALGORITHM, value, "does not say which algorithm of the file", remedy)])
    _store([theirs[name]], Path(file))
    return f"{ALGORITHM}={name}"
