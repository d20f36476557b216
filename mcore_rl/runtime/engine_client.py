"""What stands here for an engine on a node of the cluster: its methods, with their types, over a Ray actor."""

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
    """A ``RolloutEngine`` or ``Classifier`` below a Ray actor of ``RolloutWorker``, which alone is called by Ray here.

    new_worker: makes that actor, and another one for each restart.
    """

    def __init__(self, name: str, new_worker: Callable[[], Any]) -> None:
        super().__init__(name)
        self._new_worker = new_worker
        self._worker = new_worker()
        self._started: tuple[Any, ...] | None = None

    async def start(
        self, directory: Path, config: ServingConfig, *, cores: Sequence[int] | None, device_ids: Sequence[str] | None,
        log: Path,
    ) -> None:  # fmt: skip
        """Start the engine with the weights of ``directory``; see ``start_engine``."""
        self._started = (directory, config, cores, device_ids, log)
        await self._answered("starting", self._worker.start.remote(*self._started))

    async def restart(self) -> None:
        """Start anew as ``start`` did, with the weights of the checkpoint; what is left of the old processes ends."""
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
                ray.cancel(finishing)  # aborts them

    async def shutdown(self) -> None:
        """See ``RolloutEngine.shutdown``; its actor ends too."""
        with suppress(RayError):  # it is gone already
            await self._worker.close.remote()
        self.kill()

    def kill(self) -> None:
        """End the actor at once; the engine's processes end with it."""
        ray.kill(self._worker)

    async def _ask(self, doing: str, verb: Verb[P, T], *args: P.args, **options: P.kwargs) -> T:
        answer: T = await self._answered(doing, self._worker.perform.remote(verb.__name__, args, options))
        return answer

    async def _answered(self, doing: str, call: Any) -> Any:
        """What a method of ``RolloutWorker`` returned, unless that is an error."""
        try:
            answer = await call
        except RayError as error:
            reason = str(error).strip().splitlines()[-1]
            raise DeadEngineError(f"{self._name} died while {doing}: its Ray actor is gone ({reason})") from error
        if isinstance(answer, McoreRLError):
            raise answer
        return answer
