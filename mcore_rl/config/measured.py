"""Reads the rates that ``mcore-rl doctor`` measured on a cluster, for the planner: ``cluster.measured=doctor.json``."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from mcore_rl.config.cluster import ClusterConfig, ReachedRates
from mcore_rl.config.yaml_files import MAX_BYTES, read_limited
from mcore_rl.errors import ConfigError, Violation

FORMAT, VERSION = "mcore-rl doctor", 1
KEY = "cluster.measured"


def take_measured(cluster: ClusterConfig) -> None:
    """Sets the rates of ``cluster.reached`` from the file ``cluster.measured``, but for those that its yaml sets.

    Raises ConfigError if the file is missing, is no doctor.json, is of other devices, or has no rate.
    """
    values = _read(cluster.measured)
    device, name = values.get("device"), values.get("device_name")
    if device != cluster.device.value or (cluster.device_name and name != cluster.device_name):
        problem = f"was measured on {name} ({device}), and the cluster {cluster.name} has "
        problem += f"{cluster.device_name or 'other devices'} ({cluster.device.value})"
        raise _error(cluster.measured, problem, "Run mcore-rl doctor there, or name the cluster that it is of")
    rates = {field.name: values.get("rates", {}).get(field.name) for field in fields(ReachedRates)}
    if all(rate is None for rate in rates.values()):
        raise _error(cluster.measured, "has no rate to plan with", "Run mcore-rl doctor where there are two devices")
    for key, rate in rates.items():
        if rate is not None and getattr(cluster.reached, key) is None:
            setattr(cluster.reached, key, float(rate))


def _read(path: str) -> dict[str, Any]:
    try:
        values = json.loads(read_limited(Path(path), MAX_BYTES))
    except ConfigError as error:
        raise ConfigError([replace(each, key=KEY, value=path) for each in error.violations]) from error
    except (ValueError, RecursionError) as error:
        raise _error(path, "is no JSON", "Write the path of a doctor.json, which mcore-rl doctor writes") from error
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise _error(path, "is not what mcore-rl doctor writes", "Write the path of a doctor.json")
    if values.get("version") != VERSION:
        raise _error(path, f"is of format {values.get('version')}, and this is {VERSION}", "Run mcore-rl doctor again")
    return values


def _error(path: str, problem: str, remedy: str) -> ConfigError:
    return ConfigError([Violation(KEY, path, problem, remedy)])
