"""Checks of collectives: which interface host collectives take, and bus bandwidths inside a node and between nodes.

Bus bandwidth is that of nccl-tests (doc/PERFORMANCE.md there), so that it can be compared with a link's rate whatever
the number of ranks n: an all-reduce of S bytes in t seconds has S/t * 2(n-1)/n, an all-to-all S/t * (n-1)/n.
"""

from __future__ import annotations

import ipaddress
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore, ProcessGroupGloo  # type: ignore[attr-defined]  # public

from mcore_rl.doctor.checks import NODES, TWO_RANKS, Diagnosis, ExpectedRate, HealthCheck, Subject, Verdict, judged
from mcore_rl.doctor.vendor_tools import SLOW_LINKS_REMEDY
from mcore_rl.ground.errors import WorkerError
from mcore_rl.parallel.device import Platform, device_of, set_device, synchronize
from mcore_rl.parallel.launch import Rank, run_ranks
from mcore_rl.parallel.meeting import join_group
from mcore_rl.parallel.phase import phase
from mcore_rl.parallel.secret_store import StoreAccess
from mcore_rl.planning.overheads import LINK_EFFICIENCY, data_sheet_rates

DEVICE_BYTES, CPU_BYTES = 256 << 20, 16 << 20  # of a message, in all
WARM_UPS = 3
SECONDS = 1.0
LEAST = 5
KINDS = ("all-reduce", "all-to-all")
TIMEOUT_S = 60.0
MARGIN_S = 40.0  # of the limit: for Ray to answer, and for a node that does not


# ---- the interface ----


@dataclass(frozen=True)
class HostAddresses:
    """host: its name.  resolves: the addresses that the name resolves to.  listens: those that gloo listens at."""

    host: str
    resolves: tuple[str, ...]
    listens: tuple[str, ...]


def host_addresses(rank: Rank) -> HostAddresses:
    """The addresses of this machine; gloo's are read from the sockets that a group of one opens."""
    host = socket.gethostname()
    with phase("resolving the host's name", host=host):
        try:
            resolves = sorted({str(each[4][0]) for each in socket.getaddrinfo(host, None)})
        except OSError:
            resolves = []
    with phase("letting gloo choose an interface"):
        before = _listening()
        group = ProcessGroupGloo(HashStore(), 0, 1, timedelta(seconds=TIMEOUT_S))
        listens = sorted({ip for ip, _ in _listening() - before})
        del group
    return HostAddresses(host, tuple(resolves), tuple(listens))


def _listening() -> set[tuple[str, int]]:
    connections = psutil.Process().net_connections("inet")
    return {(each.laddr.ip, each.laddr.port) for each in connections if each.status == psutil.CONN_LISTEN}


def interface_diagnosis(addresses: HostAddresses, num_nodes: int) -> Diagnosis:
    """FAIL where other nodes could not reach what gloo listens at."""
    local = [each for each in addresses.listens if ipaddress.ip_address(each.partition("%")[0]).is_loopback]
    resolved = ", ".join(addresses.resolves) or "nothing"
    measured = f"gloo listens at {', '.join(addresses.listens) or 'nothing'}; {addresses.host} resolves to {resolved}"
    verdict = Verdict.PASS
    remedy = ""
    if local and num_nodes > 1:
        verdict = Verdict.FAIL
        remedy = (
            f"No other node reaches it. Take {addresses.host} out of the 127.* lines of /etc/hosts, or write "
            "cluster.environment.GLOO_SOCKET_IFNAME=NAME, of an interface that ip -br address shows"
        )
    return Diagnosis(
        check="interface",
        verdict=verdict,
        measured=measured,
        expected="an address that other nodes reach" if num_nodes > 1 else "any: there is one node",
        remedy=remedy,
    )


def _interface(subject: Subject, limit_s: float) -> Iterator[Diagnosis]:
    yield interface_diagnosis(run_ranks(host_addresses, 1, timeout_s=limit_s)[0], subject.num_nodes)


