"""Keeps the weights of the rollout engines up to date with the actor's, and checks them.

``sync.update`` sends the weights, on the way that ``weight_transport`` says.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from mcore_rl.config.run import RunConfig
from mcore_rl.controller.lifecycle.engine_set import EngineSet
from mcore_rl.controller.lifecycle.fault_tolerance import EngineRestarter
from mcore_rl.controller.lifecycle.messages import warn
from mcore_rl.ground.errors import DeadEngineError, SyncError, WeightMapError
from mcore_rl.parallel.device import Platform
from mcore_rl.parallel.secret_store import StoreAccess
from mcore_rl.rollout.pool import EnginePool
from mcore_rl.rollout.protocol import Pause
from mcore_rl.runtime.placement import Places
from mcore_rl.sync.members import Address
from mcore_rl.sync.routed import RoutedTransport
from mcore_rl.sync.shared_memory import SharedMemoryTransport
from mcore_rl.sync.transport import Transport
from mcore_rl.sync.update import WeightUpdater


class WeightSync:
    """Keeps the engines at the actor's weights.

    Args:
        updater: sends weights to the engines and compares them.
        restarter: restarts an engine that dies in an update; the update then begins again.
        pool: draws with the engines, and sends them nothing while they receive weights.
        check_freq: compare the engines' weights with the actor's in every version that this divides.  0: only when
            engines have joined, at the start and after each restart.
        engines: of which others may join and leave; None: they stay as they are.
    """

    def __init__(
        self,
        updater: WeightUpdater,
        restarter: EngineRestarter,
        pool: EnginePool,
        check_freq: int = 0,
        engines: EngineSet | None = None,
    ) -> None:
        self._updater = updater
        self._restarter = restarter
        self._pool = pool
        self._check_freq = check_freq
        self._engines = engines
        self._updating = asyncio.Lock()
        self._num_restarts = restarter.num_restarts  # at the time when the engines received ``_version``
        self._version: int | None = None

    @property
    def version(self) -> int | None:
        """The version of the weights that the engines have; None: they have dropped them, or never received any."""
        return self._version

    @asynccontextmanager
    async def no_update(self) -> AsyncIterator[None]:
        """Within: no update is under way; waits for the end of one that is."""
        async with self._updating:
            yield

    async def update(self, version: int, pause: Pause = Pause.keep) -> None:
        """Sends the actor's weights to all engines as ``version``, unless they have that version already.

        An engine that died while others went on drawing is restarted first; they draw until it is ready.  Engines that
        are about to join do so, and receive them too.  One that cannot take these weights is left out, with a warning.

        pause: what happens to samples under way, see ``EnginePool.held``.
        Raises as ``WeightUpdater.update``, and DeadEngineError if the restart limit is reached.
        """
        async with self._updating:
            if (death := self._pool.death) is not None:
                await self._restarter.restart_dead(death)
            newcomers = [] if self._engines is None else self._engines.admit()
            is_theirs = self._version == version and self._num_restarts == self._restarter.num_restarts
            if is_theirs and not newcomers:
                return
            async with self._pool.held(pause):
                try:
                    await self._restarter.repeat(partial(self._update, version))
                except (SyncError, WeightMapError, DeadEngineError) as error:
                    if self._engines is None or not newcomers:
                        raise
                    names = ", ".join(each.name for each in newcomers)
                    warn(f"{names}: left out, since the update with it failed: {error}")
                    for each in newcomers:
                        self._engines.dismiss(each)
                    await self._restarter.repeat(partial(self._update, version))

    async def _update(self, version: int) -> None:
        if self._engines is not None:
            await self._engines.plan()
        if self._num_restarts != self._restarter.num_restarts:  # there are new engines, which have none
            self._num_restarts = self._restarter.num_restarts
            self._updater.rejoin()
            self._version = None
        await self._updater.update(version)
        if self._check_freq and version % self._check_freq == 0:
            await self._updater.check()
        self._version = version

    def engines_dropped_theirs(self) -> None:
        """Records that the engines have no weights any more."""
        self._version = None


def weight_transport(
    config: RunConfig, platform: Platform, places: Places, store: StoreAccess, name: str = "weights"
) -> Transport:
    """Through memory that all map on one host without accelerators; else in rounds, by the places of the ranks.

    store: where the members meet, under a name that no others have used.
    """
    trainer = config.trainer
    layout = config.rollout.layout
    address = Address(
        store=store,
        name=name,
        num_trainers=trainer.world_size,
        num_rollout=layout.world_size,
        timeout_s=trainer.timeout_s,
        join_timeout_s=trainer.timeout_s,
    )
    if not platform.is_accelerator and trainer.nnodes == 1:
        return SharedMemoryTransport(address=address)
    return RoutedTransport(address=address, platform=platform, sites=places.sites(layout, trainer.placement))
