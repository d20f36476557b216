"""The queue by itself, over engines that take a set time for each token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import numpy as np
import pytest

from mcore_rl.ground.errors import DeadEngineError, RolloutError, WeightsIncompleteError
from mcore_rl.rollout.episodes import VersionSpan
from mcore_rl.rollout.pool import EnginePool
from mcore_rl.rollout.protocol import EngineMemory, FinishReason, Pause, Prompt, Request, Sample, Sampling, requests_of

SAMPLING = Sampling(max_tokens=8)
TICK_S = 0.001


class Engine:
    """Runs ``seats`` samples at once, a tick for every token of the prompt; dies after ``life`` samples."""

    def __init__(self, name: str, seats: int = 4, life: int | None = None) -> None:
        self.name, self.life = name, life
        self.seats = asyncio.Semaphore(seats)
        self.prompts: list[str] = []
        self.tokens = self.unfinished = self.most = 0
        self.cancelled = False
        self.told: list[tuple[object, ...]] = []

    async def generate(self, requests: Sequence[Request], sampling: Sampling) -> AsyncIterator[Sample]:
        self.unfinished += len(requests)
        self.most = max(self.most, self.unfinished)
        self.prompts.append(requests[0].prompt.id)
        try:
            for request in requests:
                if "bad" in request.prompt.id:
                    raise RolloutError("a bad prompt")
                async with self.seats:
                    await asyncio.sleep(TICK_S * len(request.tokens))
                if self.life is not None:
                    self.life -= 1
                    if self.life < 0:
                        raise DeadEngineError(f"{self.name} died of old age")
                self.tokens += len(request.tokens)
                self.unfinished -= 1
                yield sample_of(request)
        except asyncio.CancelledError:
            self.cancelled = True
            raise

    async def sleep(self, level: int = 1) -> None:
        if self.life is not None and self.life < 0:
            raise DeadEngineError(f"{self.name} died of old age")
        self.told.append(("sleep", level))

    async def wake(self, memory: EngineMemory | None = None) -> None:
        self.told.append(("wake",) if memory is None else ("wake", memory))


def sample_of(request: Request) -> Sample:
    empty = np.zeros(3)
    return Sample(
        prompt_id=request.prompt.id,
        index=request.index,
        tokens=empty.astype(np.int32),
        logprobs=empty.astype(np.float32),
        versions=(),
        finish=FinishReason.length,
    )


def prompt(name: str, length: int) -> Prompt:
    return Prompt(id=name, tokens=(1,) * length)


async def keys(pool: EnginePool, requests: Sequence[Request]) -> list[tuple[str, int]]:
    return [(sample.prompt_id, sample.index) async for sample in pool.generate(requests, SAMPLING)]


def test_every_sample_comes_once_and_a_prompt_stays_on_one_engine() -> None:
    async def run() -> None:
        engines = [Engine("1"), Engine("2"), Engine("3")]
        requests = requests_of([prompt(f"p{i}", 1 + i % 5) for i in range(20)], 3)
        drawn = await keys(EnginePool(engines, 4), requests)
        assert sorted(drawn) == sorted(request.key for request in requests)
        assert sorted(name for engine in engines for name in engine.prompts) == sorted(f"p{i}" for i in range(20))
        assert all(engine.prompts for engine in engines)

    asyncio.run(run())


def test_long_prompts_are_spread_by_their_tokens_and_go_first() -> None:
    async def run() -> None:
        engines = [Engine("1", seats=2), Engine("2", seats=2)]
        lengths = [60, 50, 40, 30, *[5] * 24]
        requests = requests_of([prompt(f"p{i}", length) for i, length in enumerate(lengths)][::-1], 1)
        await keys(EnginePool(engines, 4), requests)
        assert {engine.prompts[0] for engine in engines} == {"p0", "p1"}
        assert abs(engines[0].tokens - engines[1].tokens) <= 60  # of 300; by count alone it could be all four long ones

    asyncio.run(run())


def test_an_engine_is_given_little_more_than_it_runs_at_once() -> None:
    async def run() -> None:
        engines = [Engine("1", seats=4), Engine("2", seats=4)]
        await keys(EnginePool(engines, 4), requests_of([prompt(f"p{i}", 2) for i in range(40)], 1))
        assert 4 <= max(engine.most for engine in engines) <= 5

    asyncio.run(run())


def test_a_group_larger_than_an_engine_is_still_drawn() -> None:
    drawn = asyncio.run(keys(EnginePool([Engine("1")], 2), requests_of([prompt("p", 1), prompt("q", 1)], 9)))
    assert len(drawn) == 18


def test_a_dead_engine_is_raised_and_the_rest_is_aborted() -> None:
    async def run() -> None:
        engines = [Engine("1"), Engine("2", life=2)]
        pool = EnginePool(engines, 4)
        with pytest.raises(DeadEngineError, match="2 died of old age"):
            await keys(pool, requests_of([prompt(f"p{i}", 5) for i in range(10)], 2))
        assert engines[0].cancelled
        with pytest.raises(DeadEngineError, match="2 died of old age"):
            await keys(pool, requests_of([prompt("p", 1)], 1))

    asyncio.run(run())


def test_a_restarted_engine_is_drawn_with_again_once_it_has_weights() -> None:
    async def run() -> None:
        engines = [Engine("1"), Engine("2", life=3)]
        pool = EnginePool(engines, 4)
        requests = requests_of([prompt(f"p{i}", 2) for i in range(10)], 2)
        with pytest.raises(DeadEngineError, match="2 died of old age"):
            await keys(pool, requests)
        engines[1].life = None  # restarted
        with pytest.raises(DeadEngineError, match="2 died of old age"):
            await keys(pool, requests)
        pool.mark_alive()
        drawn = engines[1].tokens
        await keys(pool, requests)
        assert engines[1].tokens == drawn, "it has no weights"
        async with pool.held():
            """They are sent."""
        assert sorted(await keys(pool, requests)) == sorted(request.key for request in requests)
        assert engines[1].tokens > drawn, "and not by the other alone"

    asyncio.run(run())


def test_a_refused_prompt_is_raised_and_kills_nobody() -> None:
    async def run() -> None:
        pool = EnginePool([Engine("1"), Engine("2")], 4)
        with pytest.raises(RolloutError, match="a bad prompt"):
            await keys(pool, requests_of([prompt("p", 3), prompt("bad", 3)], 1))
        assert len(await keys(pool, requests_of([prompt("p", 3)], 2))) == 2

    asyncio.run(run())


def test_leaving_early_gives_all_room_back() -> None:
    async def run() -> None:
        pool = EnginePool([Engine("1")], 4)
        samples = pool.generate(requests_of([prompt(f"p{i}", 5) for i in range(20)], 1), SAMPLING)
        await anext(samples)
        await samples.aclose()  # type: ignore[attr-defined]
        assert len(await asyncio.wait_for(keys(pool, requests_of([prompt("p", 1)], 4)), 5)) == 4

    asyncio.run(run())


def test_all_engines_sleep_and_wake_and_a_death_is_raised_once_all_have_answered() -> None:
    async def run() -> None:
        engines = [Engine("1"), Engine("2")]
        pool = EnginePool(engines, 4)
        await pool.sleep(2)
        await pool.wake(EngineMemory.weights)
        assert [engine.told for engine in engines] == [[("sleep", 2), ("wake", EngineMemory.weights)]] * 2
        engines[0].life = -1
        with pytest.raises(DeadEngineError, match="1 died of old age"):
            await pool.sleep()
        assert engines[1].told[2:] == [("sleep", 1)]

    asyncio.run(run())


class Updated:
    """Draws a token of each sample in a tick, up to ``max_tokens``; is updated, aborted and killed as real ones are.

    A token is its place in the response; its version and its log-prob are ``version``.  arrival_s: how long a request
    is on its way.
    """

    def __init__(self, name: str = "1", arrival_s: float = 0.0) -> None:
        self.name, self.arrival_s = name, arrival_s
        self.version, self.refuses, self.frozen = 0, False, False
        self.ended: set[tuple[str, int]] = set()
        self.drawing = set[tuple[str, int]]()  # samples that have a token
        self.running: set[tuple[str, int]] = set()
        self.seen: list[Request] = []
        self.dead: asyncio.Event = asyncio.Event()

    async def generate(self, requests: Sequence[Request], sampling: Sampling) -> AsyncIterator[Sample]:
        await asyncio.sleep(self.arrival_s)
        if self.refuses:
            raise WeightsIncompleteError("its weights are being updated")
        self.seen += requests
        finished: asyncio.Queue[Sample] = asyncio.Queue()
        tasks = [asyncio.create_task(self._draw(each, sampling.max_tokens, finished)) for each in requests]
        death = asyncio.create_task(self.dead.wait())
        try:
            for _ in requests:
                sample = asyncio.create_task(finished.get())
                await asyncio.wait([sample, death], return_when=asyncio.FIRST_COMPLETED)
                if death.done():
                    sample.cancel()
                    raise DeadEngineError(f"{self.name} was killed")
                yield sample.result()
        finally:
            for task in (*tasks, death):
                task.cancel()
            self.running -= {request.key for request in requests}

    async def _draw(self, request: Request, max_tokens: int, finished: asyncio.Queue[Sample]) -> None:
        so_far = request.so_far
        versions = [] if so_far is None else so_far.logprobs.tolist()
        self.running.add(request.key)
        while len(versions) < max_tokens and request.key not in self.ended:
            await asyncio.sleep(TICK_S)
            if not self.frozen:
                versions.append(self.version)
                self.drawing.add(request.key)
        aborted = request.key in self.ended
        self.ended.discard(request.key)
        self.running.discard(request.key)
        finished.put_nowait(
            Sample(
                prompt_id=request.prompt.id,
                index=request.index,
                tokens=np.arange(len(versions), dtype=np.int32),
                logprobs=np.array(versions, dtype=np.float32),
                versions=(VersionSpan(version=self.version, start=0, end=len(versions)),),
                finish=FinishReason.abort if aborted else FinishReason.length,
            )
        )

    async def abort(self, keys: object = None) -> None:
        self.ended |= self.running

    async def update(self, version: int, *, failures: int = 0) -> None:
        """As ``WeightUpdater``: each failure ends the samples that were kept."""
        self.refuses = self.frozen = True
        for _ in range(failures):
            await self.abort()
            while self.running:
                await asyncio.sleep(TICK_S)
        await asyncio.sleep(10 * TICK_S)
        self.version, self.refuses, self.frozen = version, False, False


LONG = Sampling(max_tokens=40)
FEW = requests_of([prompt(f"p{i}", 2) for i in range(6)], 2)


async def drawn(pool: EnginePool, requests: Sequence[Request] = FEW) -> dict[tuple[str, int], Sample]:
    samples: dict[tuple[str, int], Sample] = {}
    async for sample in pool.generate(requests, LONG):
        key = (sample.prompt_id, sample.index)
        assert key not in samples
        samples[key] = sample
    return samples


def whole(samples: dict[tuple[str, int], Sample], requests: Sequence[Request] = FEW) -> bool:
    """Whether every request has its whole sample."""
    return samples.keys() == {request.key for request in requests} and all(
        each.finish is FinishReason.length and each.tokens.tolist() == list(range(40)) for each in samples.values()
    )


def of_two_versions(samples: Sequence[Sample]) -> list[Sample]:
    """Those with tokens of version 0, then of version 1."""
    return [each for each in samples if set(each.logprobs) == {0, 1} and (np.diff(each.logprobs) >= 0).all()]


def test_nothing_is_sent_while_engines_receive_weights() -> None:
    async def run() -> None:
        engine = Updated()
        pool = EnginePool([engine], 16)  # type: ignore[list-item]
        async with pool.held():
            drawing = asyncio.create_task(drawn(pool))
            await asyncio.sleep(20 * TICK_S)
            assert not engine.seen
            await engine.update(1)
        samples = await drawing
        assert whole(samples) and all((each.logprobs == 1).all() for each in samples.values())

    asyncio.run(run())


def test_what_was_on_its_way_when_an_update_began_is_sent_again() -> None:
    async def run() -> None:
        engine = Updated(arrival_s=5 * TICK_S)
        pool = EnginePool([engine], 16)  # type: ignore[list-item]
        drawing = asyncio.create_task(drawn(pool))
        await asyncio.sleep(TICK_S)
        async with pool.held():
            await engine.update(1)
        assert whole(await drawing) and len(engine.seen) == len(FEW)

    asyncio.run(run())


def test_an_engine_that_refuses_without_an_update_is_an_error() -> None:
    async def run() -> None:
        engine = Updated()
        engine.refuses = True
        with pytest.raises(WeightsIncompleteError):
            await asyncio.wait_for(drawn(EnginePool([engine], 16)), 5)  # type: ignore[list-item]

    asyncio.run(run())


@pytest.mark.parametrize("failures", [0, 1, 2])
def test_samples_under_way_go_on_after_an_update_and_after_one_that_failed_first(failures: int) -> None:
    """None is taken for finished, none begins anew, and what was drawn before is kept."""

    async def run() -> None:
        engine = Updated()
        pool = EnginePool([engine], 16)  # type: ignore[list-item]
        drawing = asyncio.create_task(drawn(pool))
        while len(engine.drawing) < len(FEW):  # each has a token, and none has all
            await asyncio.sleep(0)
        async with pool.held():
            await engine.update(1, failures=failures)
        samples = await drawing
        assert whole(samples) and len(of_two_versions([*samples.values()])) == len(FEW)
        assert len(engine.seen) == len(FEW) * (1 + min(failures, 1))
        assert all(each.so_far is not None and each.num_done for each in engine.seen[len(FEW) :])

    asyncio.run(run())


def test_an_update_may_wait_for_what_is_under_way_and_for_nothing_more() -> None:
    async def run() -> None:
        engine = Updated()
        pool = EnginePool([engine], 3)  # type: ignore[list-item]
        drawing = asyncio.create_task(drawn(pool))
        await asyncio.sleep(5 * TICK_S)
        sent = len(engine.seen)
        async with pool.held(Pause.wait):
            assert len(engine.seen) == sent < len(FEW) and pool.num_unfinished == 0
            await engine.update(1)
        samples = await drawing
        assert whole(samples) and not of_two_versions([*samples.values()])
        assert [set(samples[each.key].logprobs) for each in engine.seen] == [{0}] * sent + [{1}] * (len(FEW) - sent)

    asyncio.run(run())


@pytest.mark.parametrize("arrival_s", [0.0, 8 * TICK_S])
def test_an_interrupt_gives_all_requests_back_and_they_go_on_from_there(arrival_s: float) -> None:
    """With ``arrival_s`` they are still on their way."""

    async def run() -> None:
        engine = Updated(arrival_s=arrival_s)
        pool = EnginePool([engine], 5)  # type: ignore[list-item]
        drawing = asyncio.create_task(drawn(pool))
        await asyncio.sleep(5 * TICK_S)
        await pool.interrupt()
        assert pool.num_unfinished == 0
        samples = await asyncio.wait_for(drawing, 1)
        assert samples.keys() == {request.key for request in FEW}
        assert {each.finish for each in samples.values()} == {FinishReason.abort}
        begun = {request.key for request in engine.seen}
        assert 0 < len(begun) < len(FEW)
        assert all(not len(each.tokens) and not each.versions for key, each in samples.items() if key not in begun)
        engine.version, engine.arrival_s = 1, 0.0
        on = [Request(prompt=each.prompt, index=each.index, so_far=samples[each.key]) for each in FEW]
        again = await drawn(pool, on)
        assert whole(again)
        for key, sample in again.items():
            assert (sample.logprobs[: len(samples[key].tokens)] == 0).all() and sample.logprobs[-1] == 1

    asyncio.run(run())


def test_an_interrupt_gives_a_request_back_with_the_tokens_that_it_came_with() -> None:
    async def run() -> None:
        engine = Updated()
        pool = EnginePool([engine], 5)  # type: ignore[list-item]
        (request,) = FEW[:1]
        drawing = asyncio.create_task(drawn(pool, [request]))
        await asyncio.sleep(5 * TICK_S)
        await pool.interrupt()
        first = (await drawing)[request.key]
        async with pool.held():
            on = Request(prompt=request.prompt, index=request.index, so_far=first)
            drawing = asyncio.create_task(drawn(pool, [on]))
            await asyncio.sleep(5 * TICK_S)
            await pool.interrupt()
            assert (await drawing)[request.key] is first and len(first.tokens)

    asyncio.run(run())


def pool_that_goes_on(count: int, seats: int = 4) -> tuple[list[Updated], EnginePool]:
    engines = [Updated(str(number)) for number in range(count)]
    return engines, EnginePool(engines, seats, goes_on=True)  # type: ignore[arg-type]


def test_a_pool_that_goes_on_gives_what_a_dead_engine_had_to_the_others() -> None:
    async def run() -> None:
        engines, pool = pool_that_goes_on(2)
        drawing = asyncio.create_task(drawn(pool))
        await asyncio.sleep(5 * TICK_S)
        taken = {request.key for request in engines[0].seen}
        engines[0].dead.set()
        assert whole(await drawing)
        assert taken and taken < {request.key for request in engines[1].seen}
        assert "0 was killed" in str(pool.death)
        engines[0].dead, engines[0].refuses = asyncio.Event(), True
        pool.mark_alive()
        assert pool.death is None and whole(await drawn(pool)), "without the restarted one, which has no weights"
        async with pool.held():
            await engines[0].update(1)
        engines[0].seen.clear()
        assert whole(await drawn(pool)) and engines[0].seen

    asyncio.run(run())


def test_a_pool_that_goes_on_raises_once_its_last_engine_died() -> None:
    async def run() -> None:
        engines, pool = pool_that_goes_on(2, seats=1)
        both = [asyncio.create_task(drawn(pool)) for _ in range(2)]
        for engine in engines:
            await asyncio.sleep(5 * TICK_S)
            engine.dead.set()
        for each in await asyncio.gather(*both, return_exceptions=True):
            assert isinstance(each, DeadEngineError)

    asyncio.run(run())


def test_a_process_that_died_before_its_engine_was_restarted_is_no_death_of_the_new_one() -> None:
    async def run() -> None:
        engines, pool = pool_that_goes_on(2, seats=16)
        drawing = asyncio.create_task(drawn(pool))
        await asyncio.sleep(5 * TICK_S)
        pool._loads[0].death = DeadEngineError("seen by an update")
        pool.mark_alive()
        async with pool.held():
            """It receives weights."""
        before, engines[0].dead = engines[0].dead, asyncio.Event()
        before.set()  # only now the samples end
        assert pool.death is None and whole(await drawing)

    asyncio.run(run())


def test_room_wakes_one_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every wait is a future: each request waits for room once, however many others do."""

    async def run(count: int) -> int:
        made, loop = 0, asyncio.get_running_loop()
        create = loop.create_future

        def counted() -> asyncio.Future[object]:
            nonlocal made
            made += 1
            return create()

        monkeypatch.setattr(loop, "create_future", counted)
        await keys(EnginePool([Engine("1", seats=2)], 2), requests_of([prompt(f"p{i}", 1) for i in range(count)], 1))
        return made

    few, many = asyncio.run(run(40)), asyncio.run(run(160))
    assert many < 5 * few, "four times the requests"


def test_a_call_that_is_cancelled_while_it_waits_leaves_its_room_to_others() -> None:
    async def run() -> None:
        engine = Updated()
        pool = EnginePool([engine], 1)  # type: ignore[list-item]
        calls = [asyncio.create_task(drawn(pool, [request])) for request in FEW]
        await asyncio.sleep(5 * TICK_S)
        for call in calls[1::2]:
            call.cancel()
        calls[0].cancel()  # in the same moment as its room goes to another, which may be cancelled, too
        await asyncio.sleep(0)
        for call in calls[2::2]:
            assert len(await asyncio.wait_for(call, 5)) == 1
        assert pool.num_unfinished == 0 and not pool._waiters

    asyncio.run(run())
