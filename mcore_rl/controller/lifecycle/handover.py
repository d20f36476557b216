"""Trainer and rollout take turns: who has the devices, and that the engines hold the trainer's weights when they draw.

Colocated, the part that is not at work leaves the device: the trainer to host memory, the engines to sleep with their
weights dropped, since they get new ones.  Separate, only weights travel.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from mcore_rl.config.trainer import Placement
from mcore_rl.controller.step.reward_model import RewardModel
from mcore_rl.errors import DeadEngineError
from mcore_rl.rollout.pool import EnginePool
from mcore_rl.rollout.weight_channel import Mode
from mcore_rl.runtime.worker_group import WorkerGroup
from mcore_rl.sync.check import Expected
from mcore_rl.sync.publish import Published
from mcore_rl.sync.update import WeightSync
from mcore_rl.training.offload import OffloadPart

KEEP_WEIGHTS, DROP_WEIGHTS = 1, 2  # levels of sleep


class ActorTrainers:
    """The actor's workers as ``sync.update.Trainers``."""

    def __init__(self, actor: WorkerGroup) -> None:
        self._actor = actor

    async def opening(self, first_rank: int, attempt: int) -> bytes:
        """See ``Trainers``."""
        opening: bytes = await self._actor.one(0, "opening", first_rank, attempt)
        return opening

    async def open(self, attempt: int) -> None:
        """See ``Trainers``."""
        await self._actor.all("open", attempt)

    async def publish(self, version: int, mode: Mode) -> list[Published]:
        """See ``Trainers``."""
        return await self._actor.all("publish", version, mode)

    async def expected(self, version: int) -> Expected:
        """See ``Trainers``."""
        found: list[Expected] = await self._actor.all("expected", version)
        return found[0]


class Handover:
    """actor: whose weights the engines get.

    reward_model: whose engines are awake while the rollout's are; their weights stay, in host memory meanwhile.
    restart_dead: returns when all engines live again, or raises the death that it was told of; None: it is raised.
    check_freq: engines' weights are compared with the actor's in each version that it divides; 0 is the first only.
    """

    def __init__(
        self,
        actor: WorkerGroup,
        engines: EnginePool,
        sync: WeightSync,
        placement: Placement,
        reward_model: RewardModel | None = None,
        restart_dead: Callable[[DeadEngineError], Awaitable[None]] | None = None,
        check_freq: int = 0,
    ) -> None:
        self._restart_dead, self._check_freq = restart_dead, check_freq
        self._actor, self._engines, self._sync = actor, engines, sync
        self._reward_model = reward_model
        self._colocated = placement is Placement.colocated
        self._held: int | None = None  # version of the weights that the engines have, awake or asleep

    async def to_rollout(self, version: int) -> None:
        """The engines are awake, with the actor's weights as ``version``; the trainer is off the devices.

        It left when it had trained (``TrainWorker.rest``), but for those weights.
        """
        while True:
            try:
                return await self._to_rollout(version)
            except DeadEngineError as error:
                await self._restart(error)
                await self._to_training(DROP_WEIGHTS)  # once more from the beginning, with engines that know nothing

    async def to_training(self, *, for_a_moment: bool = False) -> None:
        """The engines sleep, and the trainer may come back: each worker does with what it computes first.

        for_a_moment: its weights will not change, so that the engines keep theirs, in host memory.
        """
        while True:
            try:
                return await self._to_training(KEEP_WEIGHTS if for_a_moment else DROP_WEIGHTS)
            except DeadEngineError as error:
                await self._restart(error)

    async def revive(self, error: DeadEngineError) -> None:
        """After a death while the engines drew: all of them live, awake and with the weights that they had.

        ``error``: there were too many deaths.
        """
        version = self._held
        assert version is not None, "engines draw with weights that they were given"
        await self._restart(error)
        await self.to_training()
        await self.to_rollout(version)

    async def _restart(self, error: DeadEngineError) -> None:
        if self._restart_dead is None:
            raise error
        await self._restart_dead(error)
        self._sync.rejoin()
        self._held = None

    async def _to_rollout(self, version: int) -> None:
        if self._colocated:
            await self._engines.wake()
        if self._held != version:
            await self._sync.update(version)
            if self._check_freq and version % self._check_freq == 0:
                await self._sync.check()
            self._held = version
        if self._colocated:
            await self._actor.all("offload", [OffloadPart.weights])
            if self._reward_model is not None:
                await self._reward_model.wake()

    async def _to_training(self, level: int) -> None:
        if self._colocated:
            if self._reward_model is not None:
                await self._reward_model.sleep()
            await self._engines.sleep(level)
            self._held = self._held if level == KEEP_WEIGHTS else None
