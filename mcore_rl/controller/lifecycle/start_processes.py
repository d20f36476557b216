"""Starts the processes of a run on their places: the trainer, the rollout engines, the reward model, the judge.

Engines that outlived a trainer are taken as they are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from mcore_rl.config.run import RunConfig
from mcore_rl.config.trainer import Placement
from mcore_rl.controller.lifecycle.elastic_engines import Starting
from mcore_rl.controller.lifecycle.engine_set import Kept, LivingEngines, Member
from mcore_rl.controller.lifecycle.fixed_engines import JUDGE, REWARD_MODEL, TITLES, FixedEngines, scorers, start_fixed
from mcore_rl.controller.lifecycle.judge_engines import PATH, JudgeEngines
from mcore_rl.controller.lifecycle.messages import note
from mcore_rl.controller.lifecycle.model_checks import engine_adapters
from mcore_rl.controller.lifecycle.preparation import Prepared, models_of
from mcore_rl.controller.lifecycle.start_plan import cluster_at_hand
from mcore_rl.controller.lifecycle.start_roles import start_roles
from mcore_rl.controller.step.reward_model import RewardModel
from mcore_rl.parallel.device import Platform
from mcore_rl.parallel.secret_store import StoreAccess
from mcore_rl.planning.overheads import ProcessMemory
from mcore_rl.planning.serving import serving
from mcore_rl.planning.training import engine_lora
from mcore_rl.rollout.served import Served
from mcore_rl.runtime.engine_client import EngineClient
from mcore_rl.runtime.placement import EngineBundles, Places, place
from mcore_rl.runtime.seen_paths import demand_seen
from mcore_rl.runtime.start import Joining, start_engines
from mcore_rl.runtime.train_group import TrainGroup
from mcore_rl.runtime.watchdog import Watchdog
from mcore_rl.tracking.sinks import Tracker

A = TypeVar("A")
B = TypeVar("B")


@dataclass(frozen=True)
class Start:
    """How one attempt at a run is started.

    store: where the workers of a role meet.
    leaves_behind: whether the plan has room for the policy's optimizer state while the engines receive weights.
    """

    config: RunConfig
    prepared: Prepared
    platform: Platform
    tracker: Tracker
    store: StoreAccess
    leaves_behind: bool

    @property
    def directory(self) -> Path:
        """The run's."""
        return Path(self.config.trainer.default_local_dir)

    async def processes(self, living: LivingEngines, stack: AsyncExitStack) -> tuple[dict[str, TrainGroup], Kept]:
        """Starts all processes, but for those that ``living`` has, which is told of the others.

        Returns (the workers of each role, which end when ``stack`` is closed; the engines).
        """
        if living.kept is not None:
            self.tracker.now("starting the trainer")
            names = ", ".join(member.name for member in living.kept.members)
            note(f"{names}: alive, and kept while the trainer is started again")
            return await self._roles(living.kept.places, stack), living.kept
        trainer = self.config.trainer
        policy = self.config.policy.name
        layouts = {key: each.layout for key, each in self.config.scorers.items()}
        places = await place(trainer, self.config.rollout.layout, self.platform, layouts)
        living.stack.callback(places.close)
        await demand_seen(models_of(self.config), places.nodes)
        colocated = trainer.placement is Placement.colocated
        watchdog = Watchdog(trainer.watchdog, trainer.timeout_s)
        if colocated and self.platform.is_accelerator:  # engines measure what the trainer left free of a device
            self.tracker.now("starting the trainer")
            groups = await self._roles(places, stack)
            self.tracker.now("starting the rollout engines")
            members = await self._engines(places, watchdog, living.stack, groups[policy])
        else:
            self.tracker.now("starting the trainer and the rollout engines")
            engines = self._engines(places, watchdog, living.stack)
            groups, members = await _together(self._roles(places, stack), engines, self._tell_first)
        shared = groups[policy] if colocated else None
        living.kept = Kept(places, members, *await self._scorers(places, shared, living.stack), watchdog)
        return groups, living.kept

    def _tell_first(self, number: int) -> None:
        """Shows which of the two is ready, the trainer (0) or the engines (1), while the other is not."""
        ready, waited_for = [("trainer", "rollout engines"), ("rollout engines", "trainer")][number]
        self.tracker.now(f"starting the {waited_for}; ready: the {ready}")

    async def _scorers(
        self, places: Places, shared: TrainGroup | None, stack: AsyncExitStack
    ) -> tuple[RewardModel | None, JudgeEngines | None, list[FixedEngines]]:
        """The reward model and the judge of ours, as far as the run has them, and the engines of both.

        shared: whose devices they have.
        """
        config = self.config
        prepared = self.prepared
        engines = dict[str, FixedEngines]()
        for key, served in scorers(config).items():
            self.tracker.now(f"starting {TITLES[key]}")
            engines[key] = await start_fixed(
                served, places.scorers[key], self.platform, self._logs, stack, shared, config.trainer
            )
        reward_model = judge = None
        if prepared.encoder is not None:
            transform = config.reward_model.transform
            reward_model = RewardModel(prepared.encoder, engines[REWARD_MODEL], config.reward, transform)
            stack.callback(reward_model.close)
        if prepared.judge_tokenizer is not None:
            files = prepared.identity.contents[PATH]
            judge = JudgeEngines(prepared.judge_tokenizer, engines[JUDGE], config.reward.judge, files)
            stack.callback(judge.close)
        return reward_model, judge, [*engines.values()]

    def newcomers(self, kept: Kept, living: LivingEngines) -> Starting:
        """How engines are started that join ``kept``."""
        config = self.config
        platform = self.platform

        async def start(joins: Joining, bundles: EngineBundles) -> Member:
            (client,) = await self._start_engines([bundles], kept.watchdog, living.stack, joins=joins)
            return Member(client, joins.slot, bundles)

        model = self.prepared.models[config.policy.name]
        processes = ProcessMemory.of(cluster_at_hand(config.trainer, platform))
        room = serving(
            model,
            config.rollout,
            device_bytes=None,
            processes=processes,
            latent_attention=False,
            lora=engine_lora(config, model),
        )
        per_rank = room.weights + room.adapters + room.working + room.cache + room.packed + processes.engine
        return Starting(
            trainer=config.trainer,
            rollout=config.rollout,
            platform=platform,
            places=kept.places,
            start=start,
            sees=partial(demand_seen, models_of(config)),
            host_bytes=config.rollout.layout.engine_size * per_rank,
        )

    async def _roles(self, places: Places, stack: AsyncExitStack) -> dict[str, TrainGroup]:
        return await start_roles(
            self.config,
            self.prepared.checkpoint,
            places,
            self.platform,
            self.store,
            stack,
            leaves_behind=self.leaves_behind,
        )

    async def _engines(
        self, places: Places, watchdog: Watchdog, stack: AsyncExitStack, trainers: TrainGroup | None = None
    ) -> list[Member]:
        engines = await self._start_engines(places.rollout, watchdog, stack, trainers)
        return [Member(client, slot, places.rollout[slot]) for slot, client in enumerate(engines)]

    @property
    def _logs(self) -> Path:
        return self.directory / "logs"

    async def _start_engines(
        self,
        bundles: Sequence[EngineBundles],
        watchdog: Watchdog,
        stack: AsyncExitStack,
        trainers: TrainGroup | None = None,
        joins: Joining | None = None,
    ) -> list[EngineClient]:
        """``start_engines``, which draw for the policy."""
        policy = Served(
            name="engine",
            directory=Path(self.config.model_directory),
            config=self.config.served_rollout,
            follows_actor=True,
            adapters=engine_adapters(self.config),
            pictures=self.config.sees_pictures,
        )
        return await start_engines(
            policy, bundles, self.platform, self._logs, stack, trainers, watchdog=watchdog, joins=joins
        )


async def _together(
    first: Coroutine[Any, Any, A], second: Coroutine[Any, Any, B], ready: Callable[[int], None]
) -> tuple[A, B]:
    """Awaits both at the same time; if one fails, raises its error once the other has ended.

    ready: called with the number of the one that ends first, if it does well.
    """
    both = asyncio.ensure_future(first), asyncio.ensure_future(second)

    def told(ended: asyncio.Future[Any]) -> None:
        if not ended.cancelled() and ended.exception() is None and not all(each.done() for each in both):
            ready(both.index(ended))

    for each in both:
        each.add_done_callback(told)
    try:
        made, also_made = await asyncio.gather(*both)
        return made, also_made
    finally:
        for each in both:
            each.cancel()
        await asyncio.wait(both)
