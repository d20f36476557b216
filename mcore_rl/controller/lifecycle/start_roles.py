"""Starts the processes of a run's roles, with their first weights, as the table of roles says."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

from mcore_rl.config.algorithm_object import TEACHER
from mcore_rl.config.offline import OfflineConfig
from mcore_rl.config.role import Role
from mcore_rl.config.role_table import ROLES
from mcore_rl.config.roles import AdaptedConfig, snapshot_of, trains_tower
from mcore_rl.config.run import RunConfig
from mcore_rl.config.trainer import Placement
from mcore_rl.controller.lifecycle.preparation import weights_of_roles
from mcore_rl.controller.lifecycle.saving import load_state
from mcore_rl.parallel.device import Platform
from mcore_rl.parallel.secret_store import StoreAccess, StoreServer
from mcore_rl.runtime.cluster import meeting_host
from mcore_rl.runtime.placement import Places, place_trainers
from mcore_rl.runtime.seen_paths import demand_seen
from mcore_rl.runtime.start import start_trainers
from mcore_rl.runtime.train_group import TrainGroup
from mcore_rl.runtime.worker_values import RoleSpec, TeacherSpec


async def start_roles(
    config: RunConfig | OfflineConfig,
    checkpoint: Path | None,
    places: Places,
    platform: Platform,
    store: StoreAccess,
    stack: AsyncExitStack,
    *,
    leaves_behind: bool = False,
) -> dict[str, TrainGroup]:
    """Starts the workers of each role with processes of its own, by name; they end when ``stack`` is closed.

    checkpoint: the checkpoint to resume from; None is none.
    store: of the run, where the workers of a role meet.
    leaves_behind: whether the plan has room for the policy's optimizer state while the engines receive weights.
    """
    return {
        role.name: await _start_role(
            role, config, checkpoint, places, platform, store, stack, leaves_behind=leaves_behind and role.publishes
        )
        for role in config.group_rows
    }


async def start_trainers_alone(
    config: RunConfig | OfflineConfig, checkpoint: Path | None, platform: Platform, stack: AsyncExitStack
) -> dict[str, TrainGroup]:
    """Starts the workers of each role, as ``start_roles``, on the places of a run without engines."""
    places = await place_trainers(config.trainer, platform)
    stack.callback(places.close)
    await demand_seen(weights_of_roles(config), places.nodes)
    store = stack.enter_context(StoreServer(meeting_host(config.ray_init))).access
    return await start_roles(config, checkpoint, places, platform, store, stack)


async def _start_role(
    role: Role,
    config: RunConfig | OfflineConfig,
    checkpoint: Path | None,
    places: Places,
    platform: Platform,
    store: StoreAccess,
    stack: AsyncExitStack,
    *,
    leaves_behind: bool,
) -> TrainGroup:
    """Starts the workers of ``role``, and takes the snapshots of roles that share them."""
    engine = config.role_config(role)
    logs = Path(config.trainer.default_local_dir) / "logs"
    shares_device = isinstance(config, RunConfig) and config.trainer.placement is Placement.colocated
    spec = RoleSpec(
        role=role.name,
        directory=Path(config.weights_of(role)),
        engine=engine,
        parallel=engine.parallel,
        head=role.head,
        trains=role.trains,
        lora=engine.lora if isinstance(engine, AdaptedConfig) and engine.lora.rank else None,
        shares_device=shares_device,
        publishes=role.publishes,
        leaves_behind=leaves_behind,
        teacher=_teacher(config) if role.publishes else None,
        beside=_beside(config) if role.name == TEACHER else {},
        pictures=config.sees_pictures,
        train_tower=trains_tower(engine),
    )
    group = await start_trainers(spec, places, platform, logs, config.trainer, store)
    stack.callback(group.close)
    await group.build()
    for frozen in config.snapshots_of(role.name):  # before a checkpoint is loaded: of the run's first weights
        assert frozen.snapshot is not None
        await group.take_snapshot(frozen.snapshot, frozen.moves)
    if checkpoint is not None and role.trains:
        await load_state(group, checkpoint)
    if shares_device:
        await group.offload()  # an engine that starts needs its share of the device to be free
    return group


def _teacher(config: RunConfig | OfflineConfig) -> TeacherSpec | None:
    """What the policy's processes must know of teachers that are in its loss; None without one."""
    if not isinstance(config, RunConfig) or not config.algorithm.distill.in_loss or config.teachers is None:
        return None
    teachers = config.teachers
    precision = config.role_config(ROLES[TEACHER]).precision
    return TeacherSpec(tuple(map(Path, teachers.directories)), precision, teachers.numbers)


def _beside(config: RunConfig | OfflineConfig) -> dict[str, Path]:
    """The weights of all teachers but the first, by the name of their snapshot."""
    assert isinstance(config, RunConfig) and config.teachers is not None
    named = [(snapshot_of(number), Path(each)) for number, each in enumerate(config.teachers.directories)]
    return {name: directory for name, directory in named if name is not None}
