"""Two live engines in a pool draw what one of them draws alone, and one that is killed meanwhile is named."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator

import pytest

from mcore_rl.errors import DeadEngineError
from mcore_rl.rollout.engine.environment import usable_cores
from mcore_rl.rollout.engine.process import EngineProcess
from mcore_rl.rollout.engine.process_group import group_of
from mcore_rl.rollout.pool import EnginePool
from mcore_rl.rollout.protocol import Sample, Sampling, requests_of
from tests.support import rollouts
from tests.support.forked import start_engine
from tests.support.rollouts import assert_same, collect, generate, prompts, until_running, wait_until_gone

LONG = Sampling(max_tokens=64, ignore_eos=True, seed=11)
REQUESTS = requests_of(prompts(12), 4)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory, processes: None) -> Iterator[list[EngineProcess]]:
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


def test_the_engine_that_is_killed_is_named_and_what_it_left_the_other_draws_alike(
    engines: list[EngineProcess], expected: dict[tuple[str, int], Sample]
) -> None:
    samples: dict[tuple[str, int], Sample] = {}

    async def draw() -> None:
        async for sample in EnginePool(engines, 8).generate(REQUESTS, LONG):
            samples[sample.prompt_id, sample.index] = sample

    async def run() -> None:
        task = asyncio.create_task(draw())
        await until_running(engines[1])
        (core,) = (process for process in group_of(engines[1].pid) if process.pid != engines[1].pid)
        core.send_signal(signal.SIGKILL)
        with pytest.raises(DeadEngineError, match=r"rollout-1 died while .*: vLLM's EngineCore was killed by SIGKILL"):
            await task

    asyncio.run(run())
    left = [request for request in REQUESTS if request.key not in samples]
    assert left, "else nothing is proven"
    assert_same(samples | generate(EnginePool(engines[:1], 8), left, LONG), expected, 1e-5)
    with pytest.raises(DeadEngineError, match=r"rollout-1 died while .*: vLLM's EngineCore was killed by SIGKILL"):
        asyncio.run(engines[1].version())


def test_an_engine_whose_process_is_killed_is_an_error_within_seconds(engines: list[EngineProcess]) -> None:
    pool = EnginePool(engines[:1], 8)

    async def run() -> float:
        task = asyncio.create_task(collect(pool, REQUESTS, LONG))
        await until_running(engines[0])
        engines[0]._process.kill()
        killed = time.monotonic()
        with pytest.raises(DeadEngineError, match=r"rollout-0 died while generating"):
            await task
        return time.monotonic() - killed

    assert asyncio.run(run()) < 30
    with pytest.raises(DeadEngineError, match=r"rollout-0 died .*: its process .* was killed by SIGKILL"):
        asyncio.run(engines[0].statistics())
    wait_until_gone(engines[0].pid)
