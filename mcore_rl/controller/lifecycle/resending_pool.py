"""Generates with engines that may die: requests that a dead engine had not finished are sent again after its restart.

Every sample has a seed of its own, so the result is the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing

from mcore_rl.controller.lifecycle.device_sharing import DeviceSharing
from mcore_rl.controller.lifecycle.fault_tolerance import EngineRestarter
from mcore_rl.controller.lifecycle.weight_sync import WeightSync
from mcore_rl.ground.errors import DeadEngineError
from mcore_rl.rollout.pool import EnginePool
from mcore_rl.rollout.protocol import Request, Sample, Sampling

QUIET_S = 0.05  # between checks whether the other calls have ended


class ResendingPool:
    """A ``SampleSource`` over ``pool`` that survives the death of engines, as often as ``restarter`` allows.

    Restarted engines have no weights.  So before any more sampling, the devices go to the trainer and back, and
    all engines receive the weights that they had.  While the trainer has its turn, those are no more: who draws waits
    for the publishing of the new ones, which restarts the engines.
    """

    def __init__(
        self, pool: EnginePool, restarter: EngineRestarter, devices: DeviceSharing, weights: WeightSync
    ) -> None:
        self._pool = pool
        self._restarter = restarter
        self._devices = devices
        self._weights = weights
        self._num_calls = 0
        self._recovering = asyncio.Lock()

    async def generate(self, requests: Sequence[Request], sampling: Sampling) -> AsyncIterator[Sample]:
        """See ``RolloutEngine.generate``.  Raises DeadEngineError if the restart limit is reached."""
        unfinished = {request.key: request for request in requests}
        while unfinished:
            async with self._recovering:  # an agent's next turn may begin meanwhile: nobody draws from engines that
                num_restarts = self._restarter.num_restarts  # sleep, or that have no weights yet
                self._num_calls += 1
            try:
                async with aclosing(self._pool.generate(list(unfinished.values()), sampling)) as samples:
                    async for sample in samples:
                        del unfinished[sample.prompt_id, sample.index]
                        yield sample
                continue
            except DeadEngineError as error:
                death = error
            finally:
                self._num_calls -= 1
            await self._recover(death, num_restarts)

    async def _recover(self, death: DeadEngineError, num_restarts: int) -> None:
        """Recovers once for all calls that one death ended; waits for them, since engines must not sleep meanwhile.

        num_restarts: when the call began.  Others since then were a recovery, or a publishing that met the death.
        """
        async with self._recovering:
            if self._restarter.num_restarts != num_restarts:
                return
            while self._num_calls:
                await asyncio.sleep(QUIET_S)
            async with self._devices.engines_turn():
                if self._restarter.num_restarts != num_restarts:
                    return
                version = self._weights.version  # of the living, too
                await self._restarter.restart_dead(death)
                assert version is not None, "engines draw with weights that they were given"
                await self._devices.send_again(version)
