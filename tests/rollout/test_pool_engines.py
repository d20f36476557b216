"""Two live engines in a pool draw what one of them draws alone, and one that is killed meanwhile is named."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedModel

from mcore_rl.ground.errors import DeadEngineError
from mcore_rl.rollout.pool import EnginePool
from mcore_rl.rollout.protocol import FinishReason, Prompt, Request, Sample, Sampling, requests_of
from mcore_rl.rollout.vllm.engine.environment import usable_cores
from mcore_rl.rollout.vllm.engine.process import EngineProcess
from mcore_rl.rollout.vllm.engine.process_group import group_of
from tests.rollout.test_pool_prefixes import ByLoad
from tests.support import rollouts
from tests.support.forked import start_engine
from tests.support.rollouts import (
    assert_same,
    chosen,
    collect,
    generate,
    prompts,
    reference_logprobs,
    until_running,
    wait_until_gone,
)

BLOCK = 128  # tokens of a block of the CPU engine's cache
SHORT = Sampling(max_tokens=16, ignore_eos=True, seed=11)
LONG = Sampling(max_tokens=64, ignore_eos=True, seed=11)
REQUESTS = requests_of(prompts(12), 4)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("llama")


@pytest.fixture(scope="module")
def model(directory: Path) -> PreTrainedModel:
    return rollouts.write("llama", directory)


@pytest.fixture(scope="module")
def engines(directory: Path, model: PreTrainedModel, processes: None) -> Iterator[list[EngineProcess]]:
    cores = usable_cores()
    started = [
        start_engine(
            f"rollout-{index}",
            directory,
            rollouts.config(max_num_seqs=8, max_prompt_length=400),
            cores=share,
            wait=False,
        )
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


@pytest.mark.tier("test")
def test_two_engines_draw_what_one_draws(engines: list[EngineProcess], expected: dict[tuple[str, int], Sample]) -> None:
    before = [asyncio.run(engine.statistics()).generated_tokens for engine in engines]
    assert_same(generate(EnginePool(engines, 8), REQUESTS, LONG), expected, 1e-5)
    shares = [asyncio.run(e.statistics()).generated_tokens - b for e, b in zip(engines, before, strict=True)]
    assert sum(shares) == len(REQUESTS) * 64 and min(shares) > 0.25 * sum(shares)


async def play(source: EnginePool) -> tuple[dict[str, list[list[int]]], float]:
    """The drawn turns of sessions of four, and the share of later ones that found all blocks of the turn before."""
    hits = list[bool]()

    async def session(number: int) -> list[list[int]]:
        rng = np.random.default_rng(number)
        tokens, drawn, before = rng.integers(3, rollouts.VOCAB, 140 + number).tolist(), list[list[int]](), 0
        for turn in range(4):
            name = f"p{number}/turn{turn}" if turn else f"p{number}"
            request = Request(prompt=Prompt(id=name, tokens=tuple(tokens), opening=f"p{number}"))
            ((_, sample),) = (await collect(source, [request], SHORT)).items()
            if drawn:
                hits.append(sample.cached_tokens >= (before - 1) // BLOCK * BLOCK)
            drawn.append(sample.tokens.tolist())
            before = len(tokens) + len(drawn[-1])
            tokens += [*drawn[-1], *rng.integers(3, rollouts.VOCAB, 40).tolist()]
            await asyncio.sleep(0.1 * rng.random())
        return drawn

    numbers = range(12)
    drawn = await asyncio.gather(*map(session, numbers))
    return {f"p{number}": turns for number, turns in zip(numbers, drawn, strict=True)}, sum(hits) / len(hits)


def test_turns_find_their_prefix_and_draw_the_same_wherever_they_go(engines: list[EngineProcess]) -> None:
    async def cold(source: EnginePool) -> tuple[dict[str, list[list[int]]], float]:
        for engine in engines:  # as every update does, it empties the prefix cache
            await engine.start_update()
            await engine.finish_update(0)
        return await play(source)

    pool = EnginePool(engines, 8)
    drawn, hit_share = asyncio.run(cold(pool))
    assert hit_share > 0.7, "by load alone half; on a busy machine the other engine may be idle for moments"
    assert 0.45 < pool.hits.take()["rollout/prefix_hit_share"] < 1
    assert asyncio.run(cold(ByLoad(engines, 8)))[0] == drawn
    assert asyncio.run(cold(EnginePool(engines[:1], 8)))[0] == drawn


def assert_of_the_model(samples: dict[tuple[str, int], Sample], model: PreTrainedModel) -> None:
    """Every request has its whole response, and every token the log-prob that transformers gives it."""
    assert samples.keys() == {request.key for request in REQUESTS}
    for request in REQUESTS:
        sample = samples[request.key]
        assert sample.finish is FinishReason.length and len(sample.tokens) == sample.versions[-1].end == 64
        reference = reference_logprobs(model, request.prompt.tokens, sample.tokens)
        np.testing.assert_allclose(sample.logprobs, chosen(reference, sample.tokens), rtol=0, atol=1e-5)


def test_samples_that_a_failed_update_aborts_go_on_after_one_that_succeeds(
    engines: list[EngineProcess], model: PreTrainedModel
) -> None:
    async def run() -> dict[tuple[str, int], Sample]:
        pool = EnginePool(engines, 8)
        drawing = asyncio.create_task(collect(pool, REQUESTS, LONG))
        await until_running(engines[0])
        async with pool.held():
            for engine in engines:
                await engine.start_update()
                await engine.fail_update("rank 1 is out of memory")
                await engine.start_update()
            assert pool.num_unfinished == 0 and not drawing.done()
            for engine in engines:
                await engine.finish_update(1)
        return await drawing

    samples = asyncio.run(run())
    assert_of_the_model(samples, model)
    assert [0, 1] in [[span.version for span in sample.versions] for sample in samples.values()]


def test_an_interrupt_gives_everything_back_and_all_of_it_goes_on(
    engines: list[EngineProcess], model: PreTrainedModel
) -> None:
    pool = EnginePool(engines, 8)

    async def run() -> dict[tuple[str, int], Sample]:
        drawing = asyncio.create_task(collect(pool, REQUESTS, LONG))
        await until_running(engines[0])
        await until_running(engines[1])
        await pool.interrupt()
        assert pool.num_unfinished == 0
        return await asyncio.wait_for(drawing, 5)

    parts = asyncio.run(run())
    given_back = [part for part in parts.values() if part.finish is FinishReason.abort]
    assert any(len(part.tokens) for part in given_back) and any(not len(part.tokens) for part in given_back)
    requests = [Request(prompt=each.prompt, index=each.index, so_far=parts[each.key]) for each in REQUESTS]
    on = generate(pool, [each for each in requests if parts[each.key] in given_back], LONG)
    assert_of_the_model(parts | on, model)
    for key, sample in on.items():  # what was drawn stays; and what follows is not drawn by the same random numbers
        before = len(parts[key].tokens)
        np.testing.assert_array_equal(sample.tokens[:before], parts[key].tokens)
        assert before < 8 or (sample.tokens[before : 2 * before] != parts[key].tokens[: 64 - before]).any()


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
