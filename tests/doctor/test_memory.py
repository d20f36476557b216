"""Verdicts on copies, pinning and shared memory; a wrong checksum is a failure."""

from __future__ import annotations

import pytest

from mcore_rl.doctor.checks import Verdict
from mcore_rl.doctor.memory import PINNED_BYTES, host_copy_diagnoses, pinning_diagnosis, sharing_diagnosis


def test_pinned_copies_are_judged_by_the_slowest_device_each_way() -> None:
    to_device, to_host = host_copy_diagnoses([(55.0, 54.0), (52.0, 12.0)])
    assert (to_device.verdict, to_device.measured) == (Verdict.PASS, "52 GB/s")
    assert (to_host.verdict, to_host.measured) == (Verdict.WARN, "12 GB/s")
    assert [each.verdict for each in host_copy_diagnoses([(4.9, 20.0)])] == [Verdict.FAIL, Verdict.PASS]
    assert to_device.numbers == {"host_to_device_gb_s": 52.0} and to_host.numbers == {"device_to_host_gb_s": 12.0}


@pytest.mark.parametrize(
    ("taken", "gone", "verdict"),
    [
        (PINNED_BYTES, 0, Verdict.PASS),
        (1 << 30, 0, Verdict.WARN),  # rounded up to a power of two, as torch 2.11 does
        (0, PINNED_BYTES + (32 << 20), Verdict.PASS),  # an allocator that does not say: the system does
        (PINNED_BYTES, 1 << 30, Verdict.WARN),  # the driver takes more than the allocator sees
    ],
)
def test_what_pinning_takes(taken: int, gone: int, verdict: Verdict) -> None:
    diagnosis = pinning_diagnosis(taken, gone)
    assert diagnosis.verdict is verdict
    assert diagnosis.measured.endswith(f"{max(taken, gone) / PINNED_BYTES:.2f} times that")
    assert diagnosis.numbers["pinned_ratio"] == round(max(taken, gone) / PINNED_BYTES, 4)


@pytest.mark.parametrize(
    ("results", "words"),
    [
        ([(5, 5), (7, 7)], "equal checksums in both processes"),
        ([(5, 5), (7, 8)], "the peer reads other values"),
        ([(5, 4), (7, 7)], "the owner does not see what the peer wrote"),
    ],
)
def test_a_wrong_checksum_is_a_failure(results: list[tuple[int, int]], words: str) -> None:
    diagnosis = sharing_diagnosis(results)
    assert words in diagnosis.measured
    assert diagnosis.verdict is (Verdict.PASS if words.startswith("equal") else Verdict.FAIL)
