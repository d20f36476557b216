"""Composes one typed configuration: command-line overrides over yaml values over the defaults of dataclasses.

The dataclasses are the only schema.  An unknown key or a value of another type is refused; the message names the place
and the nearest known key.  Values arrive as the texts that were written, and the types of the dataclasses read them, so
that a text such as 1e3 or on stays one (``yaml_files.py``, ``override_text.py``).

The yaml files of ``mcore_rl/conf`` and the objects of ``config/algorithms`` hold values; a directory of the user's may
hold more of both.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import is_dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import hydra
import yaml
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, Node, OmegaConf
from omegaconf.base import ContainerMetadata
from omegaconf.errors import OmegaConfBaseException

from mcore_rl.config.algorithm_presets import offer_algorithms
from mcore_rl.config.bounds import settings
from mcore_rl.config.generate import dtype_of
from mcore_rl.config.names import NO_KEY, field_of, key_of, meant
from mcore_rl.config.override_text import is_free, keep_text
from mcore_rl.config.role_groups import group_defaults
from mcore_rl.config.written_keys import Composed, written_keys
from mcore_rl.config.yaml_files import check_defaults, searched
from mcore_rl.errors import ConfigError, Violation, refuse_if_any

T = TypeVar("T")
OURS = "mcore_rl.conf"
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
    refuse_if_any([each for override in overrides if (each := _front_violation(override))])
    if directory is not None:
        chosen = (override.lstrip("+~").partition("=") for override in overrides)
        check_defaults(directory, begin, [f"{group}/{choice}" for group, _, choice in chosen if choice])
    _offer_schema(schema, program)  # type: ignore[arg-type]  # a class is hashable
    overrides = [_listed(_adding(each, schema), schema) for each in offer_algorithms(overrides, directory)]
    composing = partial(_compose, schema, begin, directory)
    try:
        composed = composing(overrides)
    except ERRORS as error:
        files = _of_files(begin, composing)
        wrong = files or _wrong_overrides(composing, overrides, schema)
        raise ConfigError(wrong or [_of_file(begin, error)]) from error
    if isinstance(composed, Composed):
        composed.written = written_keys(overrides, directory, begin)
    return composed


def _adding(override: str, schema: type[Any]) -> str:
    """``override``, with hydra's mark for a key that may be new, if it is of a group that may hold any key."""
    key = override.partition("=")[0]
    mapped = any(f"{key}.".startswith(f"{each.key}.") for each in settings(schema) if each.mapped)  # type: ignore[arg-type]  # a class is hashable
    return f"++{override}" if (mapped or is_free(key)) and override[0] not in "+~" else override


def _of_fields(override: str) -> str:
    """``override``, with the names of fields for those of keys."""
    key, written, value = override.partition("=")
    return f"{field_of(key)}{written}{value}"


def _listed(override: str, schema: type[Any]) -> str:
    """``override``, with brackets around its value if that is one item where a list belongs."""
    key, _, value = override.partition("=")
    listed = any(each.key == key and isinstance(each.default, list | None) for each in settings(schema) if each.listed)  # type: ignore[arg-type]  # a class is hashable
    plain = bool(value) and value != "null" and not value.startswith(("[", "{", "${"))
    return f"{key}=[{value}]" if listed and plain else override


def _front_violation(override: str) -> Violation | None:
    key, _, value = override.partition("=")
    if key.lstrip("+~").split(".")[0].split("/")[0] == "hydra":
        return Violation(key, value, "there is no such key", "Leave it out: hydra composes, and runs nothing")
    if key_of(key.lstrip("+~")) != key.lstrip("+~"):
        return Violation(key, value, NO_KEY, f"Did you mean {key_of(key.lstrip('+~'))}?")
    if len(key) > MAX_KEY:
        problem = f"is a key of {len(key):,} characters"
        return Violation(f"{key[:80]}...", "", problem, "mcore-rl train --cfg shows all keys")
    if key.lstrip("+~") == "algorithm" and len(value) > MAX_KEY:
        return Violation(key, f"{value[:80]}...", "there is none of that name", "mcore-rl train --help shows all")
    depth = max(override.count(bracket) for bracket in "[{(")
    if len(override) <= MAX_OVERRIDE and depth <= MAX_BRACKETS:
        return None
    problem = f"has {len(override):,} characters with {depth:,} brackets; {MAX_OVERRIDE:,} with {MAX_BRACKETS} are read"
    return Violation(key[:200], value, problem, "Write it into a yaml file, --config-dir DIR --config-name NAME")


def _wrong_overrides(
    composing: Callable[[Sequence[str]], Any], overrides: Sequence[str], schema: type[Any]
) -> list[Violation]:
    """A violation for each override that cannot be composed, found by halves."""
    if len(overrides) < 2:
        return [each for override in overrides if (each := _violation(composing, override, schema))]
    try:
        composing(overrides)
    except ERRORS:
        middle = len(overrides) // 2
        halves = overrides[:middle], overrides[middle:]
        return [each for half in halves for each in _wrong_overrides(composing, half, schema)]
    return []


@cache
def _offer_schema(schema: type[Any], program: str) -> None:
    """Stores the schema for hydra; PROGRAM.yaml begins with it, so that exactly the keys of the schema may be set."""
    node = OmegaConf.merge(_structured(schema), group_defaults(schema))  # type: ignore[arg-type]  # a class is hashable
    ConfigStore.instance().store(name=f"{program}_schema", node=node)


@cache
def _structured(schema: type[Any]) -> DictConfig:
    """The schema as an omegaconf object.  It is cached: callers must not change it."""
    structured = OmegaConf.structured(schema)
    assert isinstance(structured, DictConfig)
    return structured


