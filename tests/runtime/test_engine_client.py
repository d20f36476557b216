"""An engine below a Ray actor: errors arrive as they were raised, cancelling reaches it, and its death is named."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import ray
from numpy.typing import NDArray
from PIL import Image
from torch.distributed import TCPStore

from mcore_rl.config.rollout import RolloutConfig
from mcore_rl.config.trainer import WatchdogConfig
from mcore_rl.data.media.pixels import patches_of_file
from mcore_rl.data.media.placed import Grid, ImageRef, Placed
from mcore_rl.data.media.sizes import Sizing
from mcore_rl.ground.errors import DataError, DeadEngineError, RolloutError
from mcore_rl.rollout.protocol import Prompt, PromptPicture, Request, Sample, Sampling, Statistics
from mcore_rl.rollout.served import Served
from mcore_rl.rollout.vllm.engine.engine_node import ONE_NODE, EngineNode
from mcore_rl.rollout.vllm.worker_methods import HeldWeightsMethods, WeightReceiverMethods
from mcore_rl.runtime import engine_watch
from mcore_rl.runtime.engine_client import EngineClient, PartSpec
from mcore_rl.runtime.engine_watch import WORK, EnginePlace, EngineWatch
from mcore_rl.runtime.watchdog import Watchdog
from mcore_rl.tracking.lanes import State
from tests.support.answerers import Scripted, ScriptedEngine, ScriptedPart
from tests.support.pictures import encoded
from tests.support.run_task import still_alive

SAMPLING = Sampling(max_tokens=4)
SERVED = Served(name="engine", directory=Path("model"), config=RolloutConfig(tp=2))


@pytest.fixture(scope="module", autouse=True)
def cluster(processes: None) -> Iterator[None]:
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def engine() -> EngineClient:
    return new_engine("engine 7")


def request(name: str, index: int = 0) -> Request:
    return Request(prompt=Prompt(id=name, tokens=(1,)), index=index)


async def gather(samples: AsyncIterator[Sample]) -> list[Sample]:
    return [each async for each in samples]


def test_samples_arrive_whole(engine: EngineClient) -> None:
    samples = asyncio.run(gather(engine.generate([request("a"), request("a", 1)], SAMPLING)))
    assert [(each.prompt_id, each.index) for each in samples] == [("a", 0), ("a", 1)]
    assert [each.tokens.tolist() for each in samples] == [[1, 2], [1, 2]]


def test_pictures_are_decoded_while_the_loop_goes_on(engine: EngineClient) -> None:
    """Twenty of a megapixel; each is read only if the loop turns meanwhile."""
    file = encoded(Image.new("RGB", (1000, 1000), "red"))
    read = list[int]()

    async def draw() -> list[Sample]:
        loop = asyncio.get_running_loop()

        def patches() -> NDArray[np.uint8]:
            turned = threading.Event()
            loop.call_soon_threadsafe(turned.set)
            assert turned.wait(20), "the loop waits for pictures"
            made, _ = patches_of_file(file, Sizing(14))
            read.append(len(made))
            return made

        grid = Sizing(14).grid(1000, 1000)
        requests = []
        for number in range(20):
            placed = Placed(ImageRef(f"{number:064x}", "a.png"), 0, grid)
            prompt = Prompt(id=f"{number}", tokens=(1,) * grid.tokens, pictures=(PromptPicture(placed, patches),))
            requests += [Request(prompt=prompt, index=index) for index in range(3)]
        groups = [requests[start : start + 6] for start in range(0, len(requests), 6)]
        drawn = await asyncio.gather(*(gather(engine.generate(group, SAMPLING)) for group in groups))
        return [sample for samples in drawn for sample in samples]

    assert len(asyncio.run(draw())) == 60
    assert read == [4900] * 20, "once for all samples of a prompt"


def test_a_picture_that_cannot_be_read_is_told_as_its_rows_say_it(engine: EngineClient) -> None:
    def patches() -> NDArray[np.uint8]:
        raise DataError("data.train_files", ["t.parquet:0: images: a.png is not what it was when the run began"])

    placed = Placed(ImageRef("0" * 64, "a.png"), 0, Grid(1, 2, 2))
    seen = Prompt(id="a", tokens=(1,), pictures=(PromptPicture(placed, patches),))
    with pytest.raises(DataError, match=r"t\.parquet:0: images: a\.png is not what it was"):
        asyncio.run(gather(engine.generate([Request(prompt=seen)], SAMPLING)))


def test_verbs_reach_the_engine(engine: EngineClient) -> None:
    assert asyncio.run(engine.version()) == 7
    answer = asyncio.run(engine.call_workers(HeldWeightsMethods.held_differences, "folder", "tp=1"))
    assert answer == ["held_differences", ["folder", "tp=1"]]  # type: ignore[comparison-overlap]
    with pytest.raises(RolloutError, match="it does not wake"):
        asyncio.run(engine.wake())


def test_an_error_is_of_the_type_that_was_raised(engine: EngineClient) -> None:
    with pytest.raises(RolloutError, match="no room for refused") as error:
        asyncio.run(gather(engine.generate([request("refused")], SAMPLING)))
    assert type(error.value) is RolloutError


def test_cancelling_reaches_the_engine(engine: EngineClient) -> None:
    async def cancel() -> list[str]:
        waiting = asyncio.ensure_future(gather(engine.generate([request("forever")], SAMPLING)))
        while not await engine._ask("asked for its ends", ScriptedEngine.ends):
            await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        while len(ends := await engine._ask("asked for its ends", ScriptedEngine.ends)) < 2:
            await asyncio.sleep(0.01)
        return list(ends)

    assert asyncio.run(cancel()) == ["begun", "aborted"]


def new_engine(name: str) -> EngineClient:
    def new_worker() -> Any:
        return ray.remote(Scripted).options(num_cpus=0).remote(name)

    return EngineClient(name, [PartSpec(new_worker, Path("log"))])


def test_a_finished_sample_comes_at_once_and_leaving_then_aborts_the_rest() -> None:
    engine = new_engine("engine 5")

    async def leave() -> list[str]:
        samples = engine.generate([request("a"), request("forever")], SAMPLING)
        assert (await asyncio.wait_for(anext(samples), 60)).prompt_id == "a"
        while not await engine._ask("asked for its ends", ScriptedEngine.ends):
            await asyncio.sleep(0.01)
        assert engine.lane.state is State.drawing
        await samples.aclose()
        assert engine.lane.state is None
        while len(ends := await engine._ask("asked for its ends", ScriptedEngine.ends)) < 2:
            await asyncio.sleep(0.01)
        return list(ends)

    assert asyncio.run(leave()) == ["begun", "aborted"]
    asyncio.run(engine.shutdown())


@pytest.mark.tier("full")
def test_the_lane_shows_a_weight_update_under_samples_that_are_drawn() -> None:
    engine = new_engine("engine 7")
    shown = list[State | None]()

    async def update() -> None:
        samples = engine.generate([request("a"), request("forever")], SAMPLING)
        await anext(samples)
        shown.append(engine.lane.state)
        await engine.start_update()
        shown.append(engine.lane.state)
        receiving = asyncio.ensure_future(engine.call_workers(WeightReceiverMethods.sync_receive, 3))
        await asyncio.sleep(0)
        shown.append(engine.lane.state)
        await receiving
        shown.append(engine.lane.state)
        await engine.finish_update(3)
        shown.append(engine.lane.state)
        await samples.aclose()
        shown.append(engine.lane.state)

    begun = time.perf_counter()
    asyncio.run(update())
    assert shown == [State.drawing, State.paused, State.updating, State.paused, State.drawing, None]
    spans = engine.lane.take(begun, time.perf_counter())
    assert [each.state for each in spans] == shown[:-1]
    asyncio.run(engine.shutdown())


def test_an_actor_that_dies_with_samples_under_way_is_a_dead_engine() -> None:
    engine = new_engine("engine 6")

    async def die() -> None:
        samples = engine.generate([request("a"), request("forever")], SAMPLING)
        await anext(samples)
        engine.kill()
        with pytest.raises(DeadEngineError, match="engine 6 died while generating 1 samples: its Ray actor is gone"):
            await asyncio.wait_for(anext(samples), 60)

    asyncio.run(die())


@pytest.mark.tier("full")
def test_an_actor_that_is_gone_is_a_dead_engine_and_can_be_shut_down() -> None:
    engine = new_engine("engine 9")
    asyncio.run(engine.version())
    engine.kill()
    with pytest.raises(DeadEngineError, match="engine 9 died while generating 1 samples: its Ray actor is gone"):
        asyncio.run(gather(engine.generate([request("a")], SAMPLING)))
    with pytest.raises(DeadEngineError, match="engine 9 died while going to sleep"):
        asyncio.run(engine.sleep())
    asyncio.run(engine.shutdown())


HUNG = r"engine 8 hangs while {}: {} \(trainer.watchdog says how long is too long\)"


def hasty(limit_s: float = 1.0) -> Watchdog:
    """Of an engine that is meant to hang: it cannot take too long for this."""
    return Watchdog(WatchdogConfig(limit_s=limit_s))


@pytest.mark.tier("full")
def test_an_actor_that_stands_still_is_told_of_and_killed(tmp_path: Path) -> None:
    engine = new_engine("engine 8")

    async def hang() -> str:
        where = await engine._workers[0].whereabouts.remote()
        actors.append(psutil.Process(where.pid))
        actors[0].send_signal(signal.SIGSTOP)
        engine.hang_watch.watchdog, engine.hang_watch.places = (
            hasty(),
            [EnginePlace(where, None, tmp_path / "engine-8.log")],
        )
        with pytest.raises(DeadEngineError, match=HUNG.format("waking up", "no answer for 1 s")) as error:
            await engine.wake()
        with pytest.raises(DeadEngineError):
            await engine.version()
        return str(error.value)

    actors = list[psutil.Process]()
    said = asyncio.run(hang()).splitlines()
    (actor,) = actors
    assert said[1] == f"  its Ray actor, process {actor.pid}: stopped (state T): somebody sent it SIGSTOP"
    (report,) = tmp_path.glob("hang_*.txt")
    assert said[2] == f"The stacks of its processes are in {report}"
    assert report.read_text().startswith(said[0]) and "no stacks: a stopped process cannot" in report.read_text()
    assert not still_alive([actor])


def test_samples_that_never_come_without_any_progress_are_a_hung_engine() -> None:
    engine = new_engine("engine 8")
    engine.hang_watch.watchdog = hasty()

    async def draw() -> None:
        calls = [gather(engine.generate([request(name), request("forever")], SAMPLING)) for name in ("a", "b")]
        for end in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(end, DeadEngineError) and "no progress for" in str(end), end

    asyncio.run(draw())


class Clock:
    """Time that passes only where somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        for _ in range(4):  # what else runs
            await _turn()


