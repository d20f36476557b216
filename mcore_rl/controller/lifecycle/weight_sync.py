"""Which weights the rollout engines hold: they are brought up to the actor's, and checked.

How the weights travel is ``sync.update``'s business.
"""

from __future__ import annotations

from functools import partial

from mcore_rl.controller.lifecycle.fault_tolerance import EngineRestarter
from mcore_rl.sync.update import WeightUpdater


class WeightSync:
    """Keeps the engines at the actor's weights.

    Args:
        updater: brings weights into the engines and compares them.
        restarter: restarts an engine that dies in an update; the update then begins anew.
        check_freq: the engines' weights are compared with the actor's in every version that it divides.  0: only when
            engines have joined, at the start and after each restart.
    """

    def __init__(self, updater: WeightUpdater, restarter: EngineRestarter, check_freq: int = 0) -> None:
        self._updater, self._restarter, self._check_freq = updater, restarter, check_freq
        self._num_restarts = restarter.num_restarts  # as many as the engines that hold ``_version`` have had
        self._version: int | None = None

    @property
    def version(self) -> int | None:
        """Version of the weights that the engines were last given, and have not dropped; None: they have none."""
        return self._version

    async def update(self, version: int) -> None:
        """Make all engines hold the actor's weights as ``version``; nothing is sent where they do already.

        Raises as ``WeightUpdater.update``, and DeadEngineError where the restart limit is reached.
        """
        await self._restarter.repeat(partial(self._update, version))

    async def _update(self, version: int) -> None:
        if self._num_restarts != self._restarter.num_restarts:  # new engines, which hold the first weights
            self._num_restarts = self._restarter.num_restarts
            self._updater.rejoin()
            self._version = None
        if self._version == version:
            return
        await self._updater.update(version)
        if self._check_freq and version % self._check_freq == 0:
            await self._updater.check()
        self._version = version

    def engines_dropped_theirs(self) -> None:
        """Remember that the engines hold no weights."""
        self._version = None
