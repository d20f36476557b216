"""Loads recipes and clusters by name: ``launch/recipes/NAME.yaml`` and ``launch/clusters/NAME.yaml``.

A recipe is a yaml file that ``mcore-rl train``, ``sft``, ``prefer`` or ``reward`` takes with ``--config-dir`` and
``--config-name``; its defaults say which.  A cluster's yaml holds values of ``ClusterConfig``.  Both may also be named
by a path, ``my_recipes/x.yaml``.  A violation names the file, the key, and the nearest known key.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from mcore_rl.config.cluster import ClusterConfig, ReachedRates, ResidualMemory, cluster_violations
from mcore_rl.config.compose import ERRORS, as_yaml, compose, words
from mcore_rl.config.names import meant
from mcore_rl.config.offline import OfflineConfig
from mcore_rl.config.prefer import PreferConfig
from mcore_rl.config.resources import CLUSTERS, RECIPES
from mcore_rl.config.reward_training import RewardTrainingConfig
from mcore_rl.config.run import RunConfig, run_violations
from mcore_rl.config.sft import SftConfig
from mcore_rl.config.typed import Tree, merge, put, typed
from mcore_rl.config.yaml_files import parse_yaml, read_limited, read_yaml
from mcore_rl.ground.errors import ConfigError, Violation, refuse_if_any
from mcore_rl.ground.json_text import read_json

SCHEMAS: dict[str, type[RunConfig] | type[OfflineConfig]] = {
    "train": RunConfig,
    "sft": SftConfig,
    "prefer": PreferConfig,
    "reward": RewardTrainingConfig,
}

MAX_NAME = 255  # bytes of a file's name, in all usual file systems
PREFIX = "cluster."  # of a cluster's keys on a command line
MEASURED = "cluster.measured"  # names a doctor.json, what mcore-rl doctor measured on the cluster
FORMAT = "mcore-rl doctor"
VERSION = 1
RATES_KEY, RESIDUALS_KEY = "rates", "residuals"  # keys of a doctor.json
MAX_BYTES = 16 << 20  # of a doctor.json


def read_words(texts: Sequence[str], *names: str) -> tuple[dict[str, str], list[str], list[str], list[Violation]]:
    """Sorts the ``key=value`` texts after a command.

    Returns (the values of ``names``, by name; overrides of the cluster, written ``cluster.KEY=VALUE``, without the
    prefix; all others, which are overrides of the run; violations: texts without ``=``).
    """
    named: dict[str, str] = {}
    of_cluster = list[str]()
    of_run = list[str]()
    wrong = list[Violation]()
    for text in texts:
        key, written, value = text.partition("=")
        if not written:
            wrong.append(Violation(text, "", "is no override", "Write key=value; lists as key=[a,b]"))
        elif key in names:
            named[key] = value
        elif key.startswith(PREFIX):
            of_cluster.append(text.removeprefix(PREFIX))
        else:
            of_run.append(text)
    return named, of_cluster, of_run, wrong


def load_words(
    texts: Sequence[str], *names: str, recipe: str = ""
) -> tuple[RunConfig | OfflineConfig, ClusterConfig, dict[str, str]]:
    """The run and its cluster from the ``key=value`` texts after a command, and the values of ``names`` among them.

    recipe, cluster: by name or path; a cluster that is left out is the recipe's.  ``cluster.KEY=VALUE`` changes the
    cluster, any other ``key=value`` the run.  recipe: that of a command that names it in another way.
    Raises ConfigError with every violation of either.
    """
    named, of_cluster, of_run, wrong = read_words(texts, "recipe", "cluster", *names)
    recipe = recipe or named.pop("recipe", "")
    if not recipe:
        remedy = "Write recipe=NAME, of launch/recipes, or --config-dir DIR --config-name NAME"
        wrong.append(Violation("recipe", "", "is not given", remedy))
    refuse_if_any(wrong)
    run = load_recipe(recipe, of_run)
    wrong = planned_violations(run)
    name = named.pop("cluster", "") or run.recipe.cluster
    if not name:
        wrong.append(Violation("cluster", "", "is not given", "Write cluster=NAME, of launch/clusters"))
        raise ConfigError(wrong)
    try:
        cluster = load_cluster(name, of_cluster)
    except ConfigError as error:
        raise ConfigError([*wrong, *error.violations]) from error
    refuse_if_any(wrong)
    return run, cluster, named


def planned_violations(run: RunConfig | OfflineConfig) -> list[Violation]:
    """Every violation of a run that is only planned: neither a model nor data need be there."""
    if isinstance(run, RunConfig):
        return run_violations(run, planned=True)
    return run.violations(planned=True)


def load_recipe(name: str, overrides: Sequence[str] = ()) -> RunConfig | OfflineConfig:
    """The recipe ``name`` with ``overrides`` in the syntax of ``mcore-rl``: the configuration of a run.

    name: a file of ``launch/recipes`` without ``.yaml``, or a path.
    Raises ConfigError if there is no such recipe, if it is of no program, or for wrong keys and values.
    Contradictions between values are not checked here: ``run_violations`` does that.
    """
    path = recipe_path(name)
    program = program_of(path)
    schema = SCHEMAS[program]
    return compose(schema, program, overrides, path.parent, path.stem)


def load_cluster(name: str, overrides: Sequence[str] = ()) -> ClusterConfig:
    """The cluster ``name`` with ``overrides`` such as ``slurm.partition=gpu``.

    name: a file of ``launch/clusters`` without ``.yaml``, or a path.  The rates of ``measured``, if it names a
    doctor.json, are taken over.
    Raises ConfigError with every violation.
    """
    path = cluster_path(name)
    tree = _typed_or_named(read_yaml(path), f"{path}: ")
    written = _dotlist(overrides)
    of_words: Tree = {}
    for key, value in written:
        put(of_words, key, value)
    _typed_or_named(of_words, PREFIX)
    merge(tree, of_words)
    cluster = typed(ClusterConfig, tree)
    cluster.name = cluster.name or path.stem
    if cluster.measured:
        take_measured(cluster)
    keys = {key for key, _ in written}
    refuse_if_any(
        [replace(each, key=f"{PREFIX}{each.key}") if each.key in keys else each for each in cluster_violations(cluster)]
    )
    return cluster


def cluster_yaml(cluster: ClusterConfig) -> str:
    """A yaml file that ``load_cluster`` reads as ``cluster``; it has measured rates, and not the name of their file."""
    return as_yaml(replace(cluster, measured=""))


def recipe_path(name: str) -> Path:
    """The file of a recipe.  Raises ConfigError with the nearest names if there is none."""
    return _path("recipe", name, RECIPES)


def cluster_path(name: str) -> Path:
    """The file of a cluster.  Raises ConfigError with the nearest names if there is none."""
    return _path("cluster", name, CLUSTERS)


def take_recipe(texts: Sequence[str], program: str) -> tuple[Path | None, list[str]]:
    """(the file that ``recipe=NAME`` among the overrides of ``program`` names, if one does; the other overrides).

    NAME: as for every command that takes recipes, see ``recipe_path``.
    Raises ConfigError if there is no such recipe, if several are named, or if it is one of another program.
    """
    named = [text.partition("=")[2] for text in texts if text.startswith("recipe=") and text[7:8] != "{"]
    others = [text for text in texts if not text.startswith("recipe=") or text[7:8] == "{"]
    if not named or program not in SCHEMAS:
        return None, list(texts)
    if len(named) > 1:
        raise ConfigError([Violation("recipe", ", ".join(named), "is given more than once", "Write one of them")])
    path = recipe_path(named[0])
    if (its := program_of(path)) != program:
        raise ConfigError([Violation("recipe", named[0], f"is a recipe of {its}", f"Write mcore-rl {its} instead")])
    return path, others


def recipe_names() -> list[str]:
    """The names of all recipes in ``launch/recipes``, sorted."""
    return _names(RECIPES)


def cluster_names() -> list[str]:
    """The names of all clusters in ``launch/clusters``, sorted."""
    return _names(CLUSTERS)


def program_of(path: Path) -> str:
    """The program of the recipe at ``path``, of ``SCHEMAS``.  Raises ConfigError if its defaults name none."""
    return _program_of(path, frozenset())


def _program_of(path: Path, above: frozenset[str]) -> str:
    """``program_of``, through the recipes that the defaults name.  above: names already visited, to stop at a cycle."""
    defaults = read_yaml(path).get("defaults") or []
    names = [entry for entry in defaults if isinstance(entry, str) and entry != "_self_"]
    for name in names:
        if name in SCHEMAS:
            return name
    above |= {path.stem}
    for name in names:
        if name not in above and (other := path.with_name(f"{name}.yaml")).is_file():
            return _program_of(other, above)
    *first, last = SCHEMAS
    remedy = f"Begin the file with `defaults: [train, _self_]`, or {' or '.join([*first[1:], last])} instead of train"
    problem = f"name neither {', '.join(first)} nor {last}"
    raise ConfigError([Violation(f"{path}: defaults", defaults, problem, remedy)])


def _path(kind: str, name: str, directory: Path) -> Path:
    asked = Path(name)
    if any(len(os.fsencode(part)) > MAX_NAME - len(".yaml") for part in asked.parts) or "\0" in name:
        raise ConfigError([Violation(kind, name, "can be no file", "Write a name or the path of a yaml file")])
    if asked.suffix == ".yaml" or len(asked.parts) > 1:
        path = asked.with_suffix(".yaml")
        if path.is_file():
            return path.resolve()
        raise ConfigError([Violation(kind, name, f"there is no file {path}", "Write the path of a yaml file")])
    path = directory / f"{name}.yaml"
    if name and path.is_file():
        return path
    there = _names(directory)
    remedy = meant(name, there, f"Choose one of those there: {', '.join(there) or 'none'}")
    raise ConfigError([Violation(kind, name, f"there is no {name}.yaml in {directory}", remedy)])


def _names(directory: Path) -> list[str]:
    return sorted(path.stem for path in directory.glob("*.yaml"))


def _typed_or_named(tree: Tree, place: str) -> Tree:
    """``tree``, if all of it may be in a cluster.  Raises ConfigError with ``place`` before each wrong key."""
    try:
        typed(ClusterConfig, tree)
    except ConfigError as error:
        raise ConfigError([replace(each, key=f"{place}{each.key}") for each in error.violations]) from error
    return tree


def _dotlist(overrides: Sequence[str]) -> list[tuple[str, Any]]:
    """(key, yaml value) of each ``key=value`` text.  Raises ConfigError with every text that is not of that form."""
    pairs: list[tuple[str, Any]] = []
    wrong = []
    for override in overrides:
        key, written, text = override.partition("=")
        if not written or not key:
            remedy = "Write key=value; lists as key=[a,b]"
            wrong.append(Violation(override, "", "is no override", remedy))
            continue
        try:
            pairs.append((key, parse_yaml(text)))
        except ERRORS as error:
            wrong.append(Violation(key, text, words(error), "Write key=value; lists as key=[a,b]"))
    refuse_if_any(wrong)
    return pairs


def take_measured(cluster: ClusterConfig) -> None:
    """Sets ``cluster.reached`` and ``cluster.residuals`` from the file ``cluster.measured``; what its yaml sets stays.

    Raises ConfigError if the file is missing, is no doctor.json, is of other devices, or has nothing to plan with.
    """
    values = _read_measured(cluster.measured)
    device = values.get("device")
    name = values.get("device_name")
    if device != cluster.device.value or (cluster.device_name and name != cluster.device_name):
        problem = f"was measured on {name} ({device}), and the cluster {cluster.name} has "
        problem += f"{cluster.device_name or 'other devices'} ({cluster.device.value})"
        raise _unmeasured(cluster.measured, problem, "Run mcore-rl doctor there, or name the cluster that it is of")
    taken = list[tuple[ReachedRates | ResidualMemory, str, float]]()
    for group, written in ((RATES_KEY, cluster.reached), (RESIDUALS_KEY, cluster.residuals)):
        numbers = values.get(group, {})
        taken += [(written, each.name, numbers[each.name]) for each in fields(written) if each.name in numbers]
    if not taken:
        raise _unmeasured(cluster.measured, "has nothing to plan with", "Run mcore-rl doctor without --only")
    for written, key, number in taken:
        if getattr(written, key) is None:
            setattr(written, key, float(number))


def _read_measured(path: str) -> dict[str, Any]:
    try:
        values = read_json(read_limited(Path(path), MAX_BYTES))
    except ConfigError as error:
        raise ConfigError([replace(each, key=MEASURED, value=path) for each in error.violations]) from error
    except ValueError as error:
        raise _unmeasured(
            path, "is no JSON", "Write the path of a doctor.json, which mcore-rl doctor writes"
        ) from error
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise _unmeasured(path, "is not what mcore-rl doctor writes", "Write the path of a doctor.json")
    if values.get("version") != VERSION:
        raise _unmeasured(
            path, f"is of format {values.get('version')}, and this is {VERSION}", "Run mcore-rl doctor again"
        )
    return values


def _unmeasured(path: str, problem: str, remedy: str) -> ConfigError:
    return ConfigError([Violation(MEASURED, path, problem, remedy)])
