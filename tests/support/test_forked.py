"""What a server forks is as good as fresh, whatever ran before it and however that ended."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import random
import signal
import sys
import threading
import warnings
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.context import BaseContext
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from mcore_rl.ground.errors import WorkerError
from mcore_rl.parallel import cpu, launch
from mcore_rl.parallel.launch import Rank
from mcore_rl.rollout.vllm.engine import process
from tests.invariance.problems import MODELS
from tests.support import batches, engines, forked, process_state, rollouts
from tests.support.forked import run_ranks

pytestmark = pytest.mark.usefixtures("processes")
SEEN = "tests.support.process_state.Seen"


def state_of_rank(rank: Rank) -> dict[str, str]:
    kinds = [type(each).__name__ for each in (torch.zeros, torch.Tensor.cuda, torch.cuda.default_generators)]
    patched = (cpu._applied, torch.cuda.current_device.__module__, *kinds)
    megatron = (parallel_state.model_parallel_is_initialized(), sorted(get_cuda_rng_tracker().get_states()))
    return process_state.state() | {"patched": str(patched), "megatron": str(megatron)}


def differences(ours: dict[str, str], expected: dict[str, str]) -> dict[str, tuple[str, str]]:
    return {what: (ours[what], expected[what]) for what in expected if ours[what] != expected[what]}


def make_a_mess(rank: Rank, elsewhere: Path) -> None:
    """Train a little, and change what a process has."""
    with engines.world(rank), engines.groups_of("") as groups:
        engine = engines.build(groups, MODELS["dense"])
        batch = batches.ragged(MODELS["dense"].vocab_size)
        engine.train_step(batch, batches.policy_loss, batches.denominators(batch), with_entropy=True)
    os.environ["LEFT_BEHIND"] = "1"
    del os.environ["OMP_NUM_THREADS"]
    os.chdir(elsewhere)
    sys.path.append(str(elsewhere))
    os.umask(0o77)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    threading.Thread(target=threading.Event().wait, name="left behind", daemon=True).start()
    gc.disable()
    logging.getLogger().setLevel(logging.DEBUG)
    warnings.simplefilter("error")
    torch.manual_seed(99)
    random.seed(99)
    np.random.seed(99)
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.backends.mkldnn.enabled = False


def test_a_rank_finds_what_a_fresh_one_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_ranks(make_a_mess, 1, (tmp_path,))
    monkeypatch.setenv("OF_THIS_TEST", "yes")
    monkeypatch.chdir(tmp_path)
    for of_rank, fresh in zip(run_ranks(state_of_rank, 2), launch.run_ranks(state_of_rank, 2), strict=True):
        assert differences(of_rank, fresh) == {}
        assert "OF_THIS_TEST=yes" in of_rank["environment"]


@pytest.mark.parametrize(
    ("server", "context"), [(forked.RANK_SERVERS[0], forked.RANKS), (forked.ENGINE_SERVER, forked.ENGINES)]
)
def test_a_server_has_imported_all_that_it_should(server: forked.Server, context: BaseContext) -> None:
    """It would say nothing where it could not."""
    with ProcessPoolExecutor(1, context) as pool:
        assert not set(server.modules) - pool.submit(process_state.imported).result()


def draw(rank: Rank) -> tuple[float, float, float]:
    return torch.rand(()).item(), np.random.random(), random.random()


def test_nobody_draws_what_another_drew() -> None:
    """Fresh processes do not either: what ranks must agree in is seeded, or wrong."""
    draws = [drawn for _ in range(2) for drawn in run_ranks(draw, 4)]
    assert all(len(set(column)) == len(draws) for column in zip(*draws, strict=True))


def hash_of_a_string(rank: Rank) -> int:
    return hash("of a string")


def add_up(rank: Rank, tensors: list[torch.Tensor]) -> float:
    tensors[0] += 1000.0  # theirs: nobody else sees it
    return torch.stack(tensors).sum().item()


def test_many_tensors_travel_and_none_is_shared() -> None:
    tensors = [torch.tensor(float(number)) for number in range(300)]
    assert run_ranks(add_up, 2, (tensors,)) == [45_850.0, 45_850.0]
    assert tensors[0] == 0.0


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_that_differ_in_one_axis_order_their_sets_differently(world_size: int) -> None:
    hashes = run_ranks(hash_of_a_string, world_size)
    for rank, mine in enumerate(hashes):
        for bit in range(world_size.bit_length() - 1):
            assert hashes[rank ^ (1 << bit)] != mine


def end(rank: Rank, how: str) -> int:
    if how == "dies" and rank.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "hangs":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.pause()
    return os.getpid()


@pytest.mark.parametrize(
    ("how", "says"), [("dies", r"rank 1 failed on \S+: killed by SIGKILL"), ("hangs", "did not finish within 2 s")]
)
def test_a_rank_that_dies_or_hangs_fails_its_own_run_alone(how: str, says: str) -> None:
    with pytest.raises(WorkerError, match=says):
        run_ranks(end, 2, (how,), timeout_s=2.0 if how == "hangs" else None)
    assert not any(psutil.pid_exists(pid) for pid in run_ranks(end, 2, ("well",)))


def test_a_server_that_was_killed_is_replaced() -> None:
    run_ranks(end, 2, ("well",))
    for server in forked.RANK_SERVERS:
        psutil.Process(server._forkserver_pid).kill()
        os.waitid(os.P_PID, server._forkserver_pid, os.WEXITED | os.WNOWAIT)
    assert len(run_ranks(end, 2, ("well",))) == 2


@pytest.mark.tier("full")
def test_a_forked_engine_computes_in_a_process_like_a_fresh_one_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollouts.write("llama", tmp_path)
    monkeypatch.setenv("OF_THIS_TEST", "yes")
    how = dict(directory=tmp_path, config=rollouts.config(), extension=SEEN, wait=False)
    with process.start_engine("fresh", **how) as fresh, forked.start_engine("forked", **how) as ours:
        for engine in (fresh, ours):
            engine.wait_until_ready()
        (expected,), (of_ours,) = (
            asyncio.run(engine.call_workers(process_state.Seen.state)) for engine in (fresh, ours)
        )
    of_imports = {"path", "warnings"}  # what they add is there before the path is set, and of more modules
    different = differences(of_ours, expected)
    assert different.keys() <= of_imports, different
    assert "OF_THIS_TEST=yes" in of_ours["environment"]