# ---- bandwidths ----


@dataclass(frozen=True)
class BusRate:
    """gb_s: bus bandwidth, as nccl-tests has it.  wrong: elements of the result that are not what they must be."""

    gb_s: float
    wrong: int


def bus_gb_s(kind: str, num_bytes: int, seconds: float, num_ranks: int) -> float:
    """See the module's docstring.  num_bytes: of a rank's buffer."""
    factor = (num_ranks - 1) / num_ranks * (2 if kind == "all-reduce" else 1)
    return num_bytes / seconds * factor / 1e9


def measure_bus(platform: Platform, device: torch.device, group: dist.ProcessGroup | None) -> dict[str, BusRate]:
    """The rates of a group, None: of all ranks.  Collective over it."""
    size = dist.get_world_size(group)
    rank = dist.get_rank(group)
    num_bytes = DEVICE_BYTES if platform.is_accelerator else CPU_BYTES
    count = num_bytes // 4 // size * size
    rates = {}
    for kind in KINDS:
        with phase(kind, ranks=size):
            sent = torch.full((count,), float(rank + 1), device=device)
            received = torch.empty_like(sent)
            wrong = _wrong(kind, sent.clone(), received, group)
            seconds = _seconds_of(kind, sent, received, group, platform, device)
            rates[kind] = BusRate(bus_gb_s(kind, 4 * count, seconds, size), wrong)
    return rates


def _communicate(kind: str, sent: Tensor, received: Tensor, group: dist.ProcessGroup | None) -> None:
    if kind == "all-reduce":
        dist.all_reduce(sent, group=group)
    else:
        dist.all_to_all_single(received, sent, group=group)


def _wrong(kind: str, sent: Tensor, received: Tensor, group: dist.ProcessGroup | None) -> int:
    size = dist.get_world_size(group)
    _communicate(kind, sent, received, group)
    if kind == "all-reduce":
        return int((sent != size * (size + 1) / 2).sum())
    of_ranks = torch.arange(1, size + 1, device=received.device, dtype=received.dtype)
    return int((received.view(size, -1) != of_ranks[:, None]).sum())


