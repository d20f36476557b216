"""Every transport that runs here, between processes without a model: what is sent arrives, who is lost is named."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore

from mcore_rl.errors import SyncError
from mcore_rl.parallel.launch import HOST
from mcore_rl.sync.members import Address
from mcore_rl.sync.process_group import ProcessGroupTransport
from mcore_rl.sync.shared_memory import SharedMemoryTransport
from mcore_rl.sync.transport import Transport
from tests.support.forked import RANKS

SIZES = (5, 100_000, 1, 70_000, 3, 250_000)  # bytes, from each of two senders to each of two receivers
TIMEOUT_S = 4.0


def address(store: TCPStore, name: str) -> Address:
    return Address(host=HOST, port=store.port, name=name, num_trainers=2, num_rollout=2, timeout_s=TIMEOUT_S)


def filling(source: int, target: int, number: int) -> int:
    return 1 + source * 100 + target * 50 + number


def send(transport: Transport, rank: int, until: int) -> None:
    outgoing = transport.outgoing(rank, torch.device("cpu"))
    mine: list[torch.Tensor] = []
    try:
        outgoing.members.meet("begin")
        for number, size in enumerate(SIZES):
            if number == until:
                os.kill(os.getpid(), signal.SIGKILL)
            for target in range(2):
                if transport.in_place and number % 2:
                    mine.append(torch.full((size,), filling(rank, target, number), dtype=torch.uint8))
                    outgoing.send(mine[-1], target)
                else:
                    outgoing.send(outgoing.buffer(size).fill_(filling(rank, target, number)), target)
        outgoing.flush()
        outgoing.members.meet("applied")
        outgoing.release()
    except Exception as error:
        outgoing.close()
        raise outgoing.members.failed(error, "sending") from error


def receive(transport: Transport, rank: int) -> None:
    receiving = transport.incoming(1000, rank)
    wanted = [(source, size) for size in SIZES for source in range(2)]
    try:
        receiving.begin(1)
        ground = torch.zeros(sum(size for _, size in wanted), dtype=torch.uint8)
        places = ground.split([size for _, size in wanted])
        asked, on_their_way = [], 0

        def place(index: int) -> torch.Tensor:
            nonlocal on_their_way
            asked.append(index)
            on_their_way += wanted[index][1]
            assert on_their_way <= 2 * max(SIZES), "more than two messages' bytes at once"
            return places[index]

        for index, message in enumerate(receiving.messages(wanted, place)):
            source, size = wanted[index]
            assert len(message) == size
            assert (message == filling(source, rank, index // 2)).all(), (index, message[:5])
            if transport.in_place:
                assert message.data_ptr() == places[index].data_ptr()
                on_their_way -= size
        assert asked == (list(range(len(wanted))) if transport.in_place else [])
        receiving.finish()
    except Exception as error:
        raise receiving.failed(error, "receiving") from error


def take_part(member: int, transport: Transport, victim: int, reports: Path) -> None:
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


def run(transport: Transport, victim: int, reports: Path) -> dict[int, str]:
    """What each member that lived to its end reported.  Not ``run_ranks``: it would end the others with the first."""
    processes = [RANKS.Process(target=take_part, args=(n, transport, victim, reports)) for n in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return {int(path.name): path.read_text() for path in reports.iterdir()}


def transports(store: TCPStore, name: str) -> list[Transport]:
    return [
        ProcessGroupTransport(address=address(store, f"{name}-group"), backend="gloo"),
        SharedMemoryTransport(address=address(store, f"{name}-memory")),
    ]


@pytest.fixture(scope="module")
def store() -> TCPStore:
    return TCPStore(HOST, 0, is_master=True, wait_for_workers=False)


@pytest.mark.parametrize("which", [0, 1], ids=["process_group", "shared_memory"])
def test_messages_arrive_whole_and_in_order(store: TCPStore, tmp_path: Path, which: int, processes: None) -> None:
    assert run(transports(store, "whole")[which], -1, tmp_path) == dict.fromkeys(range(4), "")


@pytest.mark.parametrize("which", [0, 1], ids=["process_group", "shared_memory"])
def test_a_killed_sender_is_named_by_all(store: TCPStore, tmp_path: Path, which: int, processes: None) -> None:
    failures = run(transports(store, "killed")[which], 1, tmp_path)
    assert failures.keys() == {0, 2, 3}
    assert all(report.startswith("training rank 1 (process ") for report in failures.values()), failures
