"""The process that does the algebra: it answers, is ended where it computes for too long, and ends with its caller."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from contextlib import suppress

import psutil
import pytest

from mcore_rl.rewards.symbolic_process import Algebra

HUGE = (
    "10^{10^{10}}",
    *(
        pytest.param(huge, marks=pytest.mark.tier("full"))
        for huge in ("9^{9^{9}}", r"(10^{9})!", r"\sum_{k=1}^{10^{9}} \sin(k^2)", "2^{2^{2^{2^{2^{2}}}}}")
    ),
)


@pytest.fixture(scope="module")
def algebra() -> Algebra:
    return Algebra()


def test_questions_are_answered_by_one_process(algebra: Algebra) -> None:
    assert algebra.equal("x^2-1", "(x-1)(x+1)")
    pid = algebra.pid
    assert not algebra.equal("x^2-1", "(x-1)(x+2)")
    assert algebra.reads("x^2")
    assert not algebra.reads("x^2 +")
    assert algebra.last_statement("so the answer is 204.") == "204"
    assert algebra.last_statement("no idea") is None
    assert algebra.pid == pid is not None


@pytest.mark.parametrize("huge", HUGE)
def test_what_needs_too_long_is_not_equal_and_leaves_nothing_behind(algebra: Algebra, huge: str) -> None:
    """A second of processor time, which this needs however busy the machine is."""
    assert algebra.equal("5", "5.0")
    before = psutil.Process(algebra.pid)
    assert not algebra.equal("5", huge, limit_s=1.0)
    assert algebra.equal("5", "5.0")
    if algebra.pid != before.pid:
        assert not before.is_running()


def test_the_limit_is_the_kernels_and_holds_in_a_thread(algebra: Algebra) -> None:
    handlers = [signal.getsignal(each) for each in (signal.SIGALRM, signal.SIGPROF)]
    verdicts: list[bool] = []
    thread = threading.Thread(target=lambda: verdicts.append(algebra.equal("5", "9^{9^{9}}", limit_s=1.0)))
    thread.start()
    thread.join()
    assert verdicts == [False]
    assert [signal.getsignal(each) for each in (signal.SIGALRM, signal.SIGPROF)] == handlers


def test_it_ends_with_its_caller() -> None:
    program = (
        "from mcore_rl.rewards.symbolic_process import Algebra\n"
        "algebra = Algebra()\nassert algebra.equal('2x', 'x+x')\nprint(algebra.pid, flush=True)\nimport os\nos._exit(1)"
    )
    said = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=False).stdout
    with suppress(psutil.NoSuchProcess):
        psutil.Process(int(said)).wait(timeout=60)
