"""Replaces every name in a configuration by local files, before anything starts: Hub ids and folders of data.

The type of a key says what may stand there (``PathKind.hub`` and ``split`` of ``config/bounds.py``).  A run that goes
on keeps the commits that it began with, unless its user names another.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from rich.console import Console

from mcore_rl.config.bounds import PathKind, changed, settings_of
from mcore_rl.config.names import value_at
from mcore_rl.config.role_groups import RoleGroups
from mcore_rl.config.trainer import ResumeMode
from mcore_rl.ground.errors import ConfigError, Violation, refuse_if_any
from mcore_rl.hub.download import NotFetchedError, data_files, model_folder
from mcore_rl.hub.names import DATASET, MODEL, HubName, hub_name, named
from mcore_rl.hub.selection import ModelPart, SelectionError, folder_tables

T = TypeVar("T")


def fetched(config: T) -> T:
    """``config`` with the local path of every Hub id, and the files of every folder of data.

    Raises ConfigError with everything that cannot be had.
    """
    kept = _kept(config)
    changes = dict[str, Any]()
    wrong = list[Violation]()
    for key, place, value in _named_values(config):
        local = dict[Any, list[str]]()
        for name, item in _items(value):
            try:
                local[name] = local_paths(key if name is None else f"{key}[{name}]", item, place, kept.get(key))
            except ConfigError as error:
                wrong += error.violations
        changes[key] = _like(value, local)
    refuse_if_any(wrong)
    return changed(config, {key: value for key, value in changes.items() if value})


def fetched_config(config: T) -> T:
    """``config`` whose models of the Hub are folders with their config.json alone, for a plan; data stay as they are.

    Raises ConfigError as ``fetched``.
    """
    changes = {}
    for key, place, value in _named_values(config):
        if place.hub == MODEL and not isinstance(value, list):
            local = {
                name: local_paths(key if name is None else f"{key}[{name}]", item, place, None, ModelPart.config)
                for name, item in _items(value)
            }
            changes[key] = _like(value, local)
    return changed(config, changes)


def config_folder(path: str) -> Path:
    """The folder with the config.json of the checkpoint at ``path``, which is downloaded if that is a Hub id.

    What cannot be had is looked for at ``path`` itself, and said elsewhere.
    """
    name = hub_name(path, MODEL)
    try:
        return Path(path).expanduser() if name is None else model_folder(name, ModelPart.config)
    except NotFetchedError:
        return Path(path)


def local_paths(
    key: str, text: str, place: PathKind, kept: list[HubName] | None = None, part: ModelPart | None = None
) -> list[str]:
    """The local files or the folder that ``text`` means.  Raises ConfigError, with ``key``.

    kept: the names with commits that this key had when the run began.  part: of a model; None is what ``place`` says.
    """
    name = hub_name(text, place.hub)
    try:
        if name is None and place.hub == DATASET and text and os.path.isdir(os.path.expanduser(text)):
            return [str(path) for path in folder_tables(Path(text).expanduser(), place.split)]
        if name is None:
            return [text]
        name = _with_commit(name, kept or [])
        Console(stderr=True).print(f"{key}: {name}, of the Hub", markup=False, highlight=False, soft_wrap=True)
        paths = (
            data_files(name, place.split)
            if name.kind == DATASET
            else [model_folder(name, part or ModelPart[place.part])]
        )
    except SelectionError as error:
        raise ConfigError([Violation(key, text, error.problem, error.remedy)]) from error
    except OSError as error:
        remedy = "Write the path of a folder of tables that you can read"
        raise ConfigError([Violation(key, text, f"cannot be read: {error.strerror}", remedy)]) from error
    said = f"  is {named(str(paths[0]))}" + (f" and {len(paths) - 1} more" if paths[1:] else "")
    Console(stderr=True).print(said, markup=False, highlight=False, soft_wrap=True)
    return [str(path) for path in paths]


def _items(value: Any) -> list[tuple[Any, str]]:
    """(its number or name, text) of each text of a value; None is the name of a single one."""
    if isinstance(value, dict):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, list) else [(None, value)]


def _like(value: Any, local: Mapping[Any, list[str]]) -> Any:
    """What takes the place of ``value``.  local: the paths that stand for each of its ``_items``."""
    if isinstance(value, dict):
        return {name: "".join(paths) for name, paths in local.items()}
    paths = [path for of_item in local.values() for path in of_item]
    return paths if isinstance(value, list) else "".join(paths)


def _named_values(config: Any) -> Iterator[tuple[str, PathKind, Any]]:
    """(key, kind of path, value) of every key of ``config`` that may have a name instead of a path."""
    for each in settings_of(config):
        place = each.mark(PathKind)
        value = value_at(config, each.key)
        if place is not None and place.hub and value:
            yield each.key, place, value


def _kept(config: Any) -> dict[str, list[HubName]]:
    """By key, the names that ``config.yaml`` of the run directory has, whose run this one may go on with."""
    if not isinstance(config, RoleGroups) or config.trainer.resume_mode is ResumeMode.off:
        return {}
    try:
        written = (Path(config.trainer.default_local_dir) / "config.yaml").read_text(encoding="utf-8")
        values = yaml.safe_load(written)
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    kept = dict[str, list[HubName]]()
    for key, place, _ in _named_values(config):
        value = values
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        texts = list(value.values()) if isinstance(value, Mapping) else value if isinstance(value, list) else [value]
        kept[key] = [name for text in texts if isinstance(text, str) and (name := hub_name(text, place.hub))]
    return kept


def _with_commit(name: HubName, kept: list[HubName]) -> HubName:
    """``name`` with the commit it had when the run began, if its user names none."""
    same = [each.revision for each in kept if each.name == name.name]
    return name if name.revision or not same else HubName(name.kind, name.name, same[0], name.path)
