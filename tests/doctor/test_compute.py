"""The matmul's verdict; its measurement runs in tests/doctor/test_command.py."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mcore_rl.config.engine import Device
from mcore_rl.doctor.checks import ExpectedRate, Verdict
from mcore_rl.doctor.compute import MatmulResult, matmul_diagnosis, rate_of
from mcore_rl.parallel.device import detect

EXPECTED = ExpectedRate(value=1000.0, source="the data sheet", passes=0.45, fails=0.25)
CPU = detect(Device.cpu)


@pytest.mark.parametrize(
    ("rates", "verdict", "words"),
    [
        ([700.0] * 8, Verdict.PASS, "700 TFLOP/s on device 0, the slowest of 8"),
        ([700.0] * 7 + [640.0], Verdict.PASS, "640 TFLOP/s on device 7"),
        ([700.0] * 7 + [600.0], Verdict.WARN, "600 TFLOP/s on device 7"),
        ([700.0] * 7 + [400.0], Verdict.WARN, "400 TFLOP/s on device 7"),
        ([700.0] * 7 + [200.0], Verdict.FAIL, "200 TFLOP/s on device 7"),
        ([500.0], Verdict.PASS, "500 TFLOP/s"),
    ],
)
def test_the_slowest_device_counts(rates: list[float], verdict: Verdict, words: str) -> None:
    diagnosis = matmul_diagnosis([MatmulResult(rate, True) for rate in rates], CPU, EXPECTED)
    assert diagnosis.verdict is verdict and diagnosis.measured.startswith(words)
    assert bool(diagnosis.remedy) == (verdict is not Verdict.PASS)


def test_a_device_that_computes_one_product_in_two_ways_is_broken() -> None:
    results = [MatmulResult(700.0, True), MatmulResult(700.0, True)]
    results[1] = replace(results[1], repeatable=False)
    diagnosis = matmul_diagnosis(results, CPU, EXPECTED)
    assert diagnosis.verdict is Verdict.FAIL and diagnosis.measured.startswith("device 1 computed the same product")


def test_a_rate_is_calls_per_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def work() -> None:
        now[0] += 0.01

    monkeypatch.setattr("mcore_rl.doctor.compute.time.perf_counter", lambda: now[0])
    assert rate_of(work, CPU) == pytest.approx(100.0)
