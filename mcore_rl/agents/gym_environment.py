"""Text environments with gymnasium's API (``reset``, ``step``) as interactions.  The package itself is not needed.

The model's turn is the action, the observation is the user's answer, and the reward is the turn's.  ``terminated`` or
``truncated`` ends the episode.  The row's prompt holds what ``reset`` says: ``interaction_kwargs`` names the seed and
options that say it.
"""

from __future__ import annotations

import asyncio
import importlib
from typing import Any

from mcore_rl.agents.interactions import EpisodeInteraction


class GymEnvironment(EpisodeInteraction):
    """An environment for each episode.

    config: ``env``, MODULE:NAME of a class or function that makes one, or an id that gymnasium knows; its ``kwargs``.

    ValueError: ``env`` names nothing that makes an environment.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self._make = _maker(str(config.get("env") or ""))
        self._kwargs = dict(config.get("kwargs") or {})
        self._environments: dict[str, Any] = {}
        self._earned: dict[str, float] = {}

    async def start_interaction(
        self,
        instance_id: str,
        seed: int | None = None,
        options: dict[str, Any] | None = None,
        observation: str | None = None,
        **kwargs: Any,
    ) -> None:
        """See ``EpisodeInteraction``.

        seed, options: of ``reset``.  observation: that it must give, if the row says so; ValueError: it gives another.
        """
        environment = await asyncio.to_thread(self._make, **self._kwargs)
        self._environments[instance_id] = environment
        self._earned[instance_id] = 0.0
        first, _ = await asyncio.to_thread(environment.reset, seed=seed, options=options)
        if observation is not None and first != observation:
            await self.finalize_interaction(instance_id)
            raise ValueError(f"reset says {first!r}, and the row's prompt has {observation!r}")

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float | None, dict[str, Any]]:
        """See ``EpisodeInteraction``.  TypeError: the observation is no text."""
        action = str(messages[-1]["content"])
        said, reward, terminated, truncated, _ = await asyncio.to_thread(self._environments[instance_id].step, action)
        if not isinstance(said, str):
            raise TypeError(f"the observation is {type(said).__name__}, no text. Wrap the environment")
        self._earned[instance_id] += float(reward)
        return bool(terminated or truncated), said, float(reward), {}

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        """What the episode has earned so far."""
        return self._earned[instance_id]

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """See the method of ``EpisodeInteraction``."""
        self._earned.pop(instance_id, None)
        environment = self._environments.pop(instance_id, None)
        if environment is not None and hasattr(environment, "close"):
            await asyncio.to_thread(environment.close)


def _maker(env: str) -> Any:
    module, _, name = env.partition(":")
    if name:
        make = vars(importlib.import_module(module)).get(name)
        if not callable(make):
            raise ValueError(f"env={env!r}: the module defines no {name} that makes an environment")
        return make
    try:
        gymnasium = importlib.import_module("gymnasium")
    except ImportError as error:
        problem = f"env={env!r} is no MODULE:NAME, and the package gymnasium, which knows ids, is not installed"
        raise ValueError(problem) from error
    return lambda **kwargs: gymnasium.make(env, **kwargs)
