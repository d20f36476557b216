"""Checks that hang, crash or raise are told as such, within their time, and take no other check with them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mcore_rl.config.engine import Device
from mcore_rl.doctor.checks import ACCELERATOR, Diagnosis, HealthCheck, Subject, Verdict
from mcore_rl.doctor.examination import diagnosed, examine, platform_diagnosis
from mcore_rl.doctor.vendor_tools import tool_output
from mcore_rl.ground.errors import WorkerError
from mcore_rl.parallel.device import detect
from mcore_rl.parallel.launch import Rank
from mcore_rl.parallel.phase import phase
from tests.support.forked import run_ranks


@pytest.fixture
def subject(tmp_path: Path) -> Subject:
    return Subject(platform=detect(Device.cpu), directory=tmp_path)


def check(name: str, run: object, **more: object) -> HealthCheck:
    return HealthCheck(name=name, about="", limit_s=60.0, run=run, **more)  # type: ignore[arg-type]


def well(subject: Subject, limit_s: float) -> Iterator[Diagnosis]:
    yield Diagnosis(check="well", verdict=Verdict.PASS, measured=f"{limit_s:.0f} s")


def hang(rank: Rank) -> None:
    with phase("waiting for a device", number=3):
        time.sleep(600)


def crash(rank: Rank) -> None:
    with phase("reading the device's memory"):
        os.kill(os.getpid(), signal.SIGSEGV)


def hangs(subject: Subject, limit_s: float) -> Iterator[Diagnosis]:
    run_ranks(hang, 1, timeout_s=limit_s)
    yield Diagnosis(check="hangs", verdict=Verdict.PASS, measured="never")


def crashes(subject: Subject, limit_s: float) -> Iterator[Diagnosis]:
    run_ranks(crash, 1, timeout_s=limit_s)
    yield Diagnosis(check="crashes", verdict=Verdict.PASS, measured="never")


@pytest.mark.tier("test")
def test_a_check_that_hangs_is_ended_and_says_what_it_was_doing(subject: Subject, processes: None) -> None:
    (diagnosis,) = diagnosed(check("hangs", hangs), subject, 3.0)
    assert diagnosis.verdict is Verdict.FAIL
    assert "did not finish within 3 s" in diagnosis.measured
    assert "rank 0: stopped in waiting for a device, number 3" in diagnosis.measured
    assert diagnosis.remedy and diagnosis.details.startswith("The ranks on ")


def test_a_check_that_crashes_says_where(subject: Subject, processes: None) -> None:
    (diagnosis,) = diagnosed(check("crashes", crashes), subject, 60.0)
    assert diagnosis.verdict is Verdict.FAIL
    assert "in reading the device's memory: killed by SIGSEGV" in diagnosis.measured


def test_one_check_takes_no_other_with_it(subject: Subject) -> None:
    def raises(error: Exception) -> object:
        def run(subject: Subject, limit_s: float) -> list[Diagnosis]:
            raise error

        return run

    checks = [
        check("bug", raises(ZeroDivisionError("of ours"))),
        check("tool", raises(TimeoutError("nvidia-smi did not end within 20 s"))),
        check("error", raises(WorkerError("one\ntwo\nthree\nfour"))),
        check("absent", well, needs=(ACCELERATOR,)),
        check("well", well),
    ]
    names: list[str] = []
    said = examine(checks, subject, 600.0, names.append)
    assert [each.verdict.value for each in said] == ["FAIL", "FAIL", "FAIL", "SKIP", "PASS"]
    assert said[0].measured == "ZeroDivisionError: of ours" and "Traceback" in said[0].details
    assert said[1].measured == "nvidia-smi did not end within 20 s" and "restart the node" in said[1].remedy
    assert (said[2].measured, said[2].details) == ("one two three", "one\ntwo\nthree\nfour")
    assert said[3].measured == "needs an accelerator"
    assert names == ["bug", "tool", "error", "well"], "what is skipped is not announced"


def test_checks_share_the_minutes(subject: Subject) -> None:
    (first, second) = examine([check("well", well), check("late", well)], subject, 30.0)
    assert first.measured == "30 s", "no more than is left"
    assert examine([check("late", well)], subject, 4.0)[0].verdict is Verdict.SKIP
    assert second.verdict is Verdict.PASS


def test_a_tool_that_hangs_is_a_failure(subject: Subject) -> None:
    def run(subject: Subject, limit_s: float) -> Iterator[Diagnosis]:
        tool_output(["sleep", "60"], 0.2)
        yield from well(subject, limit_s)

    (diagnosis,) = diagnosed(check("tool", run), subject, 1.0)
    assert (diagnosis.verdict, diagnosis.measured) == (Verdict.FAIL, "sleep 60 did not end within 0.2 s")


def test_a_platform_that_is_not_here(processes: None) -> None:
    platform, diagnosis = platform_diagnosis(Device.cuda)
    assert platform.kind is Device.cpu
    assert diagnosis.verdict is Verdict.FAIL and diagnosis.measured.startswith("device=cuda: torch ")
