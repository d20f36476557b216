"""Reads what ``mcore-rl doctor`` measured on a cluster, for the planner: ``cluster.measured=doctor.json``."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from mcore_rl.config.cluster import ClusterConfig, ReachedRates, ResidualMemory
from mcore_rl.config.yaml_files import read_limited
from mcore_rl.errors import ConfigError, Violation
from mcore_rl.json_text import read_json

FORMAT, VERSION = "mcore-rl doctor", 1
MAX_BYTES = 16 << 20
RATES_KEY, RESIDUALS_KEY = "rates", "residuals"  # keys of a doctor.json
KEY = "cluster.measured"


def take_measured(cluster: ClusterConfig) -> None:
    """Sets ``cluster.reached`` and ``cluster.residuals`` from the file ``cluster.measured``; what its yaml sets stays.

    Raises ConfigError if the file is missing, is no doctor.json, is of other devices, or has nothing to plan with.
    """
    values = _read(cluster.measured)
    device, name = values.get("device"), values.get("device_name")
    if device != cluster.device.value or (cluster.device_name and name != cluster.device_name):
        problem = f"was measured on {name} ({device}), and the cluster {cluster.name} has "
        problem += f"{cluster.device_name or 'other devices'} ({cluster.device.value})"
        raise _error(cluster.measured, problem, "Run mcore-rl doctor there, or name the cluster that it is of")
    taken = list[tuple[ReachedRates | ResidualMemory, str, float]]()
    for group, written in ((RATES_KEY, cluster.reached), (RESIDUALS_KEY, cluster.residuals)):
        numbers = values.get(group, {})
        taken += [(written, each.name, numbers[each.name]) for each in fields(written) if each.name in numbers]
    if not taken:
        raise _error(cluster.measured, "has nothing to plan with", "Run mcore-rl doctor without --only")
    for written, key, number in taken:
        if getattr(written, key) is None:
            setattr(written, key, float(number))


def _read(path: str) -> dict[str, Any]:
    try:
        values = read_json(read_limited(Path(path), MAX_BYTES))
    except ConfigError as error:
        raise ConfigError([replace(each, key=KEY, value=path) for each in error.violations]) from error
    except ValueError as error:
        raise _error(path, "is no JSON", "Write the path of a doctor.json, which mcore-rl doctor writes") from error
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise _error(path, "is not what mcore-rl doctor writes", "Write the path of a doctor.json")
    if values.get("version") != VERSION:
        raise _error(path, f"is of format {values.get('version')}, and this is {VERSION}", "Run mcore-rl doctor again")
    return values


def _error(path: str, problem: str, remedy: str) -> ConfigError:
    return ConfigError([Violation(KEY, path, problem, remedy)])
