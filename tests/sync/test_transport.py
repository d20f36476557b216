"""Messages in shared memory, between processes without a model: what is sent arrives, who is lost is named."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from mcore_rl.ground.errors import SyncError
from mcore_rl.parallel.launch import HOST
from mcore_rl.parallel.secret_store import StoreServer
from mcore_rl.sync.members import Address
from mcore_rl.sync.shared_memory import SharedMemoryTransport
from tests.support.forked import RANKS

SIZES = (5, 100_000, 1, 70_000, 3, 250_000)  # bytes, from each of two senders to each of two receivers
TIMEOUT_S = 4.0


def address(store: StoreServer, name: str) -> Address:
    return Address(store=store.access, name=name, num_trainers=2, num_rollout=2, timeout_s=TIMEOUT_S)


def filling(source: int, target: int, number: int) -> int:
    return 1 + source * 100 + target * 50 + number


def send(transport: SharedMemoryTransport, rank: int, until: int) -> None:
    outgoing = transport.outgoing(rank, torch.device("cpu"))
    try:
        outgoing.members.meet("begin")
        for number, size in enumerate(SIZES):
            if number == until:
                os.kill(os.getpid(), signal.SIGKILL)
            for target in range(2):
                outgoing.send(outgoing.buffer(size).fill_(filling(rank, target, number)), target)
        outgoing.flush()
        outgoing.members.meet("applied")
        outgoing.release()
    except Exception as error:
        outgoing.close()
        raise outgoing.members.failed(error, "sending") from error


def receive(transport: SharedMemoryTransport, rank: int) -> None:
    receiving = transport.incoming(1000, rank)
    wanted = [(source, size) for size in SIZES for source in range(2)]
    try:
        receiving.begin(1)
        for index, message in enumerate(receiving.messages(wanted)):
            source, size = wanted[index]
            assert len(message) == size
            assert (message == filling(source, rank, index // 2)).all(), (index, message[:5])
        receiving.finish()
    except Exception as error:
        raise receiving.failed(error, "receiving") from error


def take_part(member: int, transport: SharedMemoryTransport, victim: int, reports: Path) -> None:
    """Writes the error of this member, or nothing, into a file of its name."""
    torch.set_num_threads(1)
    report = ""
    try:
        if member < 2:
            send(transport, member, until=2 if member == victim else len(SIZES))
        else:
            receive(transport, member - 2)
    except SyncError as error:
        report = str(error)
    (reports / str(member)).write_text(report)


def run(transport: SharedMemoryTransport, victim: int, reports: Path) -> dict[int, str]:
    """What each member that lived to its end reported.  Not ``run_ranks``: it would end the others with the first."""
    processes = [RANKS.Process(target=take_part, args=(n, transport, victim, reports)) for n in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return {int(path.name): path.read_text() for path in reports.iterdir()}


@pytest.fixture(scope="module")
def store() -> StoreServer:
    return StoreServer(HOST)


def test_messages_arrive_whole_and_in_order(store: StoreServer, tmp_path: Path, processes: None) -> None:
    assert run(SharedMemoryTransport(address=address(store, "whole")), -1, tmp_path) == dict.fromkeys(range(4), "")


def test_a_killed_sender_is_named_by_all(store: StoreServer, tmp_path: Path, processes: None) -> None:
    failures = run(SharedMemoryTransport(address=address(store, "killed")), 1, tmp_path)
    assert failures.keys() == {0, 2, 3}
    assert all(report.startswith("training rank 1 (process ") for report in failures.values()), failures
