"""Updates in rounds between real processes: training ranks whose tensors are numbered, rollout ranks that collect them.

The oracle is the rollout table's own load of the numbered checkpoint, which knows no plan and no rounds.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from mcore_rl.config.engine import Device
from mcore_rl.config.parallel import parse_layout
from mcore_rl.config.rollout import parse_rollout_layout
from mcore_rl.families.registry import FAMILIES
from mcore_rl.ground.errors import SyncError
from mcore_rl.parallel.device import detect
from mcore_rl.parallel.launch import HOST
from mcore_rl.parallel.secret_store import StoreServer
from mcore_rl.proofs.tracer import Tracer, direct_tensors, index
from mcore_rl.sync.members import Address, Members
from mcore_rl.sync.routed import Exchange, RoutedTransport, Transfer
from mcore_rl.weights.messages import MessagePart
from mcore_rl.weights.reshard import ReshardPlan, plan_reshard
from mcore_rl.weights.rollout_table import RolloutTable
from mcore_rl.weights.rounds import Rounds
from mcore_rl.weights.sites import Sites
from mcore_rl.weights.table import Table
from mcore_rl.weights.views import view_of
from tests.support.checkpoints import MODELS
from tests.support.forked import RANKS
from tests.support.untouchable import Arena, Kernels, Library

MAX_BYTES, TIMEOUT_S, UPDATES = 60_000, 6.0, 2
# Four training ranks on two nodes, two rollout ranks on each, which want the same.
COLOCATED = Sites.colocated((0, 0, 1, 1), 4)
SEPARATE = Sites((0, 0, 1, 1), (2, 2, 3, 3))


def plan_for(sites: Sites) -> ReshardPlan:
    table = Table(FAMILIES["mixtral"], MODELS["mixtral"], parse_layout("pp=2,ep=2"), 4)
    rollout = RolloutTable(table.family, table.model, parse_rollout_layout("dp=4"))
    return plan_reshard(table, rollout, torch.int64.itemsize, sites)


@dataclass
class Numbered:
    """``Parameters`` of a training rank: the numbers of its elements, times the version.

    strided: held so that no part is contiguous, and everything is packed.
    """

    tracer: Tracer
    rank: int
    version: int = 1
    strided: bool = False

    def live(self, part: MessagePart) -> Tensor:
        values = self.version * torch.from_numpy(self.tracer.source(self.rank, part.chunk, part.source))
        if self.strided:
            values = values.unsqueeze(-1).repeat_interleave(2, -1)[..., 0]
        return view_of(values, part.source_slice)

    def dtype_of(self, part: MessagePart) -> torch.dtype:
        return torch.int64


class OnDevice(Numbered):
    """The same in memory that the host may not touch."""

    def __init__(self, tracer: Tracer, rank: int, version: int, arena: Arena) -> None:
        super().__init__(tracer, rank, version)
        self._arena, self._held = arena, dict[tuple[int, str], Tensor]()

    def live(self, part: MessagePart) -> Tensor:
        key = part.chunk, part.source
        if key not in self._held:
            values = self.version * torch.from_numpy(self.tracer.source(self.rank, *key))
            space = self._arena.empty(values.nbytes).view(torch.int64).view(values.shape)
            self._held[key] = space.copy_(values)
        return view_of(self._held[key], part.source_slice)


def send(transport: RoutedTransport, rank: int, dies: bool) -> None:
    plan = plan_for(transport.sites)
    outgoing = transport.outgoing(rank, torch.device("cpu"))
    try:
        for version in range(1, UPDATES + 1):
            outgoing.members.meet(f"update {version}")
            if dies and version == UPDATES:
                os.kill(os.getpid(), signal.SIGKILL)
            outgoing.send(Rounds(plan, MAX_BYTES).of(rank), Numbered(Tracer(plan), rank, version, strided=rank == 3))
            outgoing.members.meet("applied")
            outgoing.release()
    except Exception as error:
        outgoing.close()
        raise outgoing.members.failed(error, "sending") from error
    outgoing.close()


def receive(transport: RoutedTransport, rank: int) -> None:
    plan = plan_for(transport.sites)
    rounds = Rounds(plan, MAX_BYTES)
    receiving = transport.incoming(4 * MAX_BYTES, rank)
    messages, mine = rounds.messages_to(rank), rounds.of(4 + rank)
    try:
        for version in range(1, UPDATES + 1):
            receiving.begin(version)
            tensors = {t.name: np.zeros(plan.rollout.shape(t), dtype=np.int64) for t in plan.rollout.tensors(rank)}
            wanted = [(message.source_rank, message.num_bytes) for message in messages]
            for message, data in zip(messages, receiving.messages(wanted, mine), strict=True):
                for part in message.parts:
                    values = data[part.begin : part.begin + part.num_bytes].view(torch.int64).numpy()
                    tensors[part.target][index(part.target_slice, part.slot)] = values.reshape(part.target_slice.shape)
            for name, direct in direct_tensors(plan.rollout, rank, Tracer(plan).checkpoint).items():
                assert np.array_equal(tensors[name], version * direct), (version, rank, name)
            receiving.finish()
    except Exception as error:
        raise receiving.failed(error, "receiving") from error
    receiving.close()


def take_part(member: int, transport: RoutedTransport, victim: int, reports: Path) -> None:
    """Write the error of this member, or nothing, into a file of its name."""
    torch.set_num_threads(1)
    report = ""
    try:
        if member < 4:
            send(transport, member, dies=member == victim)
        else:
            receive(transport, member - 4)
    except SyncError as error:
        report = str(error)
    (reports / str(member)).write_text(report)
    deadline, living = time.monotonic() + 120, 8 - (victim >= 0)
    while len(list(reports.iterdir())) < living:  # as in a run, whose processes outlive an update that failed
        assert time.monotonic() < deadline
        time.sleep(0.05)


def take_part_on_devices(member: int, transport: RoutedTransport, careless: bool, reports: Path) -> None:
    """One update where all weights and buffers are in memory that ends who touches it; the vendor's library may."""
    torch.set_num_threads(1)
    arena, join = Arena(), Exchange._join
    libraries = []

    def with_library(self: Exchange, size: int) -> Library:
        self.backend = "gloo"
        libraries.append(Library(join(self, size), arena))
        self.backend = "gloo" if careless else "nccl"
        return libraries[-1].group if careless else libraries[-1]

    with (
        patch.object(Exchange, "_join", with_library),
        patch.object(RoutedTransport, "_memory", lambda *_: arena),
        Kernels(arena),
    ):
        plan, tracer = plan_for(transport.sites), Tracer(plan_for(transport.sites))
        rounds = Rounds(plan, MAX_BYTES)
        if member < 4:
            outgoing = transport.outgoing(member, torch.device("cpu"))
            outgoing.members.meet("update 1")
            outgoing.send(rounds.of(member), OnDevice(tracer, member, 1, arena))
            outgoing.members.meet("applied")
        else:
            rank = member - 4
            receiving = transport.incoming(4 * MAX_BYTES, rank)
            receiving.begin(1)
            messages, wrong = rounds.messages_to(rank), 0
            direct = direct_tensors(plan.rollout, rank, tracer.checkpoint)
            wanted = [(message.source_rank, message.num_bytes) for message in messages]
            for message, data in zip(messages, receiving.messages(wanted, rounds.of(member)), strict=True):
                for part in message.parts:
                    values = data[part.begin : part.begin + part.num_bytes].view(torch.int64)
                    expected = torch.from_numpy(direct[part.target][index(part.target_slice, part.slot)].copy())
                    wrong += int((values.view(expected.shape) != expected).sum())
            assert not wrong
            receiving.finish()
    batches = sum(each.num_batches for each in libraries)
    assert batches <= 2 * len(rounds), "a leg is one call of the library"
    (reports / str(member)).write_text(str(batches))


