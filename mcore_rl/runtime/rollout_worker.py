"""A Ray actor that runs an engine on a node of the cluster, or the part of one that is on that node.

The actor is thin: vLLM runs in a child process (``rollout.vllm.engine.process``) with an environment of its own, which
ends with the actor.  ``engine_client.py`` is the controller's side.
"""

from __future__ import annotations

import asyncio
import faulthandler
import signal
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack, aclosing
from pathlib import Path
from typing import Any

from mcore_rl.ground.errors import McoreRLError
from mcore_rl.rollout.protocol import Request, Sample, Sampling
from mcore_rl.rollout.remote_engine import perform
from mcore_rl.rollout.served import Served
from mcore_rl.rollout.vllm.engine.engine_node import EngineNode, Meeting, free_port
from mcore_rl.rollout.vllm.engine.process import EngineProcess, start_engine
from mcore_rl.rollout.vllm.worker_methods import WEIGHT_RECEIVER
from mcore_rl.runtime.answers import Whereabouts, stacks_file
from mcore_rl.runtime.cluster import this_host
from mcore_rl.runtime.each_node import store_at


class RolloutWorker:
    """The class of the Ray actor.  Its methods are coroutines, so that calls run concurrently.

    It returns errors as values, because Ray would wrap what it raises.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._engine: EngineProcess | None = None
        self._stack = ExitStack()

    async def whereabouts(self) -> Whereabouts:
        """The process id and node of this actor."""
        return Whereabouts.here()

    async def leader(self) -> int:
        """The process id of the engine that was started, which leads the process group of all its processes."""
        return self._live.leader

    async def address(self) -> str:
        """The address at which other nodes of the cluster reach this one."""
        return this_host()

    async def meeting(self) -> Meeting:
        """Makes the place where the processes of an engine on several nodes meet; this actor is on the first."""
        host = this_host()
        return Meeting(host=host, port=self._stack.enter_context(store_at(host)), rpc_port=free_port(host))

    async def start(
        self,
        served: Served,
        cores: Sequence[int] | None,
        device_ids: Sequence[str] | None,
        log: Path,
        node: EngineNode,
    ) -> McoreRLError | None:
        """Starts the engine of ``served``; see ``start_engine``.  Returns the error if it fails."""
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            self._stacks = stacks_file(log).open("a")  # as long as the process lives
            faulthandler.register(signal.SIGUSR2, file=self._stacks, all_threads=True)
            engine = start_engine(
                self._name,
                served.directory,
                served.config,
                cores=cores,
                device_ids=device_ids,
                extension=WEIGHT_RECEIVER if served.generates else None,  # other weights never change
                log=log,
                awaits_weights=served.follows_actor,
                adapters=served.adapters,
                node=node,
                pictures=served.pictures,
                wait=False,
            )
            await asyncio.to_thread(engine.wait_until_ready)
        except McoreRLError as error:
            return error
        self._engine = engine
        return None

    async def generate(self, requests: Sequence[Request], sampling: Sampling) -> AsyncGenerator[Sample | McoreRLError]:
        """Yields each sample as it finishes, or an error."""
        try:
            async with aclosing(self._live.generate(requests, sampling)) as samples:
                async for sample in samples:
                    yield sample
        except McoreRLError as error:
            yield error

    async def perform(self, verb: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Runs another method of the engine, by name, for ``EngineClient``.  Returns its result or its error."""
        try:
            return await perform(self._live, verb, args, options)
        except McoreRLError as error:
            return error

    async def close(self) -> None:
        """Ends the engine's processes."""
        if self._engine is not None:
            await asyncio.to_thread(self._engine.close)
        self._stack.close()

    @property
    def _live(self) -> EngineProcess:
        assert self._engine is not None, "start the engine first"
        return self._engine
