"""Who has the devices when: the order of what trainer, engines and weights are told."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from mcore_rl.config.trainer import Placement
from mcore_rl.controller.lifecycle.handover import DROP_WEIGHTS, KEEP_WEIGHTS, Handover
from mcore_rl.errors import DeadEngineError
from mcore_rl.training.offload import OffloadPart


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
    actor, rest = Told("actor", log), Told("", log)
    return Handover(actor, rest, rest, placement), log  # type: ignore[arg-type]


def test_colocated_the_weights_stay_until_the_engines_have_them() -> None:
    both, log = handover(Placement.colocated)
    asyncio.run(both.to_rollout(0))
    assert log == ["wake", ("update", 0), ("actor", "offload", (OffloadPart.weights,))]
    log.clear()
    asyncio.run(both.to_training())
    assert log == [("sleep", DROP_WEIGHTS)], "who trains comes back by itself"
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
    both = Handover(actor, rest, rest, Placement.colocated, Judges(log))  # type: ignore[arg-type]
    asyncio.run(both.to_rollout(0))
    assert log[-2:] == [("actor", "offload", (OffloadPart.weights,)), "judges wake"], "once the trainer has left"
    log.clear()
    asyncio.run(both.to_training())
    assert log == ["judges sleep", ("sleep", DROP_WEIGHTS)]
    log.clear()
    apart = Handover(actor, rest, rest, Placement.separate, Judges(log))  # type: ignore[arg-type]
    asyncio.run(apart.to_rollout(0))
    asyncio.run(apart.to_training())
    assert log == [("update", 0)]


def test_separate_only_weights_travel() -> None:
    both, log = handover(Placement.separate)
    for version in (0, 0, 1):
        asyncio.run(both.to_rollout(version))
        asyncio.run(both.to_training())
    assert log == [("update", 0), ("update", 1)]


class Mortal(Told):
    """Engines and their updates, of which one verb finds a death, once."""

    def __init__(self, log: list[Any], dies_in: str) -> None:
        super().__init__("", log)
        self.dies_in: str | None = dies_in

    def _maybe_die(self, verb: str) -> None:
        if self.dies_in == verb:
            self.dies_in = None
            self.log.append(f"death in {verb}")
            raise DeadEngineError("engine 0 died")

    async def sleep(self, level: int) -> None:
        self._maybe_die("sleep")
        await super().sleep(level)

    async def wake(self) -> None:
        self._maybe_die("wake")
        await super().wake()

    async def update(self, version: int) -> None:
        self._maybe_die("update")
        await super().update(version)

    async def check(self) -> None:
        self.log.append("check")

    def rejoin(self) -> None:
        self.log.append("rejoin")


def mortal(dies_in: str, check_freq: int = 0) -> tuple[Handover, list[Any]]:
    log: list[Any] = []
    engines = Mortal(log, dies_in)

    async def restart(error: DeadEngineError) -> None:
        log.append("restart")

    actor = Told("actor", log)
    both = Handover(actor, engines, engines, Placement.colocated, None, restart, check_freq)  # type: ignore[arg-type]
    return both, log


WEIGHTS = ("actor", "offload", (OffloadPart.weights,))
BACK = [("sleep", DROP_WEIGHTS)]


def test_a_death_in_an_update_begins_it_anew_with_the_trainer_on_its_device() -> None:
    both, log = mortal("update")
    asyncio.run(both.to_rollout(4))
    again = ["restart", "rejoin", *BACK, "wake", ("update", 4), WEIGHTS]
    assert log == ["wake", "death in update", *again]


def test_a_death_while_engines_are_told_to_sleep_is_answered_before_the_trainer_comes_back() -> None:
    both, log = mortal("sleep")
    asyncio.run(both.to_training())
    assert log == ["death in sleep", "restart", "rejoin", *BACK]


def test_engines_that_died_while_they_drew_get_the_weights_that_they_had() -> None:
    both, log = mortal("nothing")
    asyncio.run(both.to_rollout(7))
    log.clear()
    asyncio.run(both.revive(DeadEngineError("engine 0 died")))
    assert log == ["restart", "rejoin", *BACK, "wake", ("update", 7), WEIGHTS]


def test_weights_are_checked_in_the_updates_that_are_due() -> None:
    both, log = mortal("nothing", check_freq=2)
    for version in (1, 2, 3, 4):
        asyncio.run(both.to_rollout(version))
    assert [entry for entry in log if entry == "check" or entry[0] == "update"] == [
        ("update", 1), ("update", 2), "check", ("update", 3), ("update", 4), "check",
    ]  # fmt: skip


def test_without_somebody_to_restart_them_a_death_is_raised() -> None:
    log: list[Any] = []
    engines = Mortal(log, "wake")
    both = Handover(Told("actor", log), engines, engines, Placement.colocated)  # type: ignore[arg-type]
    with pytest.raises(DeadEngineError):
        asyncio.run(both.to_rollout(1))
