"""Makes a dataclass of plain values: pydantic reads each value by the declared type of its key, and names all faults.

Values are what hydra composes, mostly texts as they were written.  The dataclasses are the only schema: a key that they
do not have, or a value that is none of its type, is a violation with the nearest known key or value.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, TypeVar, get_type_hints

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ConfigDict, TypeAdapter, ValidationError

from mcore_rl.config.bounds import settings
from mcore_rl.config.names import NO_KEY, Composed, field_of, has_key, key_of, leaf_paths, leaf_values, meant, value_at
from mcore_rl.config.role_groups import group_defaults
from mcore_rl.config.trl_names import trl_remedy
from mcore_rl.ground.errors import ConfigError, Violation, refuse_if_any

T = TypeVar("T")
Tree = dict[str, Any]  # nested groups of keys and values
MENTIONED = re.compile(r"[\w.]+")
MAX_OF_TRL = 80  # characters shown of the value of a name of TRL's, which may be all rows
MISSING = "???"  # omegaconf's sign for a value that somebody has to write


def typed(schema: type[T], written: Mapping[str, Any]) -> T:
    """An instance of ``schema``: the values of ``written``, a tree of keys, over the schema's defaults.

    Interpolations of ``written`` are resolved in the whole.
    Raises ConfigError with a violation for each unknown key and each value that is none of its type.
    """
    tree = defaults(schema)
    wrong = list(_merge_known(tree, written, schema, list(all_keys(schema))))
    values = resolved(tree)
    _list_single_items(values, schema)
    try:
        adapter: TypeAdapter[T] = _adapter(schema)  # type: ignore[arg-type]  # a class is hashable
        made = adapter.validate_python({field_of(key): value for key, value in values.items()})
    except ValidationError as error:
        faults = [_violation(each) for each in error.errors()]
        own = [each for each in faults if not _is_interpolation(tree, each.key)]
        raise ConfigError([*wrong, *(own or faults)]) from error
    refuse_if_any(wrong)
    return made


def composed(schema: type[T], tree: Mapping[str, Any], written: Iterable[str]) -> T:
    """``typed``, with the keys that the choices in ``tree`` have (``Composed``).  written: keys that the user wrote."""
    if not issubclass(schema, Composed):
        return typed(schema, tree)
    config = typed(schema.schema_for(tree), tree)
    config.written = frozenset(written)
    return config.narrowed()


def plain(config: Any) -> Any:
    """A configuration as nested dicts and lists of plain values; enums as their names."""
    if is_dataclass(config) and not isinstance(config, type):
        own = [each.name for each in fields(config) if not each.metadata.get("omegaconf_ignore")]
        return {key_of(name): plain(getattr(config, name)) for name in own}
    if isinstance(config, Enum):
        return config.name
    if isinstance(config, dict):
        return {key: plain(value) for key, value in config.items()}
    return [plain(each) for each in config] if isinstance(config, (list, tuple)) else config


def defaults(schema: type[Any]) -> Tree:
    """What ``schema`` holds where nothing is written; interpolations of other keys are not resolved."""
    return copy.deepcopy(_defaults(schema))  # type: ignore[arg-type]  # a class is hashable


@cache
def _defaults(schema: type[Any]) -> Tree:
    tree: Tree = plain(schema())
    merge(tree, group_defaults(schema))
    return tree


def merge(tree: Tree, other: Mapping[str, Any]) -> None:
    """Puts the values of ``other`` into ``tree``; where both have a group, or a mapping, key by key."""
    for key, value in other.items():
        if isinstance(value, Mapping) and isinstance(tree.get(key), dict):
            merge(tree[key], value)
        else:
            tree[key] = copy.deepcopy(value)


def put(tree: Tree, key: str, value: Any) -> None:
    """Puts ``value`` into ``tree`` as that of a dotted key."""
    _put_at(tree, key.split("."), value)


def _put_at(tree: Tree, path: Sequence[str], value: Any) -> None:
    """``put``, with the names one below the other: those of a mapping may have dots."""
    for name in reversed(path):
        value = {name: value}
    merge(tree, value)


def resolved(tree: Tree) -> Tree:
    """``tree`` with the values of its interpolations.  Raises ConfigError with each that has none."""
    values = copy.deepcopy(tree)
    wrong = list[Violation]()
    for path, written in leaf_paths(tree):
        if "${" not in str(written) and written != MISSING:
            continue
        try:
            _put_at(values, path, _resolved(tree, path, written))
        except (OmegaConfBaseException, RecursionError) as error:
            problem = str(error).strip().splitlines()[0].rstrip(".")
            wrong.append(Violation(".".join(path), written, problem, "Write a value, or ${KEY} of a key that has one"))
    refuse_if_any(wrong)
    return values


def _resolved(tree: Tree, path: Sequence[str], written: Any) -> Any:
    """The value at ``path``, by omegaconf, which is given what is mentioned: the whole tree costs it 50 ms."""
    told: Tree = {}
    _put_at(told, path, written)
    waiting = [written]
    while waiting:
        text = str(waiting.pop())
        if "${." in text:  # relative to where it stands
            told = tree
            break
        for key in MENTIONED.findall(text) if "${" in text else ():
            if has_key(tree, key) and not has_key(told, key):
                put(told, key, value_at(tree, key))
                waiting.append(value_at(tree, key))
    node = OmegaConf.create(told)
    for name in path[:-1]:
        node = node[name]
    value = node[path[-1]]
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def all_keys(schema: type[Any], prefix: str = "") -> Iterator[str]:
    """The dotted keys of ``schema``; a group comes before its own keys."""
    hints = get_type_hints(schema)
    for each in fields(schema):
        if each.metadata.get("omegaconf_ignore"):
            continue
        key = f"{prefix}{key_of(each.name)}"
        yield key
        if is_dataclass(hints[each.name]):
            yield from all_keys(hints[each.name], f"{key}.")


def _merge_known(
    tree: Tree, written: Mapping[str, Any], group: type[Any], known: Sequence[str], prefix: str = ""
) -> Iterator[Violation]:
    """Puts ``written`` into ``tree``, the values of ``group``, as far as the dataclasses have its keys.

    known: all keys of the whole schema.  prefix: of the group's keys, with its dot.
    Gives a violation for each key that is not there, and for each value where there is a group of keys.
    """
    hints = get_type_hints(group)
    for name, value in written.items():
        key = f"{prefix}{name}"
        inner = hints.get(name if prefix else field_of(name))
        if name not in tree:
            for leaf, each in leaf_values({key: value}):
                remedy = trl_remedy(leaf)
                shown = _shown(each)
                if remedy and len(text := str(shown)) > MAX_OF_TRL:
                    shown = f"{text[:MAX_OF_TRL]}..."
                yield Violation(leaf, shown, NO_KEY, remedy or meant(leaf, known, "--cfg all shows all keys"))
        elif not is_dataclass(inner):
            merge(tree, {name: value})
        elif isinstance(value, Mapping):
            yield from _merge_known(tree[name], value, inner, known, f"{key}.")  # type: ignore[arg-type]  # a class
        else:
            yield Violation(key, _shown(value), "is a group of keys", f"Write one of them: {key}.KEY=VALUE")


def _is_interpolation(tree: Tree, key: str) -> bool:
    """Whether the value of ``key`` is another key's."""
    node: Any = tree
    for name in key.partition("[")[0].split("."):
        node = node.get(name) if isinstance(node, dict) else None
    return isinstance(node, str) and node.startswith("${")


