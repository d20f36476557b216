"""Who has the devices when: the order of what trainer, engines and weights are told."""

from __future__ import annotations

import asyncio
from typing import Any

from mcore_rl.config.trainer import Placement
from mcore_rl.controller.handover import DROP_WEIGHTS, KEEP_WEIGHTS, Handover
from mcore_rl.training.offload import Part


class Told:
    """Writes down what it is told."""

    def __init__(self, name: str, log: list[Any]) -> None:
        self.name, self.log = name, log

    async def all(self, method: str, *args: Any) -> None:
        self.log.append((self.name, method, *(tuple(arg) for arg in args)))

    async def wake(self) -> None:
        self.log.append("wake")

    async def sleep(self, level: int) -> None:
        self.log.append(("sleep", level))

    async def update(self, version: int) -> None:
        self.log.append(("update", version))


class Judges:
    """A reward model's engines, which write down what they are told."""

    def __init__(self, log: list[Any]) -> None:
        self.log = log

    async def wake(self) -> None:
        self.log.append("judges wake")

    async def sleep(self) -> None:
        self.log.append("judges sleep")


def handover(placement: Placement) -> tuple[Handover, list[Any]]:
    log: list[Any] = []
    actor, critic, rest = Told("actor", log), Told("critic", log), Told("", log)
    return Handover(actor, [critic], rest, rest, placement), log  # type: ignore[arg-type, list-item]


def test_colocated_the_trainer_makes_room_before_the_engines_wake() -> None:
    both, log = handover(Placement.colocated)
    asyncio.run(both.to_rollout(0))
    assert log == [
        ("actor", "offload", (Part.gradients, Part.optimizer)),
        ("critic", "offload", tuple(Part)),
        "wake",
        ("update", 0),
        ("actor", "offload", (Part.weights,)),
    ], "the weights stay until the engines have them"
    log.clear()
    asyncio.run(both.to_training())
    assert log == [("sleep", DROP_WEIGHTS), ("actor", "onload"), ("critic", "onload")]
    log.clear()
    asyncio.run(both.to_rollout(0))
    assert ("update", 0) in log, "they were dropped"


def test_for_a_moment_the_engines_keep_their_weights() -> None:
    both, log = handover(Placement.colocated)
    asyncio.run(both.to_rollout(3))
    log.clear()
    asyncio.run(both.to_training(for_a_moment=True))
    asyncio.run(both.to_rollout(3))
    assert ("sleep", KEEP_WEIGHTS) in log and ("update", 3) not in log
    asyncio.run(both.to_training(for_a_moment=True))
    asyncio.run(both.to_rollout(4))
    assert ("update", 4) in log


def test_a_reward_model_is_awake_while_the_rollout_is() -> None:
    log: list[Any] = []
    actor, rest = Told("actor", log), Told("", log)
    both = Handover(actor, [], rest, rest, Placement.colocated, Judges(log))  # type: ignore[arg-type]
    asyncio.run(both.to_rollout(0))
    assert log[-2:] == [("actor", "offload", (Part.weights,)), "judges wake"], "once the trainer has left"
    log.clear()
    asyncio.run(both.to_training())
    assert log == ["judges sleep", ("sleep", DROP_WEIGHTS), ("actor", "onload")]
    log.clear()
    apart = Handover(actor, [], rest, rest, Placement.separate, Judges(log))  # type: ignore[arg-type]
    asyncio.run(apart.to_rollout(0))
    asyncio.run(apart.to_training())
    assert log == [("update", 0)]


def test_separate_only_weights_travel() -> None:
    both, log = handover(Placement.separate)
    for version in (0, 0, 1):
        asyncio.run(both.to_rollout(version))
        asyncio.run(both.to_training())
    assert log == [("update", 0), ("update", 1)]
