"""Several engines of a reward model as one: a text goes to the engine with the fewest tokens to read."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from mcore_rl.rollout.protocol import Classifier

KEEP_WEIGHTS = 1  # level of sleep: nobody sends them again


class ClassifierPool:
    """Scores with ``engines`` of one reward model, which are awake.

    What an engine raises is raised: a dead one ends the run.

    The invariant: no engine that sleeps is given a text; texts that come meanwhile wait.
    """

    def __init__(self, engines: Sequence[Classifier]) -> None:
        assert engines, "a pool holds at least one engine"
        self._engines = tuple(engines)
        self._loads = [0] * len(engines)  # tokens to read
        self._awake, self._idle = asyncio.Event(), asyncio.Event()
        self._awake.set()
        self._idle.set()

    async def classify(self, tokens: Sequence[int]) -> float | str:
        """Return the score of one text, or vLLM's message where it has none; see ``Classifier.classify``."""
        while not self._awake.is_set():
            await self._awake.wait()
        self._idle.clear()
        place = min(range(len(self._loads)), key=self._loads.__getitem__)
        self._loads[place] += len(tokens)
        try:
            (found,) = await self._engines[place].classify([tokens])
        finally:
            self._loads[place] -= len(tokens)
            if not any(self._loads):
                self._idle.set()
        return found

    async def sleep(self) -> None:
        """Once all texts are read, give the accelerators' memory back; the weights wait in host memory."""
        self._awake.clear()
        await self._idle.wait()
        await asyncio.gather(*(engine.sleep(KEEP_WEIGHTS) for engine in self._engines))

    async def wake(self) -> None:
        """Take the memory again."""
        await asyncio.gather(*(engine.wake() for engine in self._engines))
        self._awake.set()