def _list_single_items(tree: Tree, schema: type[Any]) -> None:
    """Makes lists of single texts where the schema wants lists: ``data.train_files=x.parquet`` is a list of it."""
    for each in settings(schema):  # type: ignore[arg-type]  # a class is hashable
        if not each.listed or isinstance(each.default, tuple):
            continue
        value = value_at(tree, each.key)
        if value is not None and not isinstance(value, (list, dict)):
            put(tree, each.key, [value])


@cache
def _adapter(schema: type[T]) -> TypeAdapter[T]:
    _spell_numbers(schema)
    return TypeAdapter(schema)


def _spell_numbers(schema: type[Any]) -> None:
    """Lets a number stand for a text: a yaml file of ours, or a program that makes overrides, may write 7."""
    schema.__pydantic_config__ = ConfigDict(coerce_numbers_to_str=True)
    for hint in get_type_hints(schema).values():
        if is_dataclass(hint):
            _spell_numbers(hint)  # type: ignore[arg-type]  # a class


def _violation(error: Mapping[str, Any]) -> Violation:
    """A fault that pydantic found, in our words."""
    kind = error["type"]
    value = error["input"]
    place: Sequence[str | int] = error["loc"][:-1] if kind == "missing" else error["loc"]
    key = key_of(str(place[0])) if place else ""
    for part in place[1:]:
        key += f"[{part}]" if isinstance(part, int) else f".{part}"
    shown = _shown(value)
    if value is None:
        return Violation(key, shown, "must have a value", "Leave it out, or write one")
    if kind == "enum":
        names = str(error["ctx"]["expected"]).replace("'", "").replace(" or ", ", ").split(", ")
        return Violation(key, shown, "is none of its values", _one_of(str(value), names))
    problem, remedy = _SAYS.get(kind.split("_")[0], (error["msg"], "Write a value of that type"))
    if isinstance(value, str) and value.lower() in ("none", "nil", "~"):
        remedy = "Write null, if the key may be without a value"
    return Violation(key, shown, problem, remedy)


# What is wrong with a value, and what to write instead, by the first word of pydantic's name for the fault.
_SAYS = {
    "int": ("must be a whole number", "Write one"),
    "float": ("must be a number", "Write one"),
    "bool": ("is neither true nor false", "Write true or false"),
    "string": ("must be a text", "Write one, in quotes if it has brackets"),
    "list": ("must be a list", "Write [a,b]"),
    "tuple": ("must be a list", "Write [a,b]"),
    "dict": ("must be names and values", "Write {name: value}"),
    "missing": ("has too few values", "Write one more"),
    "too": ("has too many values", "Write fewer"),
}


def _one_of(value: str, names: list[str]) -> str:
    written = f"Write {', '.join(names[:-1])} or {names[-1]}"
    return written if len(names) <= 6 else meant(value, names, written)


def _shown(value: Any) -> Any:
    """A value as it is written on a command line."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_shown(each)}" for key, each in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return f"[{','.join(str(_shown(each)) for each in value)}]"
    return "null" if value is None else value
