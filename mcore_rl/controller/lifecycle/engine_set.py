"""Which engines a run has: they may join and leave while it goes on, and outlive a trainer that dies.

A change takes effect at a weight update: the plan of the copies and the channel are made anew for all engines then.
``elastic_engines`` starts and ends them as somebody asks; ``weight_sync`` updates them.

The invariant: an engine that joins draws nothing before it has received weights and was checked, and one that leaves
gets no weights any more.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

from mcore_rl.config.rollout import RolloutLayout
from mcore_rl.config.trainer import Placement
from mcore_rl.controller.lifecycle.fault_tolerance import EngineRestarter
from mcore_rl.controller.lifecycle.fixed_engines import FixedEngines
from mcore_rl.controller.lifecycle.judge_engines import JudgeEngines
from mcore_rl.controller.rollouts.kept_draws import KeptDraws
from mcore_rl.controller.step.reward_model import RewardModel
from mcore_rl.ground.errors import DeadWorkerError
from mcore_rl.rollout.pool import EnginePool
from mcore_rl.runtime.engine_client import EngineClient
from mcore_rl.runtime.placement import EngineBundles, Places, live_nodes
from mcore_rl.runtime.watchdog import Watchdog
from mcore_rl.sync.update import WeightUpdater


@dataclass(frozen=True, eq=False)
class Member:
    """An engine of the run.  slot: its place among the engines, of which another takes it over when it has left."""

    client: EngineClient
    slot: int
    bundles: EngineBundles

    @property
    def name(self) -> str:
        """As in messages and in the names of logs."""
        return self.client.name


def layout_of(one: RolloutLayout, num_engines: int) -> RolloutLayout:
    """The layout of ``num_engines`` engines like those of ``one``."""
    return replace(one, dp=num_engines * one.engine_dp)


class EngineSet:
    """The engines that draw and are updated.

    Args:
        members: those to begin with, in the order of their rollout ranks; kept as the engines are.
        pool, restarter, updater: work with all of them.
        layout: of any number of engines like these.
        connect: lets the training ranks plan for these engines.

    newcomers: that are ready, and join at the next update.  lanes: what the members do.
    """

    def __init__(
        self,
        members: list[Member],
        pool: EnginePool,
        restarter: EngineRestarter,
        updater: WeightUpdater,
        layout: RolloutLayout,
        connect: Callable[[Sequence[Member]], Awaitable[None]],
    ) -> None:
        self.members = members
        self.newcomers = list[Member]()
        self.lanes = [member.client.lane for member in members]
        self._pool = pool
        self._restarter = restarter
        self._updater = updater
        self._layout = layout
        self._connect = connect
        self._is_planned = True

    def admit(self) -> list[Member]:
        """Lets the newcomers join, who have no weights yet; returns them."""
        newcomers = self.newcomers
        self.newcomers = []
        for member in newcomers:
            self.members.append(member)
            self.lanes.append(member.client.lane)
            self._pool.add(member.client)
            self._restarter.add(member.client)
            self._is_planned = False
        return newcomers

    def dismiss(self, member: Member) -> None:
        """Lets ``member`` receive neither weights nor requests; ``EnginePool.drain`` gives its samples to others."""
        self.members.remove(member)
        self.lanes.remove(member.client.lane)
        self._pool.retire(member.client)
        self._restarter.remove(member.client)
        self._is_planned = False

    async def plan(self) -> None:
        """Makes the plan for the members that there are, if they changed; before an update, while nobody trains."""
        if not self._is_planned:
            await self._connect(self.members)
            self._updater.take([member.client for member in self.members], layout_of(self._layout, len(self.members)))
            self._is_planned = True


@dataclass(frozen=True)
class Kept:
    """What a run whose trainer died leaves to the next attempt.

    scorers: engines that sleep and wake with those that draw.
    """

    places: Places
    members: list[Member]
    reward_model: RewardModel | None
    judge: JudgeEngines | None
    scorers: list[FixedEngines]
    watchdog: Watchdog


class LivingEngines:
    """Keeps Ray and engines on devices of their own while a run begins again because a training process died.

    A context manager, which ends what is kept.  stack: closes it.  left: what was drawn and not trained when the last
    attempt ended.
    """

    def __init__(self) -> None:
        self.stack = AsyncExitStack()
        self.kept: Kept | None = None
        self.left: KeptDraws | None = None
        self.num_attempts = 0

    async def __aenter__(self) -> LivingEngines:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends the engines, and Ray if the run started it."""
        self.kept, stack, self.stack = None, self.stack, AsyncExitStack()
        await stack.aclose()

    @asynccontextmanager
    async def attempt(self, placement: Placement) -> AsyncIterator[None]:
        """Within: an attempt at the run.  Afterwards all is closed, but for what the death of a trainer leaves alive.

        Engines that share devices with the trainer are not kept: their memory is its too.
        """
        self.num_attempts += 1
        if self.kept is not None and not self.kept.places.nodes <= live_nodes():
            await self.close()
        keeps = False
        try:
            yield
        except DeadWorkerError:
            keeps = placement is Placement.separate and self.kept is not None
            raise
        finally:
            if not keeps:
                await self.close()
