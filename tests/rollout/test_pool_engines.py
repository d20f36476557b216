"""Two live engines in a pool draw what one of them draws alone, also when the other is killed meanwhile."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator

import pytest

from mcore_rl.errors import DeadEngineError
from mcore_rl.rollout.engine.environment import usable_cores
from mcore_rl.rollout.engine.process import EngineProcess, start_engine
from mcore_rl.rollout.engine.process_group import group_of
from mcore_rl.rollout.pool import EnginePool
from mcore_rl.rollout.protocol import Sample, Sampling, requests_of
from tests.support import rollouts
from tests.support.rollouts import assert_same, collect, generate, prompts, until_running, wait_until_gone

LONG = Sampling(max_tokens=64, ignore_eos=True, seed=11)
REQUESTS = requests_of(prompts(12), 4)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[EngineProcess]]:
    directory = tmp_path_factory.mktemp("llama")
    rollouts.write("llama", directory)
    cores = usable_cores()
    started = [
        start_engine(f"rollout-{index}", directory, rollouts.config(max_num_seqs=8), cores=share, wait=False)
        for index, share in enumerate((cores[: len(cores) // 2] or cores, cores[len(cores) // 2 :]))
    ]
    try:
        for engine in started:
            engine.wait_until_ready()
        yield started
    finally:
        for engine in started:
            engine.close()


@pytest.fixture(scope="module")
def expected(engines: list[EngineProcess]) -> dict[tuple[str, int], Sample]:
    return generate(engines[0], REQUESTS, LONG)


def test_two_engines_draw_what_one_draws(engines: list[EngineProcess], expected: dict[tuple[str, int], Sample]) -> None:
    before = [asyncio.run(engine.statistics()).generated_tokens for engine in engines]
    assert_same(generate(EnginePool(engines, 8), REQUESTS, LONG), expected, 1e-5)
    shares = [asyncio.run(e.statistics()).generated_tokens - b for e, b in zip(engines, before, strict=True)]
    assert sum(shares) == len(REQUESTS) * 64 and min(shares) > 0.25 * sum(shares)


def test_the_samples_of_an_engine_that_is_killed_are_drawn_by_the_other(
    engines: list[EngineProcess], expected: dict[tuple[str, int], Sample]
) -> None:
    pool = EnginePool(engines, 8, requeue=True)

    async def run() -> dict[tuple[str, int], Sample]:
        task = asyncio.create_task(collect(pool, REQUESTS, LONG))
        await until_running(engines[1])
        (core,) = (process for process in group_of(engines[1].pid) if process.pid != engines[1].pid)
        core.send_signal(signal.SIGKILL)
        return await task

    assert_same(asyncio.run(run()), expected, 1e-5)
    with pytest.raises(DeadEngineError, match=r"rollout-1 died while .*: vLLM's EngineCore was killed by SIGKILL"):
        asyncio.run(pool.version())


def test_the_last_engine_that_is_killed_is_an_error_that_names_it(engines: list[EngineProcess]) -> None:
    pool = EnginePool(engines, 8, requeue=True)

    async def run() -> float:
        task = asyncio.create_task(collect(pool, REQUESTS, LONG))
        await until_running(engines[0])
        engines[0]._process.kill()
        killed = time.monotonic()
        with pytest.raises(DeadEngineError, match=r"rollout-\d died while generating"):
            await task
        return time.monotonic() - killed

    assert asyncio.run(run()) < 30
    with pytest.raises(DeadEngineError, match=r"rollout-0 died .*: its process .* was killed by SIGKILL"):
        asyncio.run(engines[0].statistics())
    wait_until_gone(engines[0].pid)
