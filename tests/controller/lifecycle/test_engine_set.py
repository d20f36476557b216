"""Who receives weights: engines that join and leave between updates, and one that cannot take them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from mcore_rl.config.rollout import RolloutLayout
from mcore_rl.config.trainer import Placement
from mcore_rl.controller.lifecycle import engine_set, weight_sync
from mcore_rl.controller.lifecycle.engine_set import EngineSet, Kept, LivingEngines, Member, layout_of
from mcore_rl.controller.lifecycle.weight_sync import WeightSync
from mcore_rl.ground.errors import DeadWorkerError, SyncError
from mcore_rl.rollout.pool import EnginePool
from tests.support.turns import Restarter


class Client:
    """An engine's client, of which the name and the lane count."""

    def __init__(self, name: str) -> None:
        self.name, self.lane = name, object()


class Updater:
    """Writes down who gets which version; fails with whom ``refused`` names."""

    def __init__(self, log: list[Any], clients: Sequence[Any]) -> None:
        self.log, self.refused = log, ""
        self.engines = list(clients)

    def take(self, engines: Sequence[Any], layout: RolloutLayout) -> None:
        assert layout.world_size == len(engines) * layout.tp
        self.engines = list(engines)

    def rejoin(self) -> None:
        self.log.append("rejoin")

    async def update(self, version: int) -> None:
        names = [each.name for each in self.engines]
        if self.refused in names:
            raise SyncError(f"{self.refused} makes another plan")
        self.log.append((version, names))


class Parts:
    """A set of one engine, and all that it is told."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        first: Any = Client("engine 0")
        self.members = [Member(first, 0, ())]
        self.pool = EnginePool([first], 4, goes_on=True)
        self.restarter = Restarter(self.log, 9)
        self.restarter._engines = [first]
        self.updater: Any = Updater(self.log, [first])
        self.set = EngineSet(self.members, self.pool, self.restarter, self.updater, RolloutLayout(tp=2), self.connect)
        self.weights = WeightSync(self.updater, self.restarter, self.pool, 0, self.set)

    async def connect(self, members: Sequence[Member]) -> None:
        self.log.append(("plan", [each.name for each in members]))

    def comes(self, number: int) -> Member:
        client: Any = Client(f"engine {number}")
        self.set.newcomers.append(member := Member(client, number, ()))
        return member

    @property
    def drawing(self) -> list[str]:
        return [load.engine.name for load in self.pool.loads if load.draws]


def test_who_joins_is_planned_for_and_gets_the_version_that_the_others_have() -> None:
    parts = Parts()
    asyncio.run(parts.weights.update(3))
    parts.comes(1)
    assert parts.drawing == ["engine 0"]
    asyncio.run(parts.weights.update(3))
    both = ["engine 0", "engine 1"]
    assert parts.log == [(3, ["engine 0"]), ("plan", both), (3, both)]
    assert parts.drawing == both and [each.name for each in parts.members] == both
    asyncio.run(parts.weights.update(3))
    asyncio.run(parts.weights.update(4))
    assert parts.log[3:] == [(4, both)], "the plan is made once"


def test_who_leaves_is_planned_without_at_the_next_update_and_not_before() -> None:
    parts = Parts()
    parts.comes(1)
    asyncio.run(parts.weights.update(3))
    parts.log.clear()
    parts.set.dismiss(parts.members[0])
    assert parts.drawing == ["engine 1"] and parts.restarter._engines == [parts.members[0].client]
    asyncio.run(parts.weights.update(3))
    assert parts.log == [], "the others have these weights"
    asyncio.run(parts.weights.update(4))
    assert parts.log == [("plan", ["engine 1"]), (4, ["engine 1"])]


def test_who_cannot_take_the_weights_is_left_out_and_the_others_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(weight_sync, "warn", said.append)
    parts = Parts()
    asyncio.run(parts.weights.update(3))
    parts.log.clear()
    member, parts.updater.refused = parts.comes(1), "engine 1"
    asyncio.run(parts.weights.update(4))
    assert parts.log == [("plan", ["engine 0", "engine 1"]), ("plan", ["engine 0"]), (4, ["engine 0"])]
    assert member not in parts.members and parts.drawing == ["engine 0"]
    assert "engine 1: left out" in said[0] and "another plan" in said[0]


def test_an_update_that_fails_without_newcomers_is_raised() -> None:
    parts = Parts()
    parts.updater.refused = "engine 0"
    with pytest.raises(SyncError, match="engine 0 makes another plan"):
        asyncio.run(parts.weights.update(1))


def test_nobody_leaves_in_the_middle_of_an_update() -> None:
    parts, order = Parts(), list[str]()
    begun = asyncio.Event()

    async def update(version: int) -> None:
        begun.set()
        await asyncio.sleep(0.05)
        order.append("updated")

    async def leave() -> None:
        await begun.wait()
        async with parts.weights.no_update():
            order.append("left")

    async def both() -> None:
        await asyncio.gather(parts.weights.update(1), leave())

    parts.updater.update = update
    asyncio.run(both())
    assert order == ["updated", "left"]


def test_replicas_that_share_experts_stay_one_engine() -> None:
    assert layout_of(RolloutLayout(tp=2, dp=4, ep=8), 1) == RolloutLayout(tp=2, dp=4, ep=8)
    assert layout_of(RolloutLayout(tp=2, dp=4, ep=2), 3) == RolloutLayout(tp=2, dp=3, ep=2)


class Nodes:
    """Places on these nodes."""

    def __init__(self, *nodes: str) -> None:
        self.nodes = frozenset(nodes)


@asynccontextmanager
async def kept_by(living: LivingEngines, log: list[str], placement: Placement = Placement.separate) -> Any:
    async with living.attempt(placement):
        if living.kept is None:
            log.append("started")
            living.stack.callback(log.append, "ended")
            places: Any = Nodes("n1", "n2")
            watchdog: Any = None
            living.kept = Kept(places, [], None, None, [], watchdog)
        yield


@pytest.mark.parametrize(
    ("placement", "error", "log"),
    [
        (Placement.separate, DeadWorkerError("rank 1 died"), ["started", "done", "ended"]),
        (Placement.colocated, DeadWorkerError("rank 1 died"), ["started", "ended", "started", "done", "ended"]),
        (Placement.separate, RuntimeError("a bug"), ["started", "ended", "started", "done", "ended"]),
    ],
)
def test_engines_outlive_the_death_of_a_trainer_and_nothing_else(
    placement: Placement, error: Exception, log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_set, "live_nodes", lambda: frozenset({"n1", "n2"}))
    seen: list[str] = []

    async def run() -> None:
        async with LivingEngines() as living:
            with pytest.raises(type(error)):
                async with kept_by(living, seen, placement):
                    raise error
            async with kept_by(living, seen, placement):
                seen.append("done")

    asyncio.run(run())
    assert seen == log


def test_engines_whose_node_is_gone_are_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_set, "live_nodes", lambda: frozenset({"n1"}))
    seen: list[str] = []

    async def run() -> None:
        async with LivingEngines() as living:
            with pytest.raises(DeadWorkerError):
                async with kept_by(living, seen):
                    raise DeadWorkerError("its node is gone")
            assert seen == ["started"]
            async with kept_by(living, seen):
                assert seen == ["started", "ended", "started"]

    asyncio.run(run())


def test_what_is_kept_ends_with_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    async def run() -> None:
        async with LivingEngines() as living, kept_by(living, seen):
            raise DeadWorkerError("once too often")

    with pytest.raises(DeadWorkerError):
        asyncio.run(run())
    assert seen == ["started", "ended"]