def run(sites: Sites, store: StoreServer, victim: int, reports: Path) -> dict[int, str]:
    """What each member that lived to its end reported."""
    address = Address(store=store.access, name=reports.name, num_trainers=4, num_rollout=4, timeout_s=TIMEOUT_S)
    transport = RoutedTransport(address=address, platform=detect(Device.cpu), sites=sites)
    processes = [RANKS.Process(target=take_part, args=(n, transport, victim, reports)) for n in range(8)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return {int(path.name): path.read_text() for path in reports.iterdir()}


@pytest.fixture(scope="module")
def store(processes: None) -> StoreServer:
    return StoreServer(HOST)


@pytest.mark.parametrize("sites", [COLOCATED, SEPARATE], ids=["colocated", "separate"])
def test_every_update_arrives_whole(sites: Sites, store: StoreServer, tmp_path: Path) -> None:
    assert any(leg for member in range(sites.members) for each in Rounds(plan_for(sites), MAX_BYTES).of(member)
               for leg in each.legs[1]), "nothing is passed on: half of it is not proven"  # fmt: skip
    assert run(sites, store, -1, tmp_path) == dict.fromkeys(range(8), "")


@pytest.mark.parametrize("sites", [COLOCATED, SEPARATE], ids=["colocated", "separate"])
def test_a_killed_training_rank_is_named_by_all(sites: Sites, store: StoreServer, tmp_path: Path) -> None:
    failures = run(sites, store, 1, tmp_path)
    assert failures.keys() == set(range(8)) - {1}
    assert all(report.startswith("training rank 1 (process ") for report in failures.values()), failures


@pytest.mark.parametrize("sites", [COLOCATED, SEPARATE], ids=["colocated", "separate"])
def test_only_kernels_and_the_vendors_library_touch_an_accelerators_memory(
    sites: Sites, store: StoreServer, tmp_path: Path
) -> None:
    codes = on_devices(sites, store, tmp_path, careless=False)
    assert codes == [0] * 8
    batches = [int(path.read_text()) for path in tmp_path.iterdir()]
    assert len(batches) == 8 and max(batches) > 1


def test_gloo_ends_the_process_that_gives_it_such_memory(store: StoreServer, tmp_path: Path) -> None:
    """So the test above can fail."""
    codes = on_devices(COLOCATED, store, tmp_path, careless=True)
    assert min(codes) < 0, codes


def on_devices(sites: Sites, store: StoreServer, reports: Path, *, careless: bool) -> list[int]:
    """The exit codes of all members.  careless: gloo gets the memory."""
    address = Address(
        store=store.access,
        name=f"{reports.name} untouchable",
        num_trainers=4,
        num_rollout=4,
        timeout_s=TIMEOUT_S,
    )
    transport = RoutedTransport(address=address, platform=detect(Device.cpu), sites=sites)
    processes = [RANKS.Process(target=take_part_on_devices, args=(n, transport, careless, reports)) for n in range(8)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return [process.exitcode for process in processes]


def test_gloo_is_not_given_what_it_cannot_read(store: StoreServer) -> None:
    """With memory of an accelerator, gloo ends the process: nothing can be caught there."""
    address = Address(store=store.access, name="refused", num_trainers=1, num_rollout=0)
    exchange = Exchange(Members.joined(address, 0), 1, "gloo", torch.device("cpu"))
    with pytest.raises(SyncError, match="gloo cannot read meta's memory, and would end the process"):
        exchange.start([Transfer(0, torch.empty(4, dtype=torch.uint8, device="meta"))], [])
    exchange.close()
