"""The controller's client of an engine on a node of the cluster: typed methods, which call a Ray actor."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import ray
from ray.exceptions import RayError

from mcore_rl.config.rollout import ServingConfig
from mcore_rl.errors import DeadEngineError, McoreRLError
from mcore_rl.rollout.protocol import Request, Sample, Sampling
from mcore_rl.rollout.remote_engine import RemoteEngine, Verb

P = ParamSpec("P")
T = TypeVar("T")


class EngineClient(RemoteEngine):
    """A ``RolloutEngine`` or ``Classifier`` whose engine runs under a Ray actor of ``RolloutWorker``.

    new_worker: makes that actor, and a new one for each restart.
    """

    def __init__(self, name: str, new_worker: Callable[[], Any]) -> None:
        super().__init__(name)
        self._new_worker = new_worker
        self._worker = new_worker()
        self._started: tuple[Any, ...] | None = None

    async def start(
        self, directory: Path, config: ServingConfig, *, cores: Sequence[int] | None, device_ids: Sequence[str] | None,
        log: Path, awaits_weights: bool = False,
    ) -> None:  # fmt: skip
        """Starts the engine with the weights of ``directory``, or without any; see ``start_engine``."""
        self._started = (directory, config, cores, device_ids, log, awaits_weights)
        await self._answered("starting", self._worker.start.remote(*self._started))

    async def restart(self) -> None:
        """Ends the old processes and starts the engine again as ``start`` did; it has no weights of an update."""
        assert self._started is not None, "start the engine first"
        await self.shutdown()
        self._worker = self._new_worker()
        await self._answered("starting again", self._worker.start.remote(*self._started))

    async def generate(self, requests: Sequence[Request], sampling: Sampling) -> AsyncGenerator[Sample]:
        """See ``RolloutEngine.generate``."""
        finishing = self._worker.generate.options(num_returns="streaming").remote(list(requests), sampling)
        unfinished = len(requests)
        try:
            async for call in finishing:
                sample = await self._answered(f"generating {unfinished} samples", call)
                unfinished -= 1
                yield sample
        finally:
            if unfinished:
                ray.cancel(finishing)  # aborts the unfinished samples

    async def shutdown(self) -> None:
        """See ``RolloutEngine.shutdown``; also ends the actor."""
        with suppress(RayError):  # the actor is gone already
            await self._worker.close.remote()
        self.kill()

    def kill(self) -> None:
        """Kills the actor; the engine's processes end with it."""
        ray.kill(self._worker)

    async def _ask(self, doing: str, verb: Verb[P, T], *args: P.args, **options: P.kwargs) -> T:
        answer: T = await self._answered(doing, self._worker.perform.remote(verb.__name__, args, options))
        return answer

    async def _answered(self, doing: str, call: Any) -> Any:
        """Returns the result of a method of ``RolloutWorker``, or raises the error that it returned.

        doing: what the engine was doing, for the message of the DeadEngineError if the actor is gone.
        """
        try:
            answer = await call
        except RayError as error:
            reason = str(error).strip().splitlines()[-1]
            raise DeadEngineError(f"{self._name} died while {doing}: its Ray actor is gone ({reason})") from error
        if isinstance(answer, McoreRLError):
            raise answer
        return answer
