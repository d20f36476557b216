"""The verdict on an engine's life; a real one is in tests/doctor/test_command.py."""

from __future__ import annotations

from dataclasses import replace

from mcore_rl.config.engine import Device
from mcore_rl.doctor.checks import Verdict
from mcore_rl.doctor.engine import KV_CACHE_BYTES, EngineLife, engine_diagnosis
from mcore_rl.parallel.device import detect
from tests.doctor.test_software import H100

CPU = detect(Device.cpu)
GIB = 1 << 30
GOOD = EngineLife(
    start_s=12.0,
    sleep_s=0.5,
    wake_s=0.25,
    awake_bytes=20 * GIB,
    asleep_bytes=2 * GIB,
    host_bytes=GIB,
    same_tokens=True,
    differing=(),
)


def test_an_engine_that_is_well() -> None:
    diagnosis = engine_diagnosis(GOOD, H100)
    assert diagnosis.verdict is Verdict.PASS
    assert diagnosis.numbers["host_engine_mib"] == 1024
    assert diagnosis.measured == "start 12.0 s, sleep 0.50 s, wake 0.25 s, 20.00 -> 2.00 GiB"
    assert engine_diagnosis(replace(GOOD, awake_bytes=0, asleep_bytes=0), CPU).measured.endswith("wake 0.25 s")


def test_weights_or_tokens_that_changed_in_sleep() -> None:
    diagnosis = engine_diagnosis(replace(GOOD, differing=("lm_head.weight", "b")), CPU)
    assert diagnosis.verdict is Verdict.FAIL
    assert diagnosis.measured == "2 tensors are not those of the files, lm_head.weight first"
    diagnosis = engine_diagnosis(replace(GOOD, same_tokens=False), H100)
    assert (diagnosis.verdict, diagnosis.measured) == (Verdict.FAIL, "greedy draws differ before and after sleep")


def test_an_engine_with_two_copies_of_a_library() -> None:
    diagnosis = engine_diagnosis(replace(GOOD, doubled=("libcudnn",)), H100)
    assert (diagnosis.verdict, diagnosis.measured) == (Verdict.FAIL, "it has loaded two copies of libcudnn")


def test_sleep_that_keeps_the_memory() -> None:
    tiny = replace(GOOD, awake_bytes=2 * GIB)  # nearly all of it context and libraries
    assert engine_diagnosis(replace(tiny, asleep_bytes=2 * GIB - KV_CACHE_BYTES), H100).verdict is Verdict.PASS
    keeps = replace(tiny, asleep_bytes=2 * GIB - KV_CACHE_BYTES // 2)
    assert engine_diagnosis(keeps, H100).verdict is Verdict.WARN
    assert engine_diagnosis(keeps, CPU).verdict is Verdict.PASS, "there the host has it all"
