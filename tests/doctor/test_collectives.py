"""Bus bandwidths, wrong results, and a name that hides a node."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mcore_rl.config.engine import Device
from mcore_rl.config.launch import load_cluster
from mcore_rl.doctor import collectives
from mcore_rl.doctor.checks import ExpectedRate, Subject, Verdict
from mcore_rl.doctor.collectives import (
    BusRate,
    HostAddresses,
    bus_gb_s,
    expected_link,
    host_addresses,
    interface_diagnosis,
    measure_bus,
    measure_in_node,
    rate_diagnoses,
)
from mcore_rl.parallel.device import detect, device_of
from mcore_rl.parallel.launch import Rank
from mcore_rl.parallel.secret_store import SecretStore, StoreAccess, StoreServer
from tests.doctor.test_software import H100
from tests.support.forked import run_ranks

CPU = detect(Device.cpu)
LINK = ExpectedRate(value=450.0, source="the cluster's yaml", passes=0.63, fails=0.35)


@pytest.mark.parametrize(
    ("num_bytes", "microseconds", "num_ranks", "bus"),
    [
        (33554432, 1464.2, 256, 45.65),  # github.com/NVIDIA/nccl-tests/issues/78, 256 GPUs
        (67108864, 2659.1, 256, 50.28),
        (65536, 67.93, 2, 0.96),  # github.com/NVIDIA/dgx-spark-playbooks/pull/103, two nodes of one GPU
    ],
)
def test_bus_bandwidth_is_that_of_nccl_tests(num_bytes: int, microseconds: float, num_ranks: int, bus: float) -> None:
    """Bytes, time and busbw of rows that all_reduce_perf printed."""
    assert bus_gb_s("all-reduce", num_bytes, microseconds / 1e6, num_ranks) == pytest.approx(bus, abs=0.02)
    assert bus_gb_s("all-to-all", num_bytes, microseconds / 1e6, num_ranks) == pytest.approx(bus / 2, abs=0.02)


@pytest.mark.parametrize(
    ("rate", "verdict"), [(370.0, Verdict.PASS), (283.0, Verdict.WARN), (158.0, Verdict.WARN), (40.0, Verdict.FAIL)]
)
def test_a_slow_link(rate: float, verdict: Verdict) -> None:
    fast = {kind: BusRate(370.0, 0) for kind in collectives.KINDS}
    slow = {"all-reduce": BusRate(rate, 0), "all-to-all": BusRate(340.0, 0)}
    reduce, exchange = rate_diagnoses([fast, slow], H100, "in a node", LINK, "intra_node")
    assert reduce.verdict is verdict and exchange.verdict is Verdict.PASS
    assert reduce.numbers == {"all_reduce_intra_node_gb_s": rate}
    assert verdict is Verdict.PASS or "NCCL_DEBUG=INFO" in reduce.remedy


def test_a_wrong_result_is_a_failure_however_fast() -> None:
    rates = {"all-reduce": BusRate(400.0, 0), "all-to-all": BusRate(400.0, 3)}
    reduce, exchange = rate_diagnoses([rates], H100, "in a node", LINK, "intra_node")
    assert reduce.verdict is Verdict.PASS
    assert (exchange.verdict, exchange.measured) == (Verdict.FAIL, "3 elements are wrong")
    assert exchange.numbers == {}, "and no rate to plan with"


def test_what_a_link_is_compared_with(tmp_path: Path) -> None:
    alone = Subject(platform=H100, directory=tmp_path)
    assert (expected_link(alone, False).value, expected_link(alone, True).value) == (450.0, None)
    there = replace(alone, cluster=load_cluster("nvidia_h100", ["inter_node_gb_s=25"]))
    assert (expected_link(there, False).value, expected_link(there, True).value) == (450.0, 25.0)
    laptop = Subject(platform=CPU, directory=tmp_path)
    assert expected_link(laptop, False).value is None, "a laptop promises nothing"
    unknown = replace(alone, platform=replace(alone.platform, device_name="NVIDIA L4"))
    assert expected_link(unknown, False).value is None, "what the planner guesses is no data sheet"


def test_a_name_that_is_local_hides_a_node_from_others() -> None:
    debian = HostAddresses("n7", ("127.0.1.1",), ("127.0.1.1",))
    assert interface_diagnosis(debian, 1).verdict is Verdict.PASS
    diagnosis = interface_diagnosis(debian, 2)
    assert diagnosis.verdict is Verdict.FAIL
    assert diagnosis.measured == "gloo listens at 127.0.1.1; n7 resolves to 127.0.1.1"
    assert "GLOO_SOCKET_IFNAME" in diagnosis.remedy and "/etc/hosts" in diagnosis.remedy
    assert interface_diagnosis(HostAddresses("n7", ("127.0.1.1",), ("10.0.0.7",)), 2).verdict is Verdict.PASS
    assert interface_diagnosis(HostAddresses("n7", ("fe80::1",), ("fe80::1%eth0",)), 2).verdict is Verdict.PASS


def test_where_gloo_listens_is_read_from_its_sockets() -> None:
    addresses = host_addresses(
        Rank(rank=0, world_size=1, store=StoreAccess(host="127.0.0.1", port=0, secret=b""), layout=None)
    )
    assert addresses.host == socket.gethostname()
    assert addresses.listens and set(addresses.listens) <= set(addresses.resolves), "gloo takes the host's name"


def test_two_ranks_measure_and_agree(processes: None) -> None:
    rates = run_ranks(measure_in_node, 2, (CPU,), timeout_s=120)
    assert all(each[kind].gb_s > 0 and each[kind].wrong == 0 for each in rates for kind in collectives.KINDS)


def broken(rank: Rank) -> dict[str, BusRate]:
    """As ``measure_in_node``, over links that change a number."""
    whole = collectives._communicate

    def communicate(kind: str, sent: torch.Tensor, received: torch.Tensor, group: object) -> None:
        whole(kind, sent, received, group)  # type: ignore[arg-type]
        if rank.rank == 1:
            (sent if kind == "all-reduce" else received)[5] += 1

    collectives._communicate = communicate  # type: ignore[assignment]
    rank.init_process_group(CPU, timeout_s=60.0)
    return measure_bus(CPU, device_of(CPU, rank.rank), None)


def test_a_link_that_changes_a_number_is_seen(processes: None) -> None:
    good, bad = run_ranks(broken, 2, timeout_s=120)
    assert all(good[kind].wrong == 0 and bad[kind].wrong == 1 for kind in collectives.KINDS)


def test_the_store_of_several_nodes_listens_at_one_address() -> None:
    with StoreServer("127.0.0.2") as store:
        SecretStore(store.access)
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", store.access.port), 1.0)
