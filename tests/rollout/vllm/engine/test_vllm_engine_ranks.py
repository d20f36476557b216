"""An engine of two ranks over gloo: the same tokens as one rank's transformers, and its end when one rank is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from transformers import PreTrainedModel

from mcore_rl.ground.errors import DeadEngineError
from mcore_rl.rollout.protocol import Sampling, requests_of
from mcore_rl.rollout.vllm.engine.environment import core_shares, usable_cores
from mcore_rl.rollout.vllm.engine.process import EngineProcess, start_engine
from mcore_rl.rollout.vllm.engine.process_group import group_of
from tests.support import rollouts
from tests.support.rollouts import chosen, collect, generate, prompts, reference_logprobs, wait_until_gone


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    directory = tmp_path_factory.mktemp("mixtral")
    return directory, rollouts.write("mixtral", directory)


@pytest.fixture(scope="module")
def engine(model: tuple[Path, PreTrainedModel], processes: None) -> Iterator[EngineProcess]:
    with start_engine("rollout-0", model[0], rollouts.config(tp=2)) as engine:
        yield engine


def test_two_ranks_draw_as_transformers_computes(engine: EngineProcess, model: tuple[Path, PreTrainedModel]) -> None:
    given = prompts(4)
    greedy = generate(engine, requests_of(given, 1), Sampling(max_tokens=24, temperature=0))
    drawn = generate(engine, requests_of(given, 2), Sampling(max_tokens=24, temperature=0.7, ignore_eos=True))
    for prompt in given:
        ids = model[1].generate(torch.tensor([prompt.tokens]), max_new_tokens=24, do_sample=False)
        np.testing.assert_array_equal(greedy[prompt.id, 0].tokens, ids[0, len(prompt.tokens) :].numpy())
        for index in range(2):
            sample = drawn[prompt.id, index]
            expected = chosen(reference_logprobs(model[1], prompt.tokens, sample.tokens, 0.7), sample.tokens)
            np.testing.assert_allclose(sample.logprobs, expected, rtol=0, atol=1e-5)
    assert asyncio.run(engine.call_workers(rollouts.check_health)) == [None, None]


def ranks_of(engine: EngineProcess) -> list[psutil.Process]:
    """The worker processes of vLLM: those of the engine that started none themselves."""
    processes = group_of(engine.pid)
    parents = {process.ppid() for process in processes}
    return [process for process in processes if process.pid not in parents]


def test_each_rank_computes_on_its_own_cores(engine: EngineProcess) -> None:
    """The threads that OpenMP bound: of both ranks together every core, none of them twice."""
    cores = usable_cores()
    shares = {frozenset(share) for share in core_shares(cores, 2)}
    workers = ranks_of(engine)
    assert len(workers) == 2
    bound = [{frozenset(os.sched_getaffinity(thread.id)) for thread in worker.threads()} for worker in workers]
    for share in shares:
        if len(share) == 1:  # else each thread is bound to one core of the share
            assert sum(share in threads for threads in bound) == 1


def test_a_rank_that_is_killed_ends_the_engine_with_its_cause(engine: EngineProcess) -> None:
    maps = [part.path for process in group_of(engine.pid) for part in process.memory_maps()]
    mapped = {Path(path) for path in maps if path.startswith(("/dev/shm/vllm_", "/dev/shm/psm_"))}
    kinds = {"psm", "vllm"} if torch.cpu._is_avx512_supported() else {"psm"}
    assert {file.name.partition("_")[0] for file in mapped} == kinds, "Python's, and where vLLM has it its kernels'"
    assert any(each.is_socket() for each in engine._scratch.iterdir())

    worker = ranks_of(engine)[0]

    async def for_ever() -> None:  # A batch may end before the signal comes, on a busy machine.
        while True:
            await collect(engine, requests_of(prompts(2), 50), Sampling(max_tokens=64))

    async def run() -> float:
        task = asyncio.create_task(for_ever())
        await engine.statistics()  # Answered once the first batch has reached vLLM.
        worker.send_signal(signal.SIGKILL)
        killed = time.monotonic()
        with pytest.raises(
            DeadEngineError,
            # vLLM may notice the end before the system can tell it the cause.
            match=r"rollout-0 died while generating \d+ samples: vLLM's VllmWorker-\d (was killed by SIGKILL|died)",
        ):
            await task
        return time.monotonic() - killed

    assert asyncio.run(run()) < 30
    with pytest.raises(DeadEngineError, match="VllmWorker"):
        asyncio.run(engine.version())
    wait_until_gone(engine.pid)
    assert not engine._scratch.exists()
    deadline = time.monotonic() + 30
    while left := [file for file in mapped if file.exists()]:  # a resource tracker removes some, as soon as it notices
        assert time.monotonic() < deadline, left
        time.sleep(0.01)
