"""Real Ray actors that hang, in a collective and outside one: who is named, with phase, host, collective and stacks."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from torch.distributed import TCPStore

from mcore_rl.config.parallel import parse_layout
from mcore_rl.config.trainer import TrainerConfig, WatchdogConfig, trainer_violations
from mcore_rl.ground.errors import WorkerError
from mcore_rl.parallel.layout import Layout
from mcore_rl.runtime.watchdog import SHOWN, Hung, Watchdog, summary
from mcore_rl.runtime.worker_group import WorkerGroup
from tests.support.answerers import Talker


@pytest.fixture(scope="module", autouse=True)
def cluster(processes: None) -> Iterator[None]:
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def test_limits_are_learned_from_what_was_seen() -> None:
    dog = Watchdog(WatchdogConfig(limit_s=1000, factor=10, least_s=50))
    assert dog.limit_s("train") == 1000
    dog.took("train", 20.0)
    assert dog.limit_s("train") == 1000, "one may have been lucky"
    dog.took("train", 10.0)
    assert dog.limit_s("train") == 200
    assert dog.limit_s("score") == 1000, "each method by itself"
    dog.took("score", 1.0), dog.took("score", 2.0)
    assert dog.limit_s("score") == 50
    dog.took("score", 500.0)
    assert dog.limit_s("score") == 1000, "the limit for all stays"
    assert Watchdog(WatchdogConfig(limit_s=0)).limit_s("score") == float("inf")


@pytest.mark.tier("full")
def test_three_ranks_that_wait_for_one_that_does_something_else(tmp_path: Path) -> None:
    logs = [tmp_path / f"rank-{rank}.log" for rank in range(3)]
    workers = [ray.remote(Talker).options(num_cpus=0).remote(rank, log) for rank, log in enumerate(logs)]
    dog = Watchdog(WatchdogConfig(limit_s=120))  # to start in
    group = WorkerGroup("talker", workers, Layout.of(parse_layout(""), 3), ["a", "b", "c"], logs, dog)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    try:
        group._whereabouts = asyncio.run(group.all(Talker.whereabouts))
        asyncio.run(group.all(Talker.join, store.port, 3))
        group._watchdog = Watchdog(WatchdogConfig(limit_s=3))
        began = time.monotonic()
        with pytest.raises(WorkerError) as error:
            asyncio.run(group.all(Talker.hangs, 1, store.port))
        assert time.monotonic() - began < 60
        said = str(error.value).splitlines()
        assert said[0].startswith("talker: no answer to hangs after 3 s (trainer.watchdog")
        assert re.fullmatch(r"  talker rank 1 \(dp1 .*\) on b: in hangs > reading the data for \d+ s", said[1])
        waits = r"in hangs > gradients, microbatch 4 for \d+ s, waiting in all_reduce"
        assert re.fullmatch(rf"  talker rank 0 \(dp0 .*\) on a and 1 others: {waits}", said[2])
        path = Path(said[3].removeprefix("The stacks of all ranks are in "))
        assert path.parent == tmp_path and re.fullmatch(r"hang_\d{8}-\d{6}\.txt", path.name)
        written = path.read_text()
        assert written.startswith(said[0])
        for rank, function in enumerate(("all_reduce", "hangs", "all_reduce")):
            part = written[written.index(f"talker rank {rank} ") :].split("\ntalker rank")[0]
            assert f"in {function}" in part and "answerers.py" in part, part
    finally:
        store.set("let go", b"")
        group.close()


def test_a_call_s_time_begins_when_it_is_its_turn(tmp_path: Path) -> None:
    """Asked for while another call is under way, as a checkpoint on its way is, it may wait longer than its limit."""
    log = tmp_path / "rank-0.log"
    worker = ray.remote(Talker).options(num_cpus=0).remote(0, log)
    dog = Watchdog(WatchdogConfig(limit_s=120, least_s=0.5, factor=1))
    group = WorkerGroup("talker", [worker], Layout.of(parse_layout(""), 1), ["here"], [log], dog)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    async def two() -> None:
        await group.all(Talker.whereabouts)  # its process is up; what that took is no measure of a call
        for _ in range(2):
            dog.took("pid", 3.0)
        assert dog.limit_s("pid") == 3.0
        first = asyncio.create_task(group.all(Talker.fails, {}, 1, store.port))
        second = asyncio.create_task(group.all(Talker.pid))
        await asyncio.sleep(dog.limit_s("pid") + 1)
        store.set("let go", b"")
        assert await first == ["let go"] and len(await second) == 1

    try:
        asyncio.run(two())
        assert not list(tmp_path.glob("hang_*"))
    finally:
        store.set("let go", b"")
        group.close()


@pytest.mark.tier("full")
def test_a_worker_whose_process_stands_still_is_told_of_without_stacks(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    worker = ray.remote(Talker).options(num_cpus=0).remote(0, log)
    dog = Watchdog(WatchdogConfig(limit_s=120))
    group = WorkerGroup("talker", [worker], Layout.of(parse_layout(""), 1), ["here"], [log], dog)
    pid = 0
    try:
        group._whereabouts = asyncio.run(group.all(Talker.whereabouts))
        pid = group._whereabouts[0].pid
        os.kill(pid, signal.SIGSTOP)
        group._watchdog = Watchdog(WatchdogConfig(limit_s=1))
        with pytest.raises(WorkerError, match=r"on here: in no phase"):
            asyncio.run(group.all(Talker.told))
        (written,) = tmp_path.glob("hang_*.txt")
        assert "no stacks" in written.read_text()
    finally:
        if pid:
            os.kill(pid, signal.SIGCONT)
        group.close()


def test_the_screen_shows_who_differs_first_and_not_a_thousand_lines() -> None:
    def one(rank: int, phase: str) -> Hung:
        return Hung(f"rank {rank}", "node", phase, None, "", "")

    many = [one(rank, "backward") for rank in range(1000)] + [one(1000, "forward")]
    lines = summary(many)
    assert lines == ["  rank 1000 on node: in forward", "  rank 0 on node and 999 others: in backward"]
    lines = summary([one(rank, f"phase {rank}") for rank in range(SHOWN + 3)])
    assert len(lines) == SHOWN + 1 and lines[-1] == "  and 3 more that differ"


def test_limits_that_are_none_are_refused() -> None:
    wrong = TrainerConfig(watchdog=WatchdogConfig(limit_s=-1, factor=0.5, least_s=float("nan")))
    keys = [violation.key for violation in trainer_violations(wrong)]
    assert keys == ["trainer.watchdog.limit_s", "trainer.watchdog.factor", "trainer.watchdog.least_s"]
