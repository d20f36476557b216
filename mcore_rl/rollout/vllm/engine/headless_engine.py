"""The part of an engine on a node other than its first: vLLM's workers, or the cores of replicas, without an engine.

What ``run_headless`` of vllm/entrypoints/cli/serve.py (0.32) starts, in a child of ``process.py`` like an engine.  It
is told nothing but to end: the engine's core calls its workers over vLLM's own message queues.
"""

from __future__ import annotations

import asyncio

from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.network_utils import get_tcp_uri
from vllm.v1.engine.utils import CoreEngineProcManager
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from mcore_rl.rollout.vllm.engine import picture_models
from mcore_rl.rollout.vllm.engine.environment import Settings
from mcore_rl.rollout.vllm.engine.liveness import Liveness, start_error, stop_s


class HeadlessEngine:
    """An ``EnginePart``; ``start`` makes it."""

    def __init__(self, liveness: Liveness, processes: MultiprocExecutor | CoreEngineProcManager, stop_s: float) -> None:
        self._liveness = liveness
        self._processes = processes
        self._stop_s = stop_s

    @property
    def name(self) -> str:
        """The engine's name in messages."""
        return self._liveness.name

    @classmethod
    async def start(cls, settings: Settings) -> HeadlessEngine:
        """Starts the processes of ``settings.node``; see ``VllmEngine.start``, called on the first node meanwhile.

        Its workers know no version of weights; the engine does.
        """
        log = settings.log
        stop = stop_s(settings.platform)
        arguments = settings.arguments
        try:
            picture_models.use(settings.directory, pictures=settings.model.vision is not None)
            config = AsyncEngineArgs(**arguments).create_engine_config(headless=True)
            if config.parallel_config.node_rank_within_dp > 0:  # the first node of its replica has the core
                executor = MultiprocExecutor(config)
                workers = [worker.proc for worker in executor.workers]
                return cls(Liveness(settings.name, log, workers, lambda: executor.is_failed), executor, stop)
            manager = _replicas(config)
            return cls(Liveness(settings.name, log, manager.processes, lambda: False), manager, stop)
        except Exception as error:  # vLLM passes on any exception of its models, checks and processes
            raise start_error(settings.name, settings.directory, log, error) from error

    async def watch(self) -> None:
        """See ``EnginePart.watch``."""
        await self._liveness.watch()

    async def shutdown(self) -> None:
        """Ends the processes; without ``stop_s`` it leaves that to ``process.py``, which kills them."""
        await self._liveness.close()
        if self._stop_s:
            await asyncio.to_thread(self._processes.shutdown)
        self._liveness.clear()


def _replicas(settings: VllmConfig) -> CoreEngineProcManager:
    """Starts the cores of the replicas of this node, which are told by the engine what to do."""
    parallel = settings.parallel_config
    return CoreEngineProcManager(
        local_engine_count=parallel.data_parallel_size_local,
        start_index=parallel.data_parallel_rank,
        local_start_index=0,
        vllm_config=settings,
        local_client=False,
        handshake_address=get_tcp_uri(parallel.data_parallel_master_ip, parallel.data_parallel_rpc_port),
        executor_class=picture_models.executor_of(settings),
        log_stats=False,
    )
