"""Programs that attack the machine, through the scorer and below it: what they take, and what they leave behind.

What each may try against files, sockets and other processes is in ``tests/rewards/test_confinement_attacks.py``.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from benchmarks.hostile_code import (
    HONEST,
    HOSTILE,
    LATE_THREADS,
    RAW_THREADS,
    WORKER_BYTES,
    Watch,
    descendants,
    measure,
)
from mcore_rl.config.reward import CodeConfig, RewardConfig
from mcore_rl.rewards.confinement import MAX_THREADS, Ending, run_confined, weaknesses
from mcore_rl.rewards.score import RewardRequest
from mcore_rl.rewards.scorer import Scorer
from tests.support.skips import KERNEL

SHORT = CodeConfig(timeout_s=1.0, memory_mib=256, output_kib=4)
LONG = CodeConfig(timeout_s=60.0)
TIMED_OUT = {
    "fork bomb",
    "processes",
    "pipes",
    "output",
    "loop",
    "sleep that ignores signals",
    "sleep",
    "stopped",
    "kills all",
}
pytestmark = [
    pytest.mark.skipif(bool(weaknesses()), reason=KERNEL + "; ".join(weaknesses())),
    pytest.mark.tier("ci"),  # they take what they can get, for a second each
]


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    before = set(descendants())
    yield
    assert set(descendants()) <= before


def wait_until(check: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def unconfined(program: str) -> str:
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    return answer.stdout


@pytest.mark.parametrize("name", HOSTILE)
def test_it_ends_within_its_limits_and_leaves_nothing(name: str) -> None:
    """Beside a process of the same user, which goes on."""
    with subprocess.Popen(["sleep", "600"]) as neighbour, Watch() as watch:
        outcome = run_confined(HOSTILE[name], SHORT)
        assert neighbour.poll() is None
        neighbour.kill()
    assert outcome.ending in (Ending.timeout, Ending.failed)
    assert name not in TIMED_OUT or outcome.ending is Ending.timeout
    assert watch.processes <= 1
    assert watch.threads <= 1 + LATE_THREADS
    assert watch.memory_bytes <= (SHORT.memory_mib << 20) + WORKER_BYTES
    assert len(outcome.stdout) <= 4096


def test_threads_that_nobody_counts_are_without_end() -> None:
    """And so many need no memory that a limit of address space would see."""
    assert unconfined(RAW_THREADS.format(limit=1000, sleep_s=0)) == "1000\n"
    outcome = run_confined(RAW_THREADS.format(limit=1000, sleep_s=60), LONG)
    assert outcome.ending is Ending.failed


@pytest.mark.parametrize(("count", "ending"), [(MAX_THREADS // 2, Ending.finished), (MAX_THREADS + 8, Ending.failed)])
def test_some_threads_are_fine(count: int, ending: Ending) -> None:
    """Their program waits for who counts them, as one that works would."""
    program = f"""
import threading, time
threading.stack_size(1 << 16)
done = threading.Event()
threads = [threading.Thread(target=done.wait) for _ in range({count})]
for thread in threads: thread.start()
time.sleep(0.5 if {count} <= {MAX_THREADS} else 60)
done.set()
"""
    assert run_confined(program, LONG).ending is ending


DAEMON = """
import os, sys, time
def ended(code): os._exit(code)
try:
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            print(os.getpid(), flush=True)
            os.closerange(0, 64)
            time.sleep(600)
        ended(0)
    os.wait()
except OSError:
    print("refused")
"""


def test_a_daemon_survives_its_grader_unless_it_is_confined() -> None:
    pid = int(unconfined(DAEMON))
    try:
        assert psutil.Process(pid).is_running()
    finally:
        os.kill(pid, signal.SIGKILL)
    assert run_confined(DAEMON, LONG).stdout == "refused\n"


def test_it_ends_first_where_memory_runs_out() -> None:
    """Looked at in a program that runs: one that is ended before it is confined is a fault of the machine."""
    assert Path("/proc/self/oom_score_adj").read_text().strip() != "1000"
    before = set(descendants())
    seen: list[str] = []

    def runs() -> bool:
        for pid in set(descendants()) - before:
            with suppress(OSError):
                if Path(f"/proc/{pid}/fd/1").read_text() == "runs\n":
                    seen.append(Path(f"/proc/{pid}/oom_score_adj").read_text())
                    os.kill(pid, signal.SIGKILL)
        return bool(seen)

    with ThreadPoolExecutor(1) as pool:
        outcome = pool.submit(run_confined, "print('runs', flush=True)\n" + HOSTILE["sleep"], LONG)
        wait_until(runs)
        assert outcome.result().ending is Ending.failed
    assert seen == ["1000\n"]
    outcome = run_confined("open('/proc/self/oom_score_adj', 'w').write('0')", LONG)
    assert outcome.message.startswith("PermissionError")


def test_it_leaves_no_core(tmp_path: Path) -> None:
    """Neither a file nor, by the size of 1, what a program that core_pattern names would store."""
    program = "import os, resource\nprint(resource.getrlimit(resource.RLIMIT_CORE), flush=True)\nos.abort()"
    outcome = run_confined(program, LONG)
    assert (outcome.ending, outcome.stdout) == (Ending.failed, "(1, 1)\n")


def test_no_process_that_grades_has_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """The grading processes and the programs below them, as the kernel knows their environments."""
    values = {"OPENAI_API_KEY": "sk-fake-openai", "AWS_SECRET_ACCESS_KEY": "fake-aws", "HF_TOKEN": "hf_fake"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    cases = {"inputs": [""], "outputs": [""]}
    requests = [RewardRequest(("sleep", k), "code", HOSTILE["sleep"], cases) for k in range(2)]
    before = set(descendants())
    environments: dict[int, bytes] = {}

    def four() -> bool:
        for pid in set(descendants()) - before:
            with suppress(OSError):
                environments[pid] = Path(f"/proc/{pid}/environ").read_bytes()
        return sum(b"PYTHONHASHSEED" in environment for environment in environments.values()) >= 2  # the programs run

    async def grade(scorer: Scorer) -> None:
        tasks = [asyncio.create_task(scorer.score(request)) for request in requests]
        await asyncio.to_thread(wait_until, four)
        for task in tasks:
            task.cancel()

    with Scorer(RewardConfig(num_workers=2, code=LONG)) as scorer:
        asyncio.run(grade(scorer))
    assert len(environments) >= 4
    for environment in environments.values():
        assert b"PATH=" in environment or b"PYTHONHASHSEED=" in environment
        assert not [value for value in values.values() if value.encode() in environment]


def test_many_at_once_leave_the_honest_ones_their_grade() -> None:
    """The thousand are in ``benchmarks/hostile_code.py``; these are its judgement of fewer."""
    config = RewardConfig(num_workers=4, timeout_s=60.0, code=CodeConfig(timeout_s=4.0, memory_mib=256))
    result = measure(16, config)
    assert result.violations(config) == []


def test_the_judgement_can_fail() -> None:
    config = RewardConfig(num_workers=1, code=SHORT)
    result = measure(2, config)
    assert result.violations(config) == []
    worse = type(result)(
        samples=2,
        workers=1,
        wall_s=1e6,
        peak_processes=4,
        peak_threads=10**5,
        peak_memory_mib=10**6,
        wrong=("x",),
        left=1,
    )
    assert len(worse.violations(config)) == 6
    assert run_confined(HONEST, LONG, stdin="21").stdout == "42\n"
