"""Engines of models whose weights never change, beside a trainer or alone: a judge's, a reward model's.

Engines that die or hang are restarted, and what they were asked is asked again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from mcore_rl.config.evaluate import EvaluateConfig
from mcore_rl.config.run import RunConfig
from mcore_rl.config.trainer import TrainerConfig
from mcore_rl.controller.lifecycle.fault_tolerance import EngineRestarter
from mcore_rl.controller.lifecycle.messages import warn
from mcore_rl.controller.step.reward_model import RewardModel, prepare_encoder
from mcore_rl.parallel.device import Platform, detect
from mcore_rl.rollout.pool import EnginePool
from mcore_rl.rollout.protocol import Request, Sample, Sampling
from mcore_rl.rollout.served import Served
from mcore_rl.runtime.cluster import ray_cluster
from mcore_rl.runtime.engine_client import EngineClient
from mcore_rl.runtime.placement import EngineBundles, place_engines
from mcore_rl.runtime.start import start_engines
from mcore_rl.runtime.train_group import TrainGroup
from mcore_rl.runtime.watchdog import Watchdog

T = TypeVar("T")
# The configuration groups of their sizes, and what each is called.
REWARD_MODEL = "reward_model"
JUDGE = "reward.judge.engines"
TITLES = {REWARD_MODEL: "the reward model", JUDGE: "the judge"}


class FixedEngines:
    """Asks the engines of one model, which must be awake at first.

    max_num_seqs: that one engine runs at once.
    max_restarts: of all engines together; 0: every death is raised.
    The invariant: no engine is asked while it sleeps; who asks meanwhile waits.
    """

    def __init__(self, engines: Sequence[EngineClient], max_num_seqs: int, max_restarts: int) -> None:
        self.engines = engines
        self._pool = EnginePool(engines, max_num_seqs, fixed=True)
        self._restarter = EngineRestarter(engines, self._pool, max_restarts, warn=warn)
        self._awake = asyncio.Event()
        self._awake.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._num_asked = 0

    async def sample(self, request: Request, sampling: Sampling) -> Sample:
        """One sample.  Raises what ``EnginePool.generate`` does; DeadEngineError if the restart limit is reached."""

        async def drawn() -> Sample:
            (sample,) = [sample async for sample in self._pool.generate([request], sampling)]
            return sample

        return await self._asked(drawn)

    async def classify(self, tokens: Sequence[int]) -> float | str:
        """See ``EnginePool.classify``.  Raises DeadEngineError if the restart limit is reached."""
        return await self._asked(partial(self._pool.classify, tokens))

    async def _asked(self, work: Callable[[], Awaitable[T]]) -> T:
        while not self._awake.is_set():
            await self._awake.wait()
        self._num_asked += 1
        self._idle.clear()
        try:
            return await self._restarter.shared(work)
        finally:
            self._num_asked -= 1
            if not self._num_asked:
                self._idle.set()

    async def sleep(self) -> None:
        """Waits until all is answered, then releases the accelerators' memory; weights move to host memory."""
        self._awake.clear()
        await self._idle.wait()
        await self._restarter.repeat(self._pool.sleep)

    async def wake(self) -> None:
        """Moves the weights back to the accelerators; who waits is answered."""
        await self._restarter.repeat(self._pool.wake)
        self._awake.set()


def scorers(config: RunConfig) -> dict[str, Served]:
    """The models of a run that score, by the configuration groups of their sizes (``RunConfig.scorers``)."""
    rows = dict[str, Served]()
    if config.reward_model.enable:
        rows[REWARD_MODEL] = _reward_model(config)
    judge = config.reward.judge
    if judge.path is not None:
        engines = judge.engines.served(judge.max_tokens)
        rows[JUDGE] = Served(name="judge engine", directory=Path(judge.path), config=engines)
    return rows


def _reward_model(config: RunConfig | EvaluateConfig) -> Served:
    model = config.reward_model
    return Served(name="reward engine", directory=Path(model.model.path), config=model)


async def start_fixed(
    served: Served,
    bundles: Sequence[EngineBundles],
    platform: Platform,
    logs: Path,
    stack: AsyncExitStack,
    trainers: TrainGroup | None = None,
    trainer: TrainerConfig | None = None,
) -> FixedEngines:
    """Starts the engines of ``served`` in ``bundles``; they end when ``stack`` is closed.

    trainers: the workers whose devices the engines share; the engines then sleep until they are woken.  None: the
    engines have devices of their own.
    trainer: says how often they are restarted, and when one hangs; None: never, and by the default limits.
    """
    watchdog = None if trainer is None else Watchdog(trainer.watchdog)
    engines = await start_engines(served, bundles, platform, logs, stack, trainers, watchdog=watchdog)
    fixed = FixedEngines(engines, served.config.max_num_seqs, 0 if trainer is None else trainer.max_restarts)
    if trainers is not None:
        await fixed.sleep()
    return fixed


async def open_alone(config: EvaluateConfig, logs: Path, stack: AsyncExitStack) -> RewardModel:
    """Starts Ray and the reward model of ``mcore-rl evaluate``; both end when ``stack`` is closed.

    logs: the folder of the engines' logs.  Raises as ``prepare_encoder``, before a process is started.
    """
    directory = Path(config.reward_model.model.path).expanduser().resolve()
    judge = replace(config.reward_model, model=replace(config.reward_model.model, path=str(directory)))
    platform = detect(judge.device)
    encoder = prepare_encoder(judge, platform)
    stack.enter_context(ray_cluster(config.ray_init))
    places = await place_engines(judge.layout, platform, REWARD_MODEL)
    stack.callback(places.close)
    served = _reward_model(replace(config, reward_model=judge))
    engines = await start_fixed(served, places.rollout, platform, logs, stack)
    reward_model = RewardModel(encoder, engines, config.reward, judge.transform)
    stack.callback(reward_model.close)
    return reward_model
