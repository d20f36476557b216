"""Starts the engines of a reward model: beside a trainer, or alone, for responses that were generated before."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

from mcore_rl.config.evaluate import EvaluateConfig
from mcore_rl.config.run import RunConfig
from mcore_rl.controller.programs.generate import logs_beside
from mcore_rl.controller.step.reward_model import Encoder, RewardModel, prepare_encoder
from mcore_rl.parallel.device import Platform, detect
from mcore_rl.rollout.classifier_pool import ClassifierPool
from mcore_rl.runtime.cluster import ray_cluster
from mcore_rl.runtime.placement import EngineBundles, place_engines
from mcore_rl.runtime.start import start_engines
from mcore_rl.runtime.train_group import TrainGroup


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
    judge, name = config.reward_model, "reward engine"
    engines = await start_engines(Path(judge.model.path), judge, bundles, platform, logs, stack, trainers, name=name)
    reward_model = RewardModel(encoder, ClassifierPool(engines), config.reward)
    stack.callback(reward_model.close)
    if trainers is not None:
        await reward_model.sleep()
    return reward_model


async def open_alone(config: EvaluateConfig, stack: AsyncExitStack) -> RewardModel:
    """Starts Ray and the reward model of ``mcore-rl evaluate``; both end when ``stack`` is closed.

    The engines' logs are written beside the responses.  Raises as ``prepare_encoder``, before a process is started.
    """
    directory = Path(config.reward_model.model.path).expanduser().resolve()
    judge = replace(config.reward_model, model=replace(config.reward_model.model, path=str(directory)))
    platform = detect(judge.device)
    encoder = prepare_encoder(judge, platform)
    logs = logs_beside(Path(config.path).expanduser().resolve())
    stack.enter_context(ray_cluster(config.ray_init))
    places = await place_engines(judge.layout, platform, "reward_model")
    stack.callback(places.close)
    config = replace(config, reward_model=judge)
    return await start_reward_model(config, encoder, places.rollout, platform, logs, None, stack)
