"""Workers for the tests of ``runtime``: what a training worker's class is, doing as it is told."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from mcore_rl.ground.errors import ConfigError, DeadEngineError, McoreRLError, RolloutError, Violation
from mcore_rl.parallel.phase import phase
from mcore_rl.rollout.protocol import (
    EngineMemory,
    FinishReason,
    Pause,
    Request,
    Sample,
    Sampling,
    Statistics,
    VersionSpan,
)
from mcore_rl.rollout.served import Served
from mcore_rl.rollout.vllm.engine.engine_node import EngineNode
from mcore_rl.runtime.answers import Answering
from mcore_rl.runtime.rollout_worker import RolloutWorker
from mcore_rl.runtime.shard import Shard, WorkerInput, WorkerOutput

LONG = timedelta(seconds=200)
VIOLATION = Violation("actor.parallel.tp", 3, "does not fit", "Write 2")


class Talker(Answering):
    """Says what it was told, and fails as it is told to."""

    def __init__(self, rank: int, log: Path) -> None:
        super().__init__(rank, log)

    def told(self, *args: Any) -> tuple[int, tuple[Any, ...]]:
        return self.rank, args

    def sums(self, given: WorkerInput[str], *args: Any) -> WorkerOutput[tuple[Any, ...]]:
        """What it was handed; rank 0 keeps its tokens, doubled, and rank 2 keeps nothing."""
        (batch,) = given.batches
        said = (self.rank, batch.tokens_T.sum().item(), given.payload, args)
        doubled = Shard.of(batch.lengths_S, tokens_T=2 * batch.tokens_T)
        return WorkerOutput(said, doubled if self.rank == 0 else None)

    def pid(self) -> int:
        return os.getpid()

    def says(self, text: str) -> None:
        print(text, flush=True)

    def join(self, port: int, world_size: int) -> None:
        """A process group over gloo."""
        store = TCPStore("127.0.0.1", port, is_master=False, timeout=LONG)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=world_size, timeout=LONG)

    def fails(self, kinds: dict[int, str], ranks: int, port: int) -> str:
        """Fail as ``kinds`` says of this rank, or wait in vain for a peer until the store at ``port`` lets go.

        Of the ``ranks`` ranks, those without a kind wait before the others fail.
        """
        store = TCPStore("127.0.0.1", port, is_master=False, timeout=LONG)
        if self.rank not in kinds:
            with phase("backward"):
                store.set(f"{self.rank} waits", b"")
                store.wait(["let go"], LONG)
            return "let go"
        store.wait([f"{rank} waits" for rank in range(ranks) if rank not in kinds], LONG)
        with phase("forward", microbatch=3):
            match kinds[self.rank]:
                case "raises":
                    raise ValueError("no such expert")
                case "refuses":
                    raise ConfigError([VIOLATION])
                case "loses its peers":
                    raise RuntimeError("[enforce fail] Connection closed by peer [127.0.0.1]:4711")
                case "exits":
                    raise SystemExit(3)
        return "done"

    def hangs(self, rank: int, port: int) -> None:
        """Rank ``rank`` waits until the store at ``port`` lets go, its peers for it in a collective."""
        if self.rank == rank:
            with phase("reading the data"):
                TCPStore("127.0.0.1", port, is_master=False, timeout=LONG).wait(["let go"], LONG)
        with phase("gradients", microbatch=4):
            dist.all_reduce(torch.ones(1))

    def dies(self, rank: int, peer: int, port: int) -> None:
        """Rank ``rank`` is killed once ``peer`` waits for it in a collective."""
        store = TCPStore("127.0.0.1", port, is_master=False, timeout=LONG)
        if self.rank == rank:
            with phase("forward", microbatch=7):
                store.wait([f"{peer} waits"], LONG)
                os.kill(os.getpid(), signal.SIGKILL)
        with phase("gradients"):
            store.set(f"{self.rank} waits", b"")
            dist.all_reduce(torch.ones(1))


class Scripted(RolloutWorker):
    """A rollout worker above an engine that answers without a model."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._engine = ScriptedEngine()  # type: ignore[assignment]


class ScriptedPart(Scripted):
    """The worker of one node of an engine; its start does nothing, and fails where the engine's name says so."""

    async def start(
        self, served: Served, cores: Any, device_ids: Any, log: Path, node: EngineNode
    ) -> McoreRLError | None:
        self.node = node
        if "fails" in self._name and node.node_rank == 1:
            return RolloutError("the second node has no room")
        if "fails" in self._name:
            import asyncio

            await asyncio.sleep(1000)  # as vLLM waits for its ranks on the other node
        return None

    async def given(self) -> EngineNode:
        """What its start was given."""
        return self.node


class ScriptedEngine:
    """Samples of prompt "refused" fail, those of "forever" never come."""

    pid = 0
    leader = 2**30  # of no process group

    def __init__(self) -> None:
        self.ended: list[str] = []

    async def generate(self, requests: Sequence[Request], sampling: Sampling) -> AsyncIterator[Sample]:
        import asyncio

        for request in requests:
            if request.prompt.id == "refused":
                raise RolloutError("no room for refused")
            if request.prompt.id == "forever":
                self.ended.append("begun")
                try:
                    await asyncio.sleep(1000)
                finally:
                    self.ended.append("aborted")
            yield sample_of(request, (1, 2))

    async def version(self) -> int:
        return 7

    async def statistics(self) -> Statistics:
        return Statistics()

    async def watch(self) -> None:
        import asyncio

        while "killed" not in self.ended:
            await asyncio.sleep(0.01)
        raise DeadEngineError("its worker was killed")

    async def be_killed(self) -> None:
        self.ended.append("killed")

    async def wake(self, memory: EngineMemory | None = None) -> None:
        raise RolloutError("it does not wake")

    async def start_update(self, mode: Pause = Pause.keep) -> None:
        pass

    async def finish_update(self, version: int) -> None:
        pass

    async def call_workers(self, method: Callable[..., Any], *args: Any) -> list[Any]:
        return [method.__name__, list(args)]

    async def ends(self) -> list[str]:
        return self.ended

    def close(self) -> None:
        pass


def sample_of(request: Request, tokens: Sequence[int], text: str = "") -> Sample:
    """A finished sample."""
    return Sample(
        prompt_id=request.prompt.id,
        index=request.index,
        tokens=np.array(tokens, dtype=np.int32),
        logprobs=np.full(len(tokens), -0.5, dtype=np.float32),
        versions=(VersionSpan(version=0, start=0, end=len(tokens)),),
        finish=FinishReason.stop,
        text=text,
    )
