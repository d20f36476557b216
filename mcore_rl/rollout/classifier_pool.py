"""A pool of a reward model's engines: each text goes to the engine that has the fewest tokens left to read."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Sequence

from mcore_rl.rollout.protocol import Classifier

KEEP_WEIGHTS = 1  # level of sleep: nobody will send these weights again


class ClassifierPool:
    """Scores texts with ``engines`` of one reward model, which must be awake at first.

    It raises what an engine raises; in a run, ``controller.lifecycle.reward_engines`` restarts engines that died.
    The invariant: no engine receives a text while it sleeps; texts that arrive meanwhile wait.
    """

    def __init__(self, engines: Sequence[Classifier]) -> None:
        assert engines, "a pool holds at least one engine"
        self._engines = tuple(engines)
        self._loads = [0] * len(engines)  # tokens to read
        self._awake, self._idle = asyncio.Event(), asyncio.Event()
        self._awake.set()
        self._idle.set()

    async def classify(self, tokens: Sequence[int]) -> float | str:
        """Returns the score of one text, or vLLM's message if it has none; see ``Classifier.classify``."""
        while not self._awake.is_set():
            await self._awake.wait()
        self._idle.clear()
        place = min(range(len(self._loads)), key=self._loads.__getitem__)
        self._loads[place] += len(tokens)
        try:
            (score,) = await self._engines[place].classify([tokens])
        finally:
            self._loads[place] -= len(tokens)
            if not any(self._loads):
                self._idle.set()
        return score

    async def sleep(self) -> None:
        """Waits until all texts are scored, then releases the accelerators' memory; weights move to host memory."""
        self._awake.clear()
        await self._idle.wait()
        await _all(engine.sleep(KEEP_WEIGHTS) for engine in self._engines)

    async def wake(self) -> None:
        """Moves the weights back to the accelerators; waiting texts go on."""
        await _all(engine.wake() for engine in self._engines)
        self._awake.set()


async def _all(calls: Iterable[Awaitable[None]]) -> None:
    """Raises the first failure of ``calls`` once all have answered."""
    for answer in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(answer, BaseException):
            raise answer
