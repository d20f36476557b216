"""Verdicts on what processes take beside tensors; a real measurement is in tests/doctor/test_command.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import psutil

from mcore_rl.config.engine import Device
from mcore_rl.config.parallel import parse_layout
from mcore_rl.doctor.checks import Verdict
from mcore_rl.doctor.residuals import MORE, ProcessResiduals, host_bytes, layout_of, residual_diagnosis
from mcore_rl.parallel.device import detect
from mcore_rl.planning.overheads import COLLECTIVE_BYTES, CONTEXT_BYTES, CPU_PROCESS_BYTES, HOST_PROCESS_BYTES
from tests.doctor.test_software import H100

CPU = detect(Device.cpu)
MIB = 2**20


def test_the_largest_process_counts_each_way() -> None:
    few = ProcessResiduals(host=2000 * MIB, context=400 * MIB, collectives=900 * MIB)
    more = ProcessResiduals(host=1900 * MIB, context=450 * MIB, collectives=800 * MIB)
    diagnosis = residual_diagnosis([few, more], H100)
    assert diagnosis.numbers == {
        "host_trainer_mib": 2000.0, "device_context_mib": 450.0, "device_collectives_mib": 900.0,
    }  # fmt: skip
    assert (
        diagnosis.measured == "MiB of a training process beside its tensors: host 2,000, context 450, collectives 900"
    )
    assert diagnosis.verdict is Verdict.PASS and not diagnosis.remedy


def test_one_device_has_no_communicators_and_the_cpu_no_context() -> None:
    alone = ProcessResiduals(host=MIB, context=MIB)
    assert residual_diagnosis([alone], H100).numbers == {"host_trainer_mib": 1.0, "device_context_mib": 1.0}
    assert residual_diagnosis([alone, alone], CPU).numbers == {"host_trainer_mib": 1.0}


def test_more_than_is_assumed_is_a_word() -> None:
    as_assumed = dict(host=HOST_PROCESS_BYTES, context=CONTEXT_BYTES, collectives=COLLECTIVE_BYTES)
    for name, size in as_assumed.items():
        for size_now, verdict in ((int(MORE * size), Verdict.PASS), (int(MORE * size) + 1, Verdict.WARN)):
            measured = ProcessResiduals(**as_assumed | {name: size_now})
            assert residual_diagnosis([measured, measured], H100).verdict is verdict, name
    too_much = ProcessResiduals(host=2 * CPU_PROCESS_BYTES)
    assert "cluster.measured=doctor.json" in residual_diagnosis([too_much], CPU).remedy


def test_what_processes_share_counts_once() -> None:
    infos = [SimpleNamespace(uss=300, rss=1000), SimpleNamespace(uss=100, rss=900)]
    processes = [SimpleNamespace(memory_full_info=lambda info=info: info) for info in infos]
    assert host_bytes(cast("list[psutil.Process]", processes)) == 300 + 100 + 800


def test_the_layout_uses_most_axes_that_the_ranks_allow() -> None:
    assert [layout_of(size) for size in (1, 2, 3, 4, 8)] == ["", "tp=2,ep=2", "", "tp=2,ep=2,pp=2", "tp=2,ep=2,pp=2"]
    assert parse_layout(layout_of(8)).pp == 2
