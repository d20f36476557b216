"""Engines that join a pool and leave it while it draws."""

from __future__ import annotations

import asyncio

from mcore_rl.ground.errors import DeadEngineError
from mcore_rl.rollout.pool import EnginePool
from mcore_rl.rollout.protocol import Sample
from tests.rollout.test_pool import FEW, TICK_S, Updated, drawn, pool_that_goes_on, whole


async def updated(pool: EnginePool, engine: Updated, version: int) -> None:
    async with pool.held():
        await engine.update(version)


def test_an_engine_that_joins_draws_once_it_has_received_weights() -> None:
    async def run() -> None:
        engines, pool = pool_that_goes_on(1)
        newcomer = Updated("1")
        newcomer.refuses = True  # it has no weights
        pool.add(newcomer)  # type: ignore[arg-type]
        assert [load.draws for load in pool.loads] == [True, False]
        assert whole(await drawn(pool)) and not newcomer.seen
        await updated(pool, newcomer, 1)
        assert whole(await drawn(pool)) and newcomer.seen and engines[0].seen

    asyncio.run(run())


def test_what_an_engine_that_leaves_has_begun_others_draw_to_the_end() -> None:
    """A token is its place in the response, its log-prob the version of its engine: whose tokens are where is seen."""

    async def run() -> tuple[dict[tuple[str, int], Sample], int, list[Updated]]:
        engines, pool = pool_that_goes_on(2)
        engines[1].version = 1
        drawing = asyncio.create_task(drawn(pool))
        await asyncio.sleep(12 * TICK_S)
        had = len(pool.loads[0].costs)
        pool.retire(engines[0])  # type: ignore[arg-type]
        assert await pool.drain(engines[0]) == had > 0  # type: ignore[arg-type]
        assert [load.engine for load in pool.loads] == engines[1:] and not engines[0].running
        seen = len(engines[0].seen)
        samples = await drawing
        assert whole(await drawn(pool)) and len(engines[0].seen) == seen, "it draws nothing more"
        return samples, had, engines

    samples, had, engines = asyncio.run(run())
    assert whole(samples)
    begun = {request.key for request in engines[0].seen}
    both = [key for key, each in samples.items() if set(each.logprobs) == {0, 1}]
    assert len(both) == had and set(both) <= begun, "each goes on from the tokens that it had"
    for key in both:
        assert sorted(samples[key].logprobs) == list(samples[key].logprobs)


def test_a_request_that_is_on_its_way_to_an_engine_that_leaves_is_sent_to_another() -> None:
    async def run() -> None:
        engines, pool = pool_that_goes_on(2)
        engines[0].arrival_s = 20 * TICK_S
        drawing = asyncio.create_task(drawn(pool))
        await asyncio.sleep(2 * TICK_S)
        assert pool.loads[0].costs and not engines[0].seen
        pool.retire(engines[0])  # type: ignore[arg-type]
        await pool.drain(engines[0])  # type: ignore[arg-type]
        assert whole(await drawing)

    asyncio.run(run())


def test_the_death_of_an_engine_that_leaves_is_nobodys_error() -> None:
    async def run() -> None:
        engines, pool = pool_that_goes_on(2)
        engines[0].arrival_s = 50 * TICK_S  # it answers nobody before it dies
        drawing = asyncio.create_task(drawn(pool))
        await asyncio.sleep(2 * TICK_S)
        pool.retire(engines[0])  # type: ignore[arg-type]
        draining = asyncio.create_task(pool.drain(engines[0]))  # type: ignore[arg-type]
        await asyncio.sleep(2 * TICK_S)
        engines[0].dead.set()
        await draining
        assert pool.death is None and whole(await drawing)
        pool.retire(engines[1])  # type: ignore[arg-type]
        pool.loads[0].death = DeadEngineError("1 died")
        assert pool.death is None, "nobody is to restart it"

    asyncio.run(run())


def test_the_last_that_stays_is_missed_when_it_dies_beside_one_that_leaves() -> None:
    async def run() -> None:
        engines, pool = pool_that_goes_on(2)
        drawing = asyncio.create_task(drawn(pool))
        await asyncio.sleep(5 * TICK_S)
        pool.retire(engines[0])  # type: ignore[arg-type]
        engines[1].dead.set()
        (end,) = await asyncio.gather(drawing, return_exceptions=True)
        assert isinstance(end, DeadEngineError) and pool.death is not None
        await pool.drain(engines[0])  # type: ignore[arg-type]
        engines[1].dead = asyncio.Event()
        pool.mark_alive()
        await updated(pool, engines[1], 1)
        assert whole(await drawn(pool, FEW))

    asyncio.run(run())