def _seconds_of(
    kind: str, sent: Tensor, received: Tensor, group: dist.ProcessGroup | None, platform: Platform, device: torch.device
) -> float:
    """Mean seconds of one collective.  All ranks agree on how many are timed."""
    sent.zero_()  # sums of sums would overflow
    for _ in range(WARM_UPS):
        _communicate(kind, sent, received, group)
    synchronize(platform)
    begun = time.perf_counter()
    _communicate(kind, sent, received, group)
    synchronize(platform)
    slowest = torch.tensor(time.perf_counter() - begun, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    repeats = max(LEAST, int(SECONDS / max(1e-6, slowest.item())))
    begun = time.perf_counter()
    for _ in range(repeats):
        _communicate(kind, sent, received, group)
    synchronize(platform)
    return (time.perf_counter() - begun) / repeats


def rate_diagnoses(
    rates: Sequence[dict[str, BusRate]], platform: Platform, where: str, expected: ExpectedRate, key: str
) -> Iterator[Diagnosis]:
    """rates: of every rank.  The slowest is judged; FAIL where a result is wrong."""
    host_remedy = "Look for other programs; host collectives are slow, and for the CPU alone"
    remedy = SLOW_LINKS_REMEDY if platform.is_accelerator else host_remedy
    for kind in KINDS:
        slowest = min(each[kind].gb_s for each in rates)
        wrong = sum(each[kind].wrong for each in rates)
        name = f"{kind} {where}"
        number = f"{kind.replace('-', '_')}_{key}_gb_s"
        if wrong:
            measured = f"{wrong} elements are wrong"
            remedy_of_wrong = "Leave the node out: its links corrupt data"
            yield Diagnosis(check=name, verdict=Verdict.FAIL, measured=measured, remedy=remedy_of_wrong)
        else:
            yield judged(name, slowest, "GB/s", expected, remedy, key=number)


def expected_link(subject: Subject, between_nodes: bool) -> ExpectedRate:
    """What the cluster's yaml says of a link; inside a node without one, the data sheet of a known device."""
    value = None
    source = "no --cluster"
    sheet = data_sheet_rates(subject.platform.device_name)
    if subject.cluster is not None:
        value = subject.cluster.inter_node_gb_s if between_nodes else subject.cluster.intra_node_gb_s
        source = "the cluster's yaml"
    elif sheet is not None and not between_nodes:
        value = sheet[1]
        source = "the data sheet"
    fails = 0.5 * LINK_EFFICIENCY if subject.platform.is_accelerator else 0.0
    return ExpectedRate(value=value, source=source, passes=0.9 * LINK_EFFICIENCY, fails=fails)


def measure_in_node(rank: Rank, platform: Platform) -> dict[str, BusRate]:
    """The rates of all devices of a node; of two processes on the CPU."""
    with phase("connecting the ranks"):
        rank.init_process_group(platform, timeout_s=TIMEOUT_S)
    return measure_bus(platform, device_of(platform, rank.rank), None)


def _in_node(subject: Subject, limit_s: float) -> Iterator[Diagnosis]:
    rates = run_ranks(measure_in_node, subject.num_ranks, (subject.platform,), timeout_s=limit_s)
    expected = expected_link(subject, between_nodes=False)
    yield from rate_diagnoses(rates, subject.platform, "in a node", expected, "intra_node")


# ---- between nodes ----


def measure_between_nodes(
    rank: Rank, platform: Platform, node: int, num_nodes: int, store: StoreAccess
) -> dict[str, BusRate]:
    """The rates of this device with the devices of the same number on other nodes, while all others do the same.

    That is the yaml's ``inter_node_gb_s``: what one device sends to other nodes.
    """
    device = set_device(platform, rank.rank)
    per_node = rank.world_size
    with phase("connecting the nodes", node=node, store=f"{store.host}:{store.port}"):
        world = num_nodes * per_node
        own = node * per_node + rank.rank
        join_group(store, "nodes", platform, own, world, TIMEOUT_S)
        groups = [dist.new_group([each * per_node + local for each in range(num_nodes)]) for local in range(per_node)]
    return measure_bus(platform, device, groups[rank.rank])


def measure_node(
    node: int, num_nodes: int, platform: Platform, store: StoreAccess, limit_s: float
) -> list[dict[str, BusRate]]:
    """``measure_between_nodes`` of all ranks of this node; one on the CPU."""
    world = platform.num_devices if platform.is_accelerator else 1
    return run_ranks(measure_between_nodes, world, (platform, node, num_nodes, store), timeout_s=limit_s)


def _between_nodes(subject: Subject, limit_s: float) -> Iterator[Diagnosis]:
    from mcore_rl.runtime.each_node import on_each_node  # ray, which the ranks of these checks need not import

    platform = subject.platform
    limit_s -= MARGIN_S
    by_node = on_each_node(
        measure_node, subject.address, subject.num_nodes, platform, (platform,), limit_s, with_store=True
    )
    rates = list[dict[str, BusRate]]()
    for of_node in by_node.values():
        if isinstance(of_node, WorkerError):
            raise of_node
        rates += of_node
    yield from rate_diagnoses(rates, platform, "between nodes", expected_link(subject, True), "inter_node")


CHECKS = (
    HealthCheck(
        name="interface",
        about="where host collectives listen: a name that is 127.0.1.1 hides a node",
        limit_s=60,
        run=_interface,
    ),
    HealthCheck(
        name="collectives in a node",
        about="bus bandwidth of all-reduce and all-to-all over all devices of a node",
        limit_s=180,
        run=_in_node,
        needs=(TWO_RANKS,),
    ),
    HealthCheck(
        name="collectives between nodes",
        about="the same of one device with its peers on other nodes, all at once",
        limit_s=240,
        run=_between_nodes,
        needs=(NODES,),
        on_each_node=False,
    ),
)
