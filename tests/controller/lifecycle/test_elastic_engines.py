"""What is asked about engines: refused with every reason, done beside the run, and never its end."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from mcore_rl.config.engine import Device
from mcore_rl.config.rollout import RolloutConfig
from mcore_rl.config.trainer import Placement, TrainerConfig
from mcore_rl.controller.lifecycle import elastic_engines
from mcore_rl.controller.lifecycle.elastic_engines import ElasticEngines, Starting
from mcore_rl.controller.lifecycle.engine_set import Member
from mcore_rl.ground.errors import ConfigError, DeadEngineError, DeadWorkerError, RolloutError
from mcore_rl.parallel.device import detect
from mcore_rl.runtime.placement import EngineBundles, Places
from mcore_rl.runtime.start import Joining
from mcore_rl.tracking.engine_requests import EngineRequest
from tests.controller.lifecycle.test_engine_set import Client, Parts

SEPARATE = TrainerConfig(placement=Placement.separate)


def ask(**what: Any) -> EngineRequest:
    return EngineRequest(owner="", **what)


class House(Parts):
    """A run of one engine that draws with version 3; engines start at once, or as ``fails`` says.

    ended: engines that were shut down.  freed: how often devices were freed.
    """

    def __init__(self, trainer: TrainerConfig = SEPARATE, rollout: RolloutConfig | None = None) -> None:
        super().__init__()
        self.fails: Exception | None = None
        self.ended: list[str] = []
        self.said: list[str] = []
        self.joined: list[Joining] = []
        self.turn = asyncio.Lock()
        self.gate = asyncio.Event()
        self.gate.set()
        starting = Starting(
            trainer=trainer,
            rollout=rollout or RolloutConfig(),
            platform=detect(Device.cpu),
            places=Places((), (), 0.0, ()),
            start=self.start,
            sees=self.sees,
            host_bytes=0,
        )
        devices: Any = self
        where: Any = "run"
        self.elastic = ElasticEngines(where, starting, self.set, self.pool, self.weights, devices)
        self.give_end(self.members[0].client)

    def give_end(self, client: Any) -> None:
        async def shutdown() -> None:
            self.ended.append(client.name)

        client.shutdown = shutdown

    async def start(self, joins: Joining, bundles: EngineBundles) -> Member:
        await self.gate.wait()
        self.joined.append(joins)
        if self.fails is not None:
            raise self.fails
        client: Any = Client(f"engine {joins.number}")
        self.give_end(client)
        return Member(client, joins.slot, bundles)

    async def sees(self, nodes: frozenset[str]) -> None:
        """All nodes see all models."""

    @asynccontextmanager
    async def engines_turn(self) -> Any:
        async with self.turn:
            yield

    async def send_again(self, version: int) -> None:
        await self.weights.update(version)

    def do(self, *requests: EngineRequest) -> None:
        """Does ``requests`` one after the other, with engines that have version 3."""

        async def all_of_them() -> None:
            await self.weights.update(3)
            for request in requests:
                await self.elastic.do(request, self.said.append)

        asyncio.run(all_of_them())


@pytest.fixture(autouse=True)
def cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    async def place_engine(*_: object) -> EngineBundles:
        return ()

    monkeypatch.setattr(elastic_engines, "place_engine", place_engine)
    monkeypatch.setattr(elastic_engines, "free_engine", lambda *_: None)
    monkeypatch.setattr(elastic_engines, "nodes_of", lambda _: frozenset({"n1"}))
    monkeypatch.setattr(elastic_engines, "node_names", sorted)
    monkeypatch.setattr(elastic_engines, "live_nodes", lambda: frozenset({"n1"}))
    monkeypatch.setattr(elastic_engines, "cluster_cores", lambda: 4)


def test_engines_that_join_get_numbers_slots_and_weights() -> None:
    house = House()
    house.do(ask(add=2))
    assert house.joined == [Joining(1, 1, 2), Joining(2, 2, 2)]
    assert house.drawing == ["engine 0", "engine 1", "engine 2"]
    assert house.said[-1].startswith("engine 2: draws, with weights of version 3")
    rows = house.elastic.rows()
    assert [(row.name, row.state, row.version) for row in rows] == [(f"engine {n}", "idle", 3) for n in range(3)]


def test_a_slot_is_used_again_and_a_number_never() -> None:
    house = House()
    house.do(ask(add=1), ask(remove=("engine-0",)), ask(add=1))
    assert house.joined == [Joining(1, 1, 1), Joining(2, 0, 1)]
    assert house.drawing == ["engine 1", "engine 2"] and house.ended == ["engine 0"]


def test_several_leave_at_once_the_last_that_joined_first() -> None:
    house = House()
    house.do(ask(add=3), ask(remove=("engine-1", "engine 1"), remove_last=1))
    assert house.drawing == ["engine 0", "engine 2"] and sorted(house.ended) == ["engine 1", "engine 3"]


def test_while_the_trainer_has_its_turn_weights_come_with_the_next_update() -> None:
    house = House()

    async def run() -> None:
        await house.weights.update(3)
        await house.turn.acquire()
        joining = asyncio.create_task(house.elastic.do(ask(add=1), house.said.append))
        await asyncio.sleep(0.02)
        assert house.drawing == ["engine 0"] and not joining.done(), "its weights are being changed"
        await house.weights.update(4)
        house.turn.release()
        await joining

    asyncio.run(run())
    assert house.log[1:] == [("plan", ["engine 0", "engine 1"]), (4, ["engine 0", "engine 1"])]
    assert house.drawing == ["engine 0", "engine 1"] and "version 4" in house.said[-1]


def test_everything_that_is_wrong_is_said_at_once_and_changes_nothing() -> None:
    house = House()
    with pytest.raises(ConfigError) as raised:
        house.do(ask(add=9, remove=("engine-0", "engine-5", "gpu")))
    text = str(raised.value)
    assert "--add=9: beside 0 others" in text and "Ray has 4 cores" in text
    assert "--remove=engine-5: is no engine of this run, which has engine-0" in text and "--remove=gpu" in text
    assert "would leave the run without an engine that draws" in text
    assert house.drawing == ["engine 0"] and not house.joined and not house.said


def test_the_last_engine_stays_also_beside_one_that_starts() -> None:
    house = House()

    async def run() -> None:
        await house.weights.update(3)
        house.gate.clear()
        joining = asyncio.create_task(house.elastic.do(ask(add=1), house.said.append))
        await asyncio.sleep(0)
        assert house.elastic.rows()[-1].state == "starting"
        with pytest.raises(ConfigError, match="without an engine that draws"):
            await house.elastic.do(ask(remove_last=1), house.said.append)
        with pytest.raises(ConfigError, match="is still starting"):
            await house.elastic.do(ask(remove=("engine-1",)), house.said.append)
        house.gate.set()
        await joining

    asyncio.run(run())


def test_memory_is_counted_where_devices_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    house = House()
    house.elastic._starting = replace(house.elastic._starting, host_bytes=1 << 50)
    with pytest.raises(ConfigError, match=r"takes 1048576\.0 GiB of host memory"):
        house.do(ask(add=1))
    monkeypatch.setattr(elastic_engines, "live_nodes", lambda: frozenset({"n1", "n2"}))
    house.do(ask(add=1))  # of which node is not known here


@pytest.mark.parametrize(
    ("trainer", "rollout", "problem"),
    [
        (TrainerConfig(), RolloutConfig(), "trainer.placement=colocated"),
        (SEPARATE, RolloutConfig(tp=1, dp=2, ep=2), "rollout.ep=2 spreads the experts"),
    ],
)
def test_engines_that_are_fixed_are_listed_and_not_changed(
    trainer: TrainerConfig, rollout: RolloutConfig, problem: str
) -> None:
    house = House(trainer, rollout)
    house.do(ask())
    for request in (ask(add=1), ask(remove_last=1)):
        with pytest.raises(ConfigError, match=problem):
            house.do(request)


def test_an_engine_that_does_not_start_is_a_refusal() -> None:
    house = House()
    house.fails = RolloutError("vLLM did not start: no memory")
    with pytest.raises(ConfigError, match=r"--add=engine 1: vLLM did not start: no memory\. The run goes on"):
        house.do(ask(add=1))
    assert house.drawing == ["engine 0"] and len(house.elastic.rows()) == 1


def test_an_engine_that_cannot_take_the_weights_is_ended() -> None:
    house = House()
    house.updater.refused = "engine 1"
    with pytest.raises(ConfigError, match="could not take the weights"):
        house.do(ask(add=1))
    assert house.drawing == ["engine 0"] and house.ended == ["engine 1"] and len(house.pool.loads) == 1


def test_an_engine_that_died_is_not_let_go() -> None:
    house = House()
    house.do(ask(add=1))
    house.pool.loads[1].death = DeadEngineError("engine 1 died")
    with pytest.raises(ConfigError, match="has died, and is about to be started again"):
        asyncio.run(house.elastic.do(ask(remove=("engine-1",)), house.said.append))
    with pytest.raises(ConfigError, match="without an engine that draws"):
        asyncio.run(house.elastic.do(ask(remove=("engine-0",)), house.said.append))


@pytest.mark.parametrize("error", [DeadWorkerError("rank 0 died"), RuntimeError("a bug")])
def test_an_update_that_fails_outside_the_runs_turn_ends_the_run_with_its_error(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = House()
    mailbox = Mailbox([ask(add=1)])
    monkeypatch.setattr(elastic_engines, "EngineMailbox", lambda _: mailbox)

    async def fails(version: int) -> None:
        raise error

    async def run() -> None:
        await house.weights.update(3)
        monkeypatch.setattr(house, "send_again", fails)
        async with house.elastic:
            await asyncio.sleep(30)

    with pytest.raises(type(error), match=str(error)):
        asyncio.run(run())


def test_a_run_that_ends_leaves_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    house = House()
    house.gate.clear()
    mailbox = Mailbox([ask(add=1), ask(add=9)])
    monkeypatch.setattr(elastic_engines, "EngineMailbox", lambda _: mailbox)

    async def run() -> None:
        await house.weights.update(3)
        async with house.elastic:
            await asyncio.sleep(0.05)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        with pytest.raises(asyncio.CancelledError):  # the run's own
            async with house.elastic:
                raise asyncio.CancelledError

    asyncio.run(run())
    assert sorted(answer.state for answer in mailbox.answers) == ["refused", "refused", "working"]
    assert "Ask again" in mailbox.answers[-1].lines[-1], "nobody waits for an answer that never comes"


class Mailbox:
    """Requests, once, and what they were answered."""

    def __init__(self, requests: list[EngineRequest]) -> None:
        self._requests, self.answers = requests, list[Any]()

    def requests(self) -> list[tuple[str, EngineRequest]]:
        requests, self._requests = self._requests, []
        return [(str(number), each) for number, each in enumerate(requests)]

    def answer(self, name: str, answer: Any) -> None:
        self.answers.append(answer)
