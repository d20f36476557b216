"""A trainer and an engine that take turns and write down what they are told; the engine dies where a test says."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from mcore_rl.config.trainer import Placement
from mcore_rl.controller.lifecycle.device_sharing import DeviceSharing
from mcore_rl.controller.lifecycle.fault_tolerance import EngineRestarter
from mcore_rl.controller.lifecycle.weight_sync import WeightSync
from mcore_rl.ground.errors import DeadEngineError
from mcore_rl.rollout.protocol import EngineMemory, Pause
from mcore_rl.training.offload import OffloadPart

OFFLOADED = ("actor", "offload", (OffloadPart.weights,))  # what the actor is told once the engines have its weights


class Trainer:
    """The actor's workers."""

    def __init__(self, log: list[Any]) -> None:
        self.log = log

    async def offload(self, parts: Sequence[OffloadPart]) -> None:
        self.log.append(("actor", "offload", tuple(parts)))


class Engines:
    """One engine, its pool, and the updates of its weights.  dies_in: the verb that finds it dead, once."""

    name = "engine 0"

    def __init__(self, log: list[Any]) -> None:
        self.log, self.dies_in = log, ""
        self.death: DeadEngineError | None = None  # of one of several engines, while the others draw on
        self.holds: list[tuple[int, Pause]] = []  # after how much of the log requests were kept back, and how

    def _told(self, verb: Any) -> None:
        name = verb if isinstance(verb, str) else verb[0]
        if self.dies_in == name:
            self.dies_in = ""
            self.log.append(f"death in {name}")
            raise DeadEngineError("engine 0 died")
        self.log.append(verb)

    async def sleep(self, level: int) -> None:
        self._told(("sleep", level))

    async def wake(self, memory: EngineMemory | None = None) -> None:
        self._told("wake" if memory is None else f"wake {memory.value}")

    async def update(self, version: int) -> None:
        self._told(("update", version))

    async def check(self) -> None:
        self._told("check")

    @asynccontextmanager
    async def held(self, mode: Pause = Pause.keep) -> AsyncIterator[None]:
        self.holds.append((len(self.log), mode))
        yield

    def rejoin(self) -> None:
        self.log.append("rejoin")


class Judges:
    """A reward model's engines."""

    def __init__(self, log: list[Any]) -> None:
        self.log = log

    async def wake(self) -> None:
        self.log.append("judges wake")

    async def sleep(self) -> None:
        self.log.append("judges sleep")


class Restarter(EngineRestarter):
    """Restarts at once, as often as ``limit`` allows."""

    def __init__(self, log: list[Any], limit: int) -> None:
        super().__init__([], None, limit, warn=print)  # type: ignore[arg-type]
        self.log = log

    async def restart_dead(self, error: DeadEngineError) -> None:
        if self.num_restarts == self._limit:
            raise error
        self.num_restarts += 1
        self.log.append("restart")


@dataclass
class Turns:
    """All of it, and what was told, in order."""

    log: list[Any]
    actor: Any
    engines: Any
    restarter: Restarter
    weights: WeightSync
    devices: DeviceSharing

    async def rollout(self, version: int) -> None:
        """As the step loop: the engines get the devices and the weights."""
        await self.devices.to_engines(version)


def turns(placement: Placement = Placement.colocated, *, check_freq: int = 0, limit: int = 9) -> Turns:
    """A run's device sharing, weight sync and restarts."""
    log: list[Any] = []
    actor: Any = Trainer(log)
    engines: Any = Engines(log)
    restarter = Restarter(log, limit)
    weights = WeightSync(engines, restarter, engines, check_freq)
    return Turns(log, actor, engines, restarter, weights, DeviceSharing(placement, actor, engines, weights, restarter))
