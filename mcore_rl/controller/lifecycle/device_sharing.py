"""Hands the devices of a colocated run from the trainer to the engines and back.

The one that does not work frees the device's memory: the trainer moves to host memory, the engines sleep.  In a
separate run each has devices of its own, and nothing is moved.  ``weight_sync`` keeps the engines' weights up to date;
``fault_tolerance`` restarts engines that die.

The invariant, also where engines draw while the trainer trains: from ``to_trainer`` to ``to_engines`` the trainer has
its turn, in which its weights are of no version, and nobody else sends them to engines.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Protocol

from mcore_rl.config.trainer import Placement
from mcore_rl.controller.lifecycle.fault_tolerance import EngineRestarter
from mcore_rl.controller.lifecycle.weight_sync import WeightSync
from mcore_rl.rollout.pool import EnginePool
from mcore_rl.rollout.protocol import EngineMemory, Pause
from mcore_rl.runtime.train_group import TrainGroup
from mcore_rl.training.offload import OffloadPart

KEEP_WEIGHTS, DROP_WEIGHTS = 1, 2  # vLLM's levels of sleep


class Devices(Protocol):
    """Who has the devices: trainer and engines by turns (``DeviceSharing``), or the trainer always."""

    async def to_trainer(self, *, keep_weights: bool = False) -> None:
        """See ``DeviceSharing.to_trainer``."""
        ...

    async def to_engines(self, version: int, pause: Pause = Pause.keep) -> None:
        """See ``DeviceSharing.to_engines``."""
        ...


class SleepingScorer(Protocol):
    """Engines that score responses: of a reward model, or of a judge."""

    async def sleep(self) -> None:
        """Waits until all is scored, and releases the devices' memory."""
        ...

    async def wake(self) -> None:
        """Takes the memory back."""
        ...


class TrainerAlone:
    """Of a run without engines."""

    async def to_trainer(self, *, keep_weights: bool = False) -> None:
        """It has the devices."""

    async def to_engines(self, version: int, pause: Pause = Pause.keep) -> None:
        """There are none."""


class DeviceSharing:
    """Moves trainer and engines on and off the devices that they share.

    Args:
        placement: if separate, nothing is moved but weights.
        actor: its weights stay on the device until the engines have received them.
        engines: the rollout engines, which generate while they have the devices.
        weights: is told when the engines drop their weights.
        restarter: restarts an engine that dies while it wakes up or goes to sleep.
        keep_base: the engines apply adapters to weights that they receive once, and keep these in host memory.
        scorers: their engines are awake while the rollout's are; asleep, they keep their weights in host memory.
    """

    def __init__(
        self,
        placement: Placement,
        actor: TrainGroup,
        engines: EnginePool,
        weights: WeightSync,
        restarter: EngineRestarter,
        scorers: Sequence[SleepingScorer] = (),
        *,
        keep_base: bool = False,
    ) -> None:
        self._is_shared = placement is Placement.colocated
        self._actor = actor
        self._engines = engines
        self._weights = weights
        self._restarter = restarter
        self._scorers = scorers
        self._dropping = KEEP_WEIGHTS if keep_base else DROP_WEIGHTS
        self._turn, self._is_trainers = asyncio.Lock(), False  # held in the trainer's turn, and in ``engines_turn``

    @asynccontextmanager
    async def engines_turn(self) -> AsyncIterator[None]:
        """Within: the trainer's weights are those that it published last; waits until its turn is over."""
        async with self._turn:
            yield

    async def to_engines(self, version: int, pause: Pause = Pause.keep) -> None:
        """Ends the trainer's turn: gives the devices to the engines, with the actor's weights as ``version``.

        The engines take the memory of their weights beside the actor's and receive them; the actor then offloads its
        own, and the engines take their KV cache.  So a device never has both.  The trainer must already have offloaded
        everything else (``TrainWorker.rest``).

        pause: what happens to samples under way, see ``EnginePool.held``.  Raises as ``WeightSync.update``; the turn
        ends then, too, so that whoever waits for it learns of what is wrong by himself.
        """
        try:
            await self._wake_engines(version, pause)
        finally:
            if self._is_trainers:
                self._is_trainers = False
                self._turn.release()

    async def send_again(self, version: int) -> None:
        """Sends the engines the weights that they had, ``version``, after a restart; only within ``engines_turn``."""
        await self._wake_trainer(keep_weights=False)
        await self._wake_engines(version, Pause.keep)

    async def _wake_engines(self, version: int, pause: Pause) -> None:
        if not self._is_shared:
            await self._weights.update(version, pause)
            return
        while True:
            await self._restarter.repeat(partial(self._engines.wake, EngineMemory.weights))
            await self._weights.update(version, pause)
            await self._actor.offload([OffloadPart.weights])
            num_restarts = self._restarter.num_restarts
            await self._restarter.repeat(partial(self._engines.wake, EngineMemory.kv_cache))
            if self._restarter.num_restarts == num_restarts:
                break
            await self._restarter.repeat(partial(self._engines.sleep, self._dropping))  # a new engine has none of ours
            self._weights.engines_dropped_theirs()
        for scorer in self._scorers:
            await scorer.wake()

    async def to_trainer(self, *, keep_weights: bool = False) -> None:
        """Begins the trainer's turn: gives it the devices, whose workers load what they need when they need it.

        Waits until a recovery of engines that died has ended.

        keep_weights: the engines keep their weights in host memory, since the trainer will not change its own; else
        they drop them.
        """
        await self._turn.acquire()
        self._is_trainers = True
        await self._wake_trainer(keep_weights=keep_weights)

    async def _wake_trainer(self, *, keep_weights: bool) -> None:
        if not self._is_shared:
            return
        for scorer in self._scorers:
            await scorer.sleep()
        await self._restarter.repeat(partial(self._engines.sleep, KEEP_WEIGHTS if keep_weights else self._dropping))
        if not keep_weights:
            self._weights.engines_dropped_theirs()
