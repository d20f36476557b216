"""An engine in another process: typed methods over any way to send calls there.

A call names the method of ``RolloutEngine`` itself, so that its arguments and result are
type-checked; only ``perform``, on the other side, looks a method up by its name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from mcore_rl.rollout.protocol import (
    EngineMemory,
    EnginePart,
    Pause,
    Request,
    RolloutEngine,
    Sample,
    Sampling,
    Statistics,
)

P = ParamSpec("P")
T = TypeVar("T")
Verb = Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]  # a method of the protocols


class RemoteEngine(ABC):
    """A ``RolloutEngine`` and ``EnginePart``.

    Its methods use ``_ask``, which sends one call and returns its result.

    name: the engine's name in messages.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    @property
    def name(self) -> str:
        """The engine's name in messages."""
        return self._name

    @abstractmethod
    async def _ask(self, doing: str, verb: Verb[P, T], *args: P.args, **options: P.kwargs) -> T:
        """Calls the engine's method that has the name of ``verb``; returns or raises what it does.

        doing: what the engine is doing meanwhile, for the message if it dies.
        """

    @abstractmethod
    def generate(self, requests: Sequence[Request], sampling: Sampling) -> AsyncIterator[Sample]:
        """See ``RolloutEngine.generate``."""

    @abstractmethod
    async def shutdown(self) -> None:
        """See ``RolloutEngine.shutdown``."""

    async def classify(self, texts: Sequence[Sequence[int]]) -> list[float | str]:
        """See ``RolloutEngine.classify``."""
        return await self._ask(f"scoring {len(texts)} texts", RolloutEngine.classify, texts)

    async def abort(self, keys: Iterable[tuple[str, int]] | None = None) -> None:
        """See ``RolloutEngine.abort``."""
        await self._ask("aborting samples", RolloutEngine.abort, None if keys is None else tuple(keys))

    async def pause(self, mode: Pause) -> None:
        """See ``RolloutEngine.pause``."""
        await self._ask("pausing", RolloutEngine.pause, mode)

    async def resume(self) -> None:
        """See ``RolloutEngine.resume``."""
        await self._ask("resuming", RolloutEngine.resume)

    async def sleep(self, level: int = 1) -> None:
        """See ``RolloutEngine.sleep``."""
        await self._ask("going to sleep", RolloutEngine.sleep, level)

    async def wake(self, memory: EngineMemory | None = None) -> None:
        """See ``RolloutEngine.wake``."""
        await self._ask("waking up", RolloutEngine.wake, memory)

    async def version(self) -> int:
        """See ``RolloutEngine.version``."""
        return await self._ask("asked for its version", RolloutEngine.version)

    async def start_update(self, mode: Pause = Pause.keep) -> None:
        """See ``RolloutEngine.start_update``."""
        await self._ask("starting an update", RolloutEngine.start_update, mode)

    async def finish_update(self, version: int) -> None:
        """See ``RolloutEngine.finish_update``."""
        await self._ask(f"finishing the update to version {version}", RolloutEngine.finish_update, version)

    async def fail_update(self, cause: str) -> None:
        """See ``RolloutEngine.fail_update``."""
        await self._ask("giving an update up", RolloutEngine.fail_update, cause)

    async def call_workers(
        self, method: Callable[Concatenate[Any, P], T], /, *args: P.args, **options: P.kwargs
    ) -> list[T]:
        """See ``RolloutEngine.call_workers``."""
        results: list[T] = await self._ask(
            f"running {method.__name__}", RolloutEngine.call_workers, method, *args, **options
        )
        return results

    async def watch(self) -> None:
        """See ``EnginePart.watch``."""
        await self._ask("serving", EnginePart.watch)

    async def statistics(self) -> Statistics:
        """See ``RolloutEngine.statistics``."""
        return await self._ask("asked for its statistics", RolloutEngine.statistics)


async def perform(engine: object, verb: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Calls the method ``verb`` of ``engine``, for an ``_ask`` in another process."""
    return await getattr(engine, verb)(*args, **options)
