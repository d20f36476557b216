"""Real Ray actors called together: who gets what, and that a failure is told by its first cause, soon."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch
from ray.exceptions import OutOfMemoryError
from torch.distributed import TCPStore

from mcore_rl.config.parallel import parse_layout
from mcore_rl.config.trainer import WatchdogConfig
from mcore_rl.ground.errors import ConfigError, WorkerError
from mcore_rl.ground.types import TrainBatch
from mcore_rl.parallel.layout import Layout
from mcore_rl.parallel.phase import SLOT_BYTES, write_slot
from mcore_rl.runtime.answers import last_phase, phase_file, phase_since
from mcore_rl.runtime.shard import shards_of
from mcore_rl.runtime.shared_batch import SharedBatch
from mcore_rl.runtime.train_worker import TrainWorker
from mcore_rl.runtime.watchdog import Watchdog
from mcore_rl.runtime.worker_group import WorkerGroup
from tests.support.answerers import VIOLATION, Talker
from tests.support.run_task import still_alive

SOON_S = 60.0  # far more than it takes on a busy machine, far less than the workers would wait


@pytest.fixture(scope="module", autouse=True)
def cluster(processes: None) -> Iterator[None]:
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def patient() -> Watchdog:
    return Watchdog(WatchdogConfig())


def start(role: str, layout: str, world_size: int, folder: Path) -> WorkerGroup:
    shape = Layout.of(parse_layout(layout), world_size)
    logs = [folder / f"{role}-{rank}.log" for rank in range(world_size)]
    environment = {"env_vars": {"OMP_NUM_THREADS": "1"}}
    actor = ray.remote(Talker).options(num_cpus=0, runtime_env=environment)
    workers = [actor.remote(rank, log) for rank, log in enumerate(logs)]
    return WorkerGroup(role, workers, shape, [f"node{rank // 2}" for rank in range(world_size)], logs, patient())


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory, pair: WorkerGroup) -> Iterator[WorkerGroup]:
    """tp=2, dp=2; they outlive what fails in them.  pair: started first, so that all start at once."""
    group = start("talker", "tp=2", 4, tmp_path_factory.mktemp("four"))
    yield group
    group.close()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerGroup]:
    """dp=2; one of them is killed."""
    group = start("mourner", "", 2, tmp_path_factory.mktemp("pair"))
    yield group
    group.close()


@pytest.fixture
def store() -> Iterator[TCPStore]:
    """Lets go of who waits, at the end."""
    made = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield made
    made.set("let go", b"")


def failure(group: WorkerGroup, kinds: dict[int, str], store: TCPStore) -> WorkerError:
    with pytest.raises(WorkerError) as error:
        asyncio.run(group.all(Talker.fails, kinds, group.layout.world_size, store.port))
    return error.value


def test_all_answer_in_the_order_of_the_ranks(four: WorkerGroup) -> None:
    assert asyncio.run(four.all(Talker.told, "a", 2)) == [(rank, ("a", 2)) for rank in range(4)]
    assert asyncio.run(four.one(2, Talker.told, "alone")) == (2, ("alone",))


def two_sequences(group: WorkerGroup) -> SharedBatch:
    """Large enough to lie in the store: the first, of dp 0, is all 1, the second all 2."""
    tokens_T = torch.ones(2 << 18, dtype=torch.int32)
    tokens_T[1 << 18 :] = 2
    batch = TrainBatch(lengths_S=(1 << 18, 1 << 18), tokens_T=tokens_T, mask_T=torch.zeros(2 << 18, dtype=torch.bool))
    names = [name for name, _ in batch.token_fields()]
    shared = SharedBatch(batch.lengths_S, [[0], [1]])
    shared.add(shared.assignment, group.put(shards_of(batch, shared.assignment)), names)
    return shared


def test_each_data_parallel_rank_gets_its_portion_and_its_leader_answers_and_keeps(four: WorkerGroup) -> None:
    # tp is the fastest axis: ranks 0 and 1 are dp 0, ranks 2 and 3 are dp 1.
    shared = two_sequences(four)
    inputs = shared.shard_refs([[[0]], [[1]]], ["tokens_T", "mask_T"], ["left", "right"])
    values, kept = asyncio.run(four.map(Talker.sums, inputs, 5))
    assert values == [(0, 1 << 18, "left", (5,)), (2, 2 << 18, "right", (5,))]
    first, second = ray.get(kept)
    assert first.fields["tokens_T"][0].sum() == 2 << 18 and second is None
    shared.add([[0]], kept[:1], ["tokens_T"])  # what rank 0 keeps is handed to others like any shard
    values, _ = asyncio.run(
        four.map(Talker.sums, shared.shard_refs([[[0]], [[0]]], ["tokens_T", "mask_T"], ["", ""]), 6)
    )
    assert values == [(0, 2 << 18, "", (6,)), (2, 2 << 18, "", (6,))]


def test_peers_read_one_copy_where_it_lies(four: WorkerGroup) -> None:
    calls: dict[int, tuple[Any, ...]] = {}

    class Recording:
        def __init__(self, rank: int) -> None:
            self.call_on, self.rank = self, rank

        def remote(self, message: bytes, portion: bytes, *references: Any) -> Any:
            calls[self.rank] = references
            return four._workers[self.rank].call_on.remote(message, portion, *references)

    recorded = WorkerGroup(
        "talker", [Recording(rank) for rank in range(4)], four.layout, four.hosts, four._logs, patient()
    )
    inputs = two_sequences(recorded).shard_refs([[[0]], [[1]]], ["tokens_T", "mask_T"], ["", ""])
    asyncio.run(recorded.map(Talker.sums, inputs))
    left, right = (shard for each in inputs for shard in each.shards)
    assert calls == {0: (left,), 1: (left,), 2: (right,), 3: (right,)}
    with pytest.raises(AssertionError, match="1 inputs for dp=2"):
        asyncio.run(recorded.map(Talker.sums, inputs[:1]))


def test_what_a_worker_prints_is_in_its_log(four: WorkerGroup) -> None:
    asyncio.run(four.one(1, Talker.says, "hello from one"))
    assert "hello from one" in four._logs[1].read_text()
    assert "hello" not in four._logs[0].read_text()


def test_an_error_is_named_at_once_though_its_peers_wait(four: WorkerGroup[Talker], store: TCPStore) -> None:
    began = time.monotonic()
    said = str(failure(four, {3: "raises", 1: "returns"}, store))
    assert time.monotonic() - began < SOON_S
    head = "talker rank 3 (dp1 pp0 tp1 cp0 ep0) failed on node1 in fails > forward, microbatch 3: ValueError: no such"
    assert said.startswith(head)
    assert "talker rank 1 (dp0 pp0 tp1 cp0 ep0): had finished" in said
    assert "talker rank 0 (dp0 pp0 tp0 cp0 ep0): stopped in fails > backward" in said
    assert "Traceback of rank 3:" in said and 'raise ValueError("no such expert")' in said
    assert said.endswith(f"Its output is in {four._logs[3]}")


def test_an_error_for_the_user_is_raised_as_it_is(four: WorkerGroup[Talker], store: TCPStore) -> None:
    with pytest.raises(ConfigError) as error:
        asyncio.run(four.all(Talker.fails, {2: "refuses"}, 4, store.port))
    assert error.value.violations == (VIOLATION,)
    assert error.value.__notes__ == [
        "Raised by talker rank 2 (dp1 pp0 tp0 cp0 ep0) on node1 in fails > forward, microbatch 3"
    ]


def test_who_lost_its_peers_is_not_the_cause(four: WorkerGroup[Talker], store: TCPStore) -> None:
    said = str(failure(four, {0: "loses its peers", 1: "loses its peers", 2: "exits", 3: "loses its peers"}, store))
    assert said.startswith("talker rank 2 (dp1 pp0 tp0 cp0 ep0) failed on node1 in fails > forward, microbatch 3: Syst")
    assert "talker rank 0 (dp0 pp0 tp0 cp0 ep0): stopped in fails > forward, microbatch 3, its peers gone" in said


def test_where_all_lost_their_peers_the_message_says_so(four: WorkerGroup[Talker], store: TCPStore) -> None:
    said = str(failure(four, {0: "loses its peers"}, store))
    assert "no rank reported a cause of its own" in said
    assert "talker rank 3 (dp1 pp0 tp1 cp0 ep0): stopped in fails > backward" in said


def test_a_killed_worker_is_named_with_what_it_was_doing(pair: WorkerGroup[Talker], store: TCPStore) -> None:
    asyncio.run(pair.all(Talker.join, store.port, 2))
    processes = [psutil.Process(pid) for pid in asyncio.run(pair.all(Talker.pid))]
    for attempt, where in enumerate(["dies > gradients", "dies"]):  # also when it is dead: none waits for its peer then
        with pytest.raises(WorkerError) as error:
            asyncio.run(pair.all(Talker.dies, 1, 0, store.port))
        said = str(error.value)
        assert said.startswith("mourner rank 1 (dp1 pp0 tp0 cp0 ep0) failed on node0 in dies > forward, microbatch 7")
        assert "its process died" in said.splitlines()[0], attempt
        assert f"mourner rank 0 (dp0 pp0 tp0 cp0 ep0): stopped in {where}" in said
    pair.close()
    assert still_alive(processes) == []


def test_a_worker_that_the_kernel_killed_for_memory_is_named_so(tmp_path: Path) -> None:
    @ray.remote(num_cpus=0)
    def killed() -> None:
        raise OutOfMemoryError("Task was killed due to the node running low on memory.")

    class Doomed:
        def __init__(self) -> None:
            self.call = self

        def remote(self, message: bytes) -> Any:
            return killed.remote()

    group = WorkerGroup("actor", [Doomed()], Layout.of(parse_layout(""), 1), ["here"], [tmp_path / "0.log"], patient())
    with pytest.raises(
        WorkerError, match=r"actor rank 0 .* failed on here: killed by the kernel or by Ray for want of"
    ):
        asyncio.run(group.all(TrainWorker.build))


def test_a_phase_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    log = tmp_path / "0.log"
    assert last_phase(log) == ""
    assert phase_since(log) is None
    slot = bytearray(SLOT_BYTES)
    write_slot(memoryview(slot), "forward")
    phase_file(log).write_bytes(slot)
    assert last_phase(log) == "forward"
    assert phase_since(log) == pytest.approx(time.time(), abs=SOON_S)


@pytest.mark.parametrize(
    ("hosts", "layout", "expected"),
    [
        (["a"] * 4, "", [[0, 1, 2, 3]]),
        (["a", "a", "b", "b"], "", [[0, 1], [2, 3]]),
        (["a", "b", "a", "b"], "", [[0], [1], [2], [3]]),
        (["a", "a", "b", "b"], "tp=2", [[0], [1]]),
        (["a"] * 10, "", [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9]]),
    ],
)
def test_neighbours_share_a_machine(hosts: list[str], layout: str, expected: list[list[int]]) -> None:
    count = len(hosts)
    placed = Layout.of(parse_layout(layout), count)
    group = WorkerGroup("actor", [None] * count, placed, hosts, [Path(os.devnull)] * count, patient())
    assert group.neighbours == expected
