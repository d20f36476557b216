"""Keeps the weights of the rollout engines up to date with the actor's, and checks them.

``sync.update`` sends the weights.
"""

from __future__ import annotations

from functools import partial

from mcore_rl.controller.lifecycle.fault_tolerance import EngineRestarter
from mcore_rl.rollout.pool import EnginePool
from mcore_rl.rollout.protocol import Pause
from mcore_rl.sync.update import WeightUpdater


class WeightSync:
    """Keeps the engines at the actor's weights.

    Args:
        updater: sends weights to the engines and compares them.
        restarter: restarts an engine that dies in an update; the update then begins again.
        pool: draws with the engines, and sends them nothing while they receive weights.
        check_freq: compare the engines' weights with the actor's in every version that this divides.  0: only when
            engines have joined, at the start and after each restart.
    """

    def __init__(
        self, updater: WeightUpdater, restarter: EngineRestarter, pool: EnginePool, check_freq: int = 0
    ) -> None:
        self._updater, self._restarter, self._pool, self._check_freq = updater, restarter, pool, check_freq
        self._num_restarts = restarter.num_restarts  # at the time when the engines received ``_version``
        self._version: int | None = None

    @property
    def version(self) -> int | None:
        """The version of the weights that the engines have; None: they have dropped them, or never received any."""
        return self._version

    async def update(self, version: int, pause: Pause = Pause.keep) -> None:
        """Sends the actor's weights to all engines as ``version``, unless they have that version already.

        An engine that died while others went on drawing is restarted first; they draw until it is ready.

        pause: what happens to samples under way, see ``EnginePool.held``.
        Raises as ``WeightUpdater.update``, and DeadEngineError if the restart limit is reached.
        """
        if (death := self._pool.death) is not None:
            await self._restarter.restart_dead(death)
        if self._version == version and self._num_restarts == self._restarter.num_restarts:
            return
        async with self._pool.held(pause):
            await self._restarter.repeat(partial(self._update, version))

    async def _update(self, version: int) -> None:
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
