"""Plans a run on the machine where it is started: refuses one that does not fit before any process starts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from mcore_rl.config.cluster import ClusterConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.offline import OfflineConfig
from mcore_rl.config.run import RunConfig
from mcore_rl.config.trainer import TrainerConfig
from mcore_rl.controller.lifecycle.messages import note, warn
from mcore_rl.ground.secrets import redact
from mcore_rl.parallel.device import Platform, have_transformer_engine, num_cores
from mcore_rl.planning.overheads import GIB, device_rates
from mcore_rl.planning.plan import Plan, plan
from mcore_rl.planning.search import refusal
from mcore_rl.planning.tables import plan_values, short_line
from mcore_rl.tracking.atomic import replaced

PLAN = "plan.json"
LARGEST_RATE = 0.1  # weights are mostly smaller


def forecast(config: RunConfig | OfflineConfig, platform: Platform, models: Mapping[str, ModelConfig]) -> Plan:
    """The plan of ``config`` on machines like this one, with ``platform``.

    models: of each role with processes of its own, by name, the policy's first.
    Raises ConfigError if it does not fit, with the numbers and, on accelerators, the nearest settings that fit.
    """
    model = next(iter(models.values()))
    cluster = cluster_at_hand(config.trainer, platform)
    planned = plan(config, model, cluster, models)
    if not planned.fits:
        raise refusal(planned, config, model, cluster, models)
    return planned


def tell_plan(planned: Plan, doubts: Sequence[str]) -> None:
    """Shows a line of the plan of a run that begins, and its gains; its notes, and ``doubts``, as warnings."""
    for each in (short_line(planned), *planned.gains):
        note(each)
    for each in (*planned.notes, *doubts):
        warn(each)


def doubts_of(config: RunConfig | OfflineConfig, platform: Platform) -> list[str]:
    """What nothing forbids and hardly anybody means: rates that destroy a model, more processes than cores."""
    doubts = []
    for role in config.role_rows:
        if role.trains and (rate := config.role_config(role).optim.lr) >= LARGEST_RATE:
            usual = "1e-6 is usual with reinforcement learning, 1e-5 with sft, 1e-4 with adapters"
            doubts.append(f"{role.name}.optim.lr={rate:g}: AdamW moves every weight by about that much a step; {usual}")
    processes = config.trainer.n_gpus_per_node
    cores = num_cores()
    if not platform.is_accelerator and processes > cores:
        alike = f"trainer.n_gpus_per_node={cores} computes as much"
        doubts.append(f"trainer.n_gpus_per_node={processes}: as many training processes share {cores} cores; {alike}")
    return doubts


def write_plan(planned: Plan, directory: Path) -> None:
    """Writes the plan to ``plan.json`` in the run directory ``directory``."""
    with replaced(directory / PLAN) as path:
        path.write_text(json.dumps(redact(plan_values(planned)), indent=2) + "\n", encoding="utf-8")


def cluster_at_hand(trainer: TrainerConfig, platform: Platform) -> ClusterConfig:
    """A cluster of machines like this one.  Rates are those of the device's data sheet, guessed if it is unknown."""
    host_gib = psutil.virtual_memory().total / GIB
    if not platform.is_accelerator:
        return ClusterConfig(name="this machine", cpus_per_node=num_cores(), host_memory_gib=host_gib)
    memory, intra = device_rates(platform.device_name)
    return ClusterConfig(
        name="machines like this",
        device=platform.kind,
        device_name=platform.device_name,
        gpus_per_node=trainer.n_gpus_per_node,
        gpu_memory_gib=platform.memory_total_bytes / GIB,
        cpus_per_node=num_cores(),
        host_memory_gib=host_gib,
        memory_gb_s=memory,
        intra_node_gb_s=intra,
        inter_node_gb_s=50.0,
        disk_gb_s=1.0,
        transformer_engine=have_transformer_engine(),
    )