async def _turn() -> None:
    await asyncio.get_running_loop().run_in_executor(None, lambda: None)


@pytest.mark.parametrize(
    ("tokens", "paused", "expected"),
    [
        ([0] * 1000, False, "hung"),  # its server answers, and its core counts nothing
        ([*range(200), *[200] * 1000], False, "hung"),  # it stopped after a while
        ([*range(4000)], False, "lives"),  # one long response: tokens, and no sample for hours
        ([0] * 1000, True, "lives"),  # an update is under way
    ],
)
def test_progress_is_what_the_scheduler_counts(
    tokens: list[int], paused: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, counts = Clock(), iter(tokens)

    async def statistics(*_: Any) -> Statistics:
        return Statistics(generated_tokens=next(counts, tokens[-1]))

    monkeypatch.setattr(engine_watch.time, "monotonic", clock.monotonic)
    monkeypatch.setattr(engine_watch, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": clock.sleep}))
    dog = Watchdog(WatchdogConfig(limit_s=1000, least_s=100, factor=2))
    engine = EngineWatch("engine 8", dog, statistics, pytest.fail)
    engine.paused = paused

    async def watch() -> str:
        silent = asyncio.ensure_future(engine._silent())
        while clock.now < 3000:
            if silent.done():
                assert silent.result() > dog.limit_s(WORK)
                return "hung"
            await asyncio.sleep(0)
        silent.cancel()
        await asyncio.wait([silent])
        return "lives"

    assert asyncio.run(watch()) == expected


def engine_on_two_nodes(name: str) -> EngineClient:
    def new_worker() -> Any:
        return ray.remote(ScriptedPart).options(num_cpus=0).remote(name)

    return EngineClient(name, [PartSpec(new_worker, Path("log"))] * 2)


@pytest.mark.tier("full")
def test_the_parts_of_an_engine_are_told_where_they_meet() -> None:
    engine = engine_on_two_nodes("engine 1")

    async def started() -> list[EngineNode]:
        await engine.start(SERVED)
        places = [await worker.given.remote() for worker in engine._workers]
        TCPStore(places[0].meeting.host, places[0].meeting.port, is_master=False, timeout=timedelta(seconds=20))
        await engine.shutdown()
        return places

    first, second = asyncio.run(started())
    assert (first.nnodes, first.node_rank) == (2, 0) and (second.nnodes, second.node_rank) == (2, 1)
    assert first.meeting == second.meeting and first.meeting is not None
    assert first.meeting.host == first.address and first.meeting.port != first.meeting.rpc_port


@pytest.mark.tier("full")
def test_an_engine_on_one_node_has_nobody_to_meet() -> None:
    def new_worker() -> Any:
        return ray.remote(ScriptedPart).options(num_cpus=0).remote("engine 2")

    async def started() -> EngineNode:
        engine = EngineClient("engine 2", [PartSpec(new_worker, Path("log"))])
        await engine.start(SERVED)
        given: EngineNode = await engine._workers[0].given.remote()
        await engine.shutdown()
        return given

    assert asyncio.run(started()) == ONE_NODE


@pytest.mark.tier("full")
def test_the_death_of_a_part_is_the_engine_s_until_it_is_started_again() -> None:
    engine = engine_on_two_nodes("engine 3")

    async def die() -> None:
        await engine.start(SERVED)
        samples = engine.generate([request("a"), request("forever")], SAMPLING)
        await anext(samples)
        await engine._workers[1].perform.remote("be_killed", (), {})
        message = "engine 3 died while generating 1 samples: its worker was killed"
        with pytest.raises(DeadEngineError, match=message):
            await asyncio.wait_for(anext(samples), 60)
        with pytest.raises(DeadEngineError, match="engine 3 died while asked for its version: its worker was killed"):
            await engine.version()
        before = list(engine._workers)
        with pytest.raises(DeadEngineError):
            await engine.start_update()  # by an updater that has not heard of it, so that it would stand for ever
        begun = time.perf_counter()
        await engine.restart()
        assert engine.lane.state is None, "the dead process draws and stands no more"
        assert [each.state for each in engine.lane.take(begun, time.perf_counter())][-1:] == [State.restarting]
        assert await engine.version() == 7
        for worker in before:
            with pytest.raises(ray.exceptions.RayActorError):
                await worker.given.remote()
        await engine.shutdown()

    asyncio.run(die())


@pytest.mark.tier("full")
def test_a_part_whose_node_is_gone_is_named() -> None:
    engine = engine_on_two_nodes("engine 4")

    async def die() -> None:
        await engine.start(SERVED)
        ray.kill(engine._workers[1])
        samples = engine.generate([request("forever")], SAMPLING)
        with pytest.raises(DeadEngineError, match=r"engine 4 died while generating 1 samples: .*its Ray actor is gone"):
            await asyncio.wait_for(anext(samples), 60)
        await engine.shutdown()

    asyncio.run(die())


@pytest.mark.tier("full")
def test_a_part_that_does_not_start_ends_the_wait_for_the_others() -> None:
    engine = engine_on_two_nodes("engine that fails")

    async def start() -> None:
        with pytest.raises(RolloutError, match="the second node has no room"):
            await asyncio.wait_for(engine.start(SERVED), 60)
        engine.kill()

    asyncio.run(start())