def _compose(schema: type[T], name: str, directory: Path | None, overrides: Sequence[str]) -> T:
    return typed(schema, read(name, directory, overrides))


def read(name: str, directory: Path | None, overrides: Sequence[str]) -> DictConfig:
    """What hydra composes of ``name``.yaml, its defaults, and ``overrides``; interpolations are not yet resolved."""
    with searched(directory), hydra.initialize_config_module(OURS, version_base="1.3"):
        return hydra.compose(name, overrides=[keep_text(_of_fields(each)) for each in overrides])


def typed(schema: type[T], composed: DictConfig) -> T:
    """``composed`` as an instance of ``schema``; resolves the interpolations of ``composed`` in place."""
    OmegaConf.resolve(composed)
    structured = _structured(schema)  # type: ignore[arg-type]  # a class is hashable
    # Merge over the schema again where it is needed: hydra lets ``+key`` add keys that the schema does not have.
    if not _has_types_of(structured, composed):
        merged = OmegaConf.merge(structured, OmegaConf.to_container(composed))
        assert isinstance(merged, DictConfig)
        composed = merged
    config = OmegaConf.to_object(composed)
    assert isinstance(config, schema)
    return config


def _has_types_of(structured: Node, composed: Node) -> bool:
    """Whether ``composed`` has exactly the keys of the dataclasses of ``structured``, each of its declared type."""
    declared, own = structured._metadata, composed._metadata
    if type(structured) is not type(composed) or (declared.ref_type, declared.optional) != (own.ref_type, own.optional):
        return False
    if not isinstance(declared, ContainerMetadata) or not isinstance(own, ContainerMetadata):
        return True
    if (declared.key_type, declared.element_type) != (own.key_type, own.element_type):
        return False
    if not isinstance(structured, DictConfig) or not is_dataclass(declared.object_type):
        return True
    assert isinstance(composed, DictConfig)
    nodes, others = structured._content, composed._content
    if declared.object_type is not own.object_type or not isinstance(nodes, dict) or not isinstance(others, dict):
        return False
    return nodes.keys() == others.keys() and all(_has_types_of(nodes[key], others[key]) for key in nodes)


def as_yaml(config: object) -> str:
    """A configuration as yaml text, which composes to the same configuration."""
    values = OmegaConf.structured(config)
    return OmegaConf.to_yaml(OmegaConf.create({key_of(str(name)): values._get_node(name) for name in values}))


def as_dict(config: object) -> dict[str, Any]:
    """A configuration as nested dicts of plain values; enums as their names."""
    values = OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)
    assert isinstance(values, dict)
    return {key_of(str(name)): value for name, value in values.items()}


def _violation(composing: Callable[[Sequence[str]], Any], override: str, schema: type[Any]) -> Violation | None:
    """What is wrong if ``override`` is the only one; None if nothing is."""
    try:
        composing([override])
    except ERRORS as error:
        key, written, value = override.partition("=")
        key = key.lstrip("+~")
        cause = words(error)
        if not written:
            return Violation(key, "", "is no override", "Write key=value; lists as key=[a,b]")
        if "Could not find" in cause:
            choices = re.findall(r"^\t(\S+)$", str(error), re.MULTILINE)
            return Violation(key, value, "there is none of that name", f"Choose one of {', '.join(choices)}")
        known = [key_of(each) for each in all_keys(_structured(schema))]  # type: ignore[arg-type]  # a class is hashable
        if "Could not append" in cause:
            return Violation(key, value, "there is such a key already", f"Write {key}={value}, without the +")
        if "LexerNoViableAlt" in cause:
            problem = "has a character that hydra reads only in quotes"
            return Violation(key, value, problem, f"""Write it in quotes, which the shell leaves: "{key}='...'\"""")
        if any(each.startswith(f"{key}.") for each in known):
            return Violation(key, value, "is a group of keys", f"Write one of them: {key}.KEY=VALUE")
        if key in known:
            return Violation(key, value, cause, "Write a value of that type")
        return Violation(key, value, NO_KEY, meant(key, known, "mcore-rl train --cfg shows all keys"))
    return None


def _of_files(name: str, composing: Callable[[Sequence[str]], Any]) -> list[Violation]:
    """What is wrong in the yaml files, without any override."""
    try:
        composing([])
    except ERRORS as error:
        return [_of_file(name, error)]
    return []


def _of_file(name: str, error: Exception) -> Violation:
    key = key_of(str(error.__dict__.get("full_key") or f"{name}.yaml"))
    return Violation(key, "", words(error), "Mend it in the yaml file that says so, or override it")


def words(error: BaseException) -> str:
    """The message of the innermost cause of ``error``, in one line: omegaconf's, without what hydra wraps around it."""
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, yaml.YAMLError):
        return ", ".join(line.strip() for line in str(error).splitlines())
    lines = str(error).strip().splitlines()
    line = f"{lines[0]} {lines[1]}" if lines[0].endswith(":") and len(lines) > 1 else lines[0]
    return re.sub(r" of type 'str'(?= could not be converted)", "", line).rstrip(".")  # every value is read as a text


def all_keys(config: DictConfig, prefix: str = "") -> Iterator[str]:
    """The dotted keys of ``config``; a group comes before its own keys."""
    for name in map(str, config):
        yield f"{prefix}{name}"
        node = config._get_node(name)
        if isinstance(node, DictConfig) and not node._is_none():
            yield from all_keys(node, f"{prefix}{name}.")
