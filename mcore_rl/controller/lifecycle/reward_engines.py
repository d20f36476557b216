"""Starts the engines of a reward model: beside a trainer, or alone, for responses that were generated before.

Engines that die or hang are restarted beside a trainer, and their texts are scored again.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from mcore_rl.config.evaluate import EvaluateConfig
from mcore_rl.config.run import RunConfig
from mcore_rl.controller.lifecycle.fault_tolerance import EngineRestarter
from mcore_rl.controller.lifecycle.messages import warn
from mcore_rl.controller.step.reward_model import Encoder, RewardModel, prepare_encoder
from mcore_rl.parallel.device import Platform, detect
from mcore_rl.rollout.classifier_pool import ClassifierPool
from mcore_rl.runtime.cluster import ray_cluster
from mcore_rl.runtime.engine_client import EngineClient
from mcore_rl.runtime.placement import EngineBundles, place_engines
from mcore_rl.runtime.start import start_engines
from mcore_rl.runtime.train_group import TrainGroup
from mcore_rl.runtime.watchdog import Watchdog


class RestartingPool(ClassifierPool):
    """A pool whose engines are restarted when they die; their weights are on the disk, so nothing is sent to them.

    max_restarts: of all engines together; 0: every death is raised.
    """

    def __init__(self, engines: Sequence[EngineClient], max_restarts: int) -> None:
        super().__init__(engines)
        self._restarter = EngineRestarter(engines, self, max_restarts, warn=warn)

    async def classify(self, tokens: Sequence[int]) -> float | str:
        """See ``ClassifierPool.classify``.  Raises DeadEngineError if the restart limit is reached."""
        return await self._restarter.shared(partial(super().classify, tokens))

    def mark_alive(self) -> None:
        """Nothing is to be done: no engine is left out because it died."""

    async def sleep(self) -> None:
        """See ``ClassifierPool.sleep``."""
        await self._restarter.repeat(super().sleep)

    async def wake(self) -> None:
        """See ``ClassifierPool.wake``."""
        await self._restarter.repeat(super().wake)


async def start_reward_model(
    config: RunConfig | EvaluateConfig,
    encoder: Encoder,
    bundles: Sequence[EngineBundles],
    platform: Platform,
    logs: Path,
    trainers: TrainGroup | None,
    stack: AsyncExitStack,
) -> RewardModel:
    """Starts the reward model's engines in ``bundles``; they end when ``stack`` is closed.

    trainers: the workers whose devices the engines share; the engines then sleep until they are woken.  None: the
    engines have devices of their own.
    """
    judge, name, max_restarts, watchdog = config.reward_model, "reward engine", 0, None
    if isinstance(config, RunConfig):
        max_restarts, watchdog = config.trainer.max_restarts, Watchdog(config.trainer.watchdog)
    engines = await start_engines(
        Path(judge.model.path), judge, bundles, platform, logs, stack, trainers, name=name, watchdog=watchdog
    )
    pool = RestartingPool(engines, max_restarts)
    reward_model = RewardModel(encoder, pool, config.reward, judge.transform)
    stack.callback(reward_model.close)
    if trainers is not None:
        await reward_model.sleep()
    return reward_model


async def open_alone(config: EvaluateConfig, logs: Path, stack: AsyncExitStack) -> RewardModel:
    """Starts Ray and the reward model of ``mcore-rl evaluate``; both end when ``stack`` is closed.

    logs: the folder of the engines' logs.  Raises as ``prepare_encoder``, before a process is started.
    """
    directory = Path(config.reward_model.model.path).expanduser().resolve()
    judge = replace(config.reward_model, model=replace(config.reward_model.model, path=str(directory)))
    platform = detect(judge.device)
    encoder = prepare_encoder(judge, platform)
    stack.enter_context(ray_cluster(config.ray_init))
    places = await place_engines(judge.layout, platform, "reward_model")
    stack.callback(places.close)
    config = replace(config, reward_model=judge)
    return await start_reward_model(config, encoder, places.rollout, platform, logs, None, stack)
