"""A rollout engine on a node of the cluster: a Ray actor that holds an engine process, and what stands for it here.

The actor is thin: vLLM runs in a process of its own below it (``rollout.engine.process``), with an environment of its
own, and ends with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from mcore_rl.config.rollout import RolloutConfig, ServingConfig
from mcore_rl.errors import DeadEngineError, McoreRLError
from mcore_rl.rollout.engine.process import EngineProcess, start_engine
from mcore_rl.rollout.protocol import Pause, Request, Sample, Sampling, Statistics

EXTENSION = "mcore_rl.rollout.receiver.worker_extension.WeightReceiver"


class RolloutWorker:
    """The class of a Ray actor whose methods are coroutines: many calls run beside each other."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._engine: EngineProcess | None = None

    async def start(
        self, directory: Path, config: ServingConfig, cores: Sequence[int] | None, device_ids: Sequence[str] | None,
        log: Path,
    ) -> McoreRLError | None:  # fmt: skip
        """Start the engine; the error of it, if any, as a value: Ray would wrap what is raised."""
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            engine = start_engine(
                self._name,
                directory,
                config,
                cores=cores,
                device_ids=device_ids,
                extension=EXTENSION if isinstance(config, RolloutConfig) else None,  # others' weights never change
                log=log,
                wait=False,
            )
            await asyncio.to_thread(engine.wait_until_ready)
        except McoreRLError as error:
            return error
        self._engine = engine
        return None

    async def device_ids(self) -> list[str]:
        """The accelerators that Ray gave to this actor."""
        return [str(index) for index in ray.get_gpu_ids()]

    async def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Sample] | McoreRLError:
        """All samples, once they are finished: the pool asks for one prompt's at a time."""
        try:
            return [sample async for sample in self._live.generate(requests, sampling)]
        except McoreRLError as error:
            return error

    async def call(self, method: str, *args: Any, **options: Any) -> Any:
        """Any other verb of the engine."""
        try:
            return await getattr(self._live, method)(*args, **options)
        except McoreRLError as error:
            return error

    async def pid(self) -> int:
        """Of the engine's process, which leads a process group."""
        return self._live.pid

    async def close(self) -> None:
        """End the engine's processes."""
        if self._engine is not None:
            await asyncio.to_thread(self._engine.close)

    @property
    def _live(self) -> EngineProcess:
        assert self._engine is not None, "start the engine first"
        return self._engine


class RayEngine:
    """A ``RolloutEngine`` or ``Classifier`` whose process is below ``worker``, a Ray actor of ``RolloutWorker``.

    new_worker: makes that actor, and another one should it die.
    """

    def __init__(self, name: str, new_worker: Callable[[], Any]) -> None:
        self._name, self._new_worker = name, new_worker
        self.worker = new_worker()
        self._started: tuple[Any, ...] | None = None

    @property
    def name(self) -> str:
        """What messages call it."""
        return self._name

    async def start(
        self, directory: Path, config: ServingConfig, *, cores: Sequence[int] | None, device_ids: Sequence[str] | None,
        log: Path,
    ) -> None:  # fmt: skip
        """Load the checkpoint.  Raises what ``start_engine`` raises."""
        self._started = (directory, config, cores, device_ids, log)
        await self._done(self.worker.start.remote(*self._started), "starting")

    async def restart(self) -> None:
        """Begin anew, as ``start`` did, with the checkpoint's weights; what is left of the old processes ends."""
        assert self._started is not None, "start the engine first"
        await self.shutdown()
        self.worker = self._new_worker()
        await self._done(self.worker.start.remote(*self._started), "starting again")

    async def generate(self, requests: Sequence[Request], sampling: Sampling) -> AsyncIterator[Sample]:
        """See ``RolloutEngine.generate``; samples come when all of ``requests`` are finished."""
        call = self.worker.generate.remote(list(requests), sampling)
        try:
            samples = await self._done(call, f"generating {len(requests)} samples")
        except asyncio.CancelledError:
            ray.cancel(call)  # aborts what is left of them
            raise
        for sample in samples:
            yield sample

    async def classify(self, texts: Sequence[Sequence[int]]) -> list[float | str]:
        """See ``Classifier.classify``."""
        return list(await self._done(self.worker.call.remote("classify", texts), f"scoring {len(texts)} texts"))

    async def abort(self, keys: Iterable[tuple[str, int]] | None = None) -> None:
        """See ``RolloutEngine.abort``."""
        await self._call("abort", None if keys is None else tuple(keys))

    async def pause(self, mode: Pause) -> None:
        """See ``RolloutEngine.pause``."""
        await self._call("pause", mode)

    async def resume(self) -> None:
        """See ``RolloutEngine.resume``."""
        await self._call("resume")

    async def sleep(self, level: int = 1) -> None:
        """See ``RolloutEngine.sleep``."""
        await self._call("sleep", level)

    async def wake(self) -> None:
        """See ``RolloutEngine.wake``."""
        await self._call("wake")

    async def version(self) -> int:
        """See ``RolloutEngine.version``."""
        return int(await self._call("version"))

    async def start_update(self, mode: Pause = Pause.keep) -> None:
        """See ``RolloutEngine.start_update``."""
        await self._call("start_update", mode)

    async def finish_update(self, version: int) -> None:
        """See ``RolloutEngine.finish_update``."""
        await self._call("finish_update", version)

    async def fail_update(self, cause: str) -> None:
        """See ``RolloutEngine.fail_update``."""
        await self._call("fail_update", cause)

    async def rpc(self, method: str, *args: object, timeout_s: float | None = None) -> list[Any]:
        """See ``RolloutEngine.rpc``."""
        call = self.worker.call.remote("rpc", method, *args, timeout_s=timeout_s)
        return list(await self._done(call, f"in {method}"))

    async def statistics(self) -> Statistics:
        """See ``RolloutEngine.statistics``."""
        found: Statistics = await self._call("statistics")
        return found

    async def shutdown(self) -> None:
        """See ``RolloutEngine.shutdown``; its actor ends too."""
        with suppress(RayError):  # it is gone already
            await self.worker.close.remote()
        ray.kill(self.worker)

    async def _call(self, method: str, *args: object) -> Any:
        return await self._done(self.worker.call.remote(method, *args), f"in {method}")

    async def _done(self, call: Any, doing: str) -> Any:
        try:
            value = await call
        except RayError as error:
            reason = str(error).strip().splitlines()[-1]
            raise DeadEngineError(f"{self._name} died while {doing}: its Ray actor is gone ({reason})") from error
        if isinstance(value, McoreRLError):
            raise value
        return value
