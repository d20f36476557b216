"""Processes that work, raise, die and hang: what the parent returns or says, and that nothing is left behind.

The durations asserted here guard against hangs and are generous; a failing run takes about two seconds after start-up.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from mcore_rl.config.engine import Device
from mcore_rl.config.parallel import parse_layout
from mcore_rl.ground.errors import ConfigError, McoreRLError, Violation, WorkerError
from mcore_rl.parallel.device import detect
from mcore_rl.parallel.failure import Cause, Failure, failure_message, first_cause
from mcore_rl.parallel.launch import Rank, run_ranks
from mcore_rl.parallel.layout import Layout
from mcore_rl.parallel.phase import SLOT_BYTES, current_phase, mirror_phase, phase, phase_of, read_slot

HANG_S = 120.0


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No child process, no shared memory and no variable outlives any test here."""
    environ, started = dict(os.environ), time.monotonic()
    yield
    assert multiprocessing.active_children() == []
    assert [child for child in psutil.Process().children() if "spawn_main" in " ".join(child.cmdline())] == []
    assert [path for path in Path("/dev/shm").glob("*") if str(os.getpid()) in path.name] == []
    assert dict(os.environ) | {"PYTEST_CURRENT_TEST": ""} == environ | {"PYTEST_CURRENT_TEST": ""}
    assert time.monotonic() - started < HANG_S


def join(rank: Rank) -> None:
    rank.init_process_group(detect(Device.cpu))


def all_reduce() -> float:
    total = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(total)
    return total.item()


# ---- targets: what the ranks run ----


def work(rank: Rank, offset: int) -> tuple[int, float, float, torch.Tensor]:
    """Join three times, and add up the ranks each time."""
    join(rank)
    first = all_reduce()
    dist.destroy_process_group()
    time.sleep(0.3 * rank.rank)  # long enough for rank 0 to find what the first group left in the store, if it could
    join(rank)
    second = all_reduce()
    dist.destroy_process_group()
    join(rank)
    third = all_reduce()
    dist.destroy_process_group()
    assert first == second == third
    threads = float(os.environ["OMP_NUM_THREADS"])
    assert (os.environ["RANK"], os.environ["LOCAL_RANK"]) == (str(rank.rank),) * 2
    assert torch.get_num_threads() == threads
    return rank.rank + offset, first, threads, torch.arange(3) * rank.rank


def fail_on_one(rank: Rank, how: str) -> None:
    """Rank 1 fails by itself a moment after the others have begun to wait for it; "late": it is heard after them."""
    join(rank)
    with phase("train_step"):
        with phase("forward", microbatch=2):
            all_reduce()
        with phase("backward", microbatch=3):
            if rank.rank != 1:
                all_reduce()
            time.sleep(0.3)
            if how == "late":
                dist.destroy_process_group()
                time.sleep(2.0)
            if how in ("raise", "late"):
                raise ValueError("the loss is\nnot a number")
            if how == "exit":
                os._exit(7)
            os.kill(os.getpid(), getattr(signal, how))


def refuse_everywhere(rank: Rank) -> None:
    with phase("setup"):
        raise ConfigError([Violation("parallel.tp", 3, "does not divide", "Write parallel.tp=2")])


def return_what_cannot_travel(rank: Rank) -> object:
    return (lambda: None) if rank.rank == 1 else None


def sleep_long(rank: Rank) -> None:
    with phase("rollout", step=rank.rank):
        time.sleep(3 * HANG_S)


def leave_early(rank: Rank) -> None:
    sys.exit("nothing to do")


class DiesOnArrival:
    """A target that cannot be unpickled in the process that should run it."""

    def __reduce__(self) -> tuple[object, tuple[int]]:
        return sys.exit, (1,)

    def __call__(self, rank: Rank) -> None:
        raise AssertionError("unreachable")


def notify_and_sleep(rank: Rank, port: int) -> None:
    """Tell a listener this process's id, then do nothing."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(f"{os.getpid()}\n".encode())
    time.sleep(3 * HANG_S)


# ---- runs ----


def test_results_come_back_in_the_order_of_the_ranks(processes: None) -> None:
    results = run_ranks(work, 2, (10,), threads_per_rank=1)
    assert [result[:3] for result in results] == [(10, 3.0, 1.0), (11, 3.0, 1.0)]  # ranks + 1 add up to 3
    assert results[1][3].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ("raise", "ValueError: the loss is\nnot a number"),
        ("late", "ValueError: the loss is\nnot a number"),
        ("SIGKILL", "killed by SIGKILL (out of memory?)"),
        ("exit", "exited with code 7 before it reported anything"),
    ],
)
def test_the_first_cause_is_named_though_the_others_fail_first(how: str, what: str, processes: None) -> None:
    layout = Layout.of(parse_layout("pp=2"), 2)
    with pytest.raises(WorkerError) as failed:
        run_ranks(fail_on_one, 2, (how,), layout=layout, timeout_s=HANG_S, grace_s=HANG_S)
    message = str(failed.value)
    where = f"on {socket.gethostname()} in train_step > backward, microbatch 3"
    assert message.startswith(f"rank 1 (dp0 pp1 tp0 cp0 ep0) failed {where}: {what}")
    assert (
        "\nThe other ranks:\n  rank 0 (dp0 pp0 tp0 cp0 ep0): stopped in train_step > backward, microbatch 3" in message
    )
    assert ("Traceback of rank 1:" in message) == (how in ("raise", "late"))
    assert ("in fail_on_one" in message) == (how in ("raise", "late"))
    if how == "late":  # rank 0 was heard first
        assert "microbatch 3, its peers gone\n" in message


def test_an_error_meant_for_the_user_is_raised_as_itself(processes: None) -> None:
    with pytest.raises(ConfigError) as refused:
        run_ranks(refuse_everywhere, 2)
    assert [violation.key for violation in refused.value.violations] == ["parallel.tp"]
    assert str(refused.value).count("does not divide") == 1
    assert any("in setup" in note for note in refused.value.__notes__)


def test_a_result_that_cannot_travel_is_a_failure_of_its_rank(processes: None) -> None:
    with pytest.raises(WorkerError, match=r"rank 1 failed on \S+ in returning the result: .*lambda"):
        run_ranks(return_what_cannot_travel, 2)


def test_leaving_early_is_a_failure(processes: None) -> None:
    with pytest.raises(WorkerError, match=r"rank 0 failed on \S+: SystemExit: nothing to do"):
        run_ranks(leave_early, 1)


def test_a_run_over_its_time_says_where_each_rank_stands(processes: None) -> None:
    with pytest.raises(WorkerError) as failed:
        run_ranks(sleep_long, 2, timeout_s=4.0)
    lines = str(failed.value).splitlines()
    assert lines[0] == f"The ranks on {socket.gethostname()} did not finish within 4 s:"
    # A rank on a busy machine may not have come further than its imports by then.
    assert re.fullmatch("  rank 0: stopped in (rollout, step 0|starting up)", lines[1])
    assert re.fullmatch("  rank 1: stopped in (rollout, step 1|starting up)", lines[2])


def test_a_death_before_the_target_is_reached_is_told_from_one_inside_it(processes: None) -> None:
    with pytest.raises(WorkerError, match=r"rank 0 failed on \S+ in starting up: exited with code 1 before"):
        run_ranks(DiesOnArrival(), 1)


def listener() -> socket.socket:
    server = socket.create_server(("127.0.0.1", 0))
    server.settimeout(HANG_S)
    return server


def pids_of(server: socket.socket, count: int) -> list[int]:
    pids = []
    for _ in range(count):
        connection, _ = server.accept()
        with connection, connection.makefile() as lines:
            pids.append(int(lines.readline()))
    return pids


def assert_all_end(pids: list[int]) -> None:
    until = time.monotonic() + HANG_S
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids):
        assert time.monotonic() < until, f"some of {pids} are still alive"
        time.sleep(0.05)


def test_an_interrupted_parent_takes_its_ranks_with_it(processes: None) -> None:
    # A shell starts what it puts in the background with SIGINT ignored, and Python then raises no KeyboardInterrupt.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        interrupt_two_ranks()
    finally:
        signal.signal(signal.SIGINT, before)


def interrupt_two_ranks() -> None:
    with listener() as server:
        pids: list[int] = []

        def interrupt() -> None:
            pids.extend(pids_of(server, 2))
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            run_ranks(notify_and_sleep, 2, (server.getsockname()[1],))
        thread.join()
        assert len(pids) == 2
        assert not any(psutil.pid_exists(pid) for pid in pids)


def test_ranks_end_themselves_when_the_parent_is_killed(processes: None) -> None:
    with listener() as server:
        code = (
            "from mcore_rl.parallel.launch import run_ranks\n"
            "from tests.parallel.test_launch import notify_and_sleep\n"
            f"run_ranks(notify_and_sleep, 1, ({server.getsockname()[1]},))\n"
        )
        root = Path(__file__).parents[2]
        with subprocess.Popen([sys.executable, "-c", code], cwd=root, stderr=subprocess.DEVNULL) as parent:
            pids = pids_of(server, 1)
            parent.kill()
            parent.wait()
        assert_all_end(pids)


# ---- which failure is the first cause ----


def failure(rank: int, cause: Cause, time_s: float) -> Failure:
    return Failure(rank=rank, cause=cause, phase="", what=f"error {rank}", time_s=time_s)


@pytest.mark.parametrize(
    ("failures", "first"),
    [
        ([failure(0, Cause.peer, 1.0), failure(1, Cause.own, 2.0)], 1),
        ([failure(0, Cause.aborted, 1.0), failure(1, Cause.own, 2.0)], 1),
        ([failure(0, Cause.peer, 1.0), failure(1, Cause.aborted, 2.0)], 1),
        ([failure(0, Cause.own, 2.0), failure(1, Cause.own, 1.0)], 1),
        ([failure(0, Cause.peer, 1.0), failure(1, Cause.peer, 2.0)], 0),
    ],
)
def test_an_own_error_outranks_those_that_follow_from_it(failures: list[Failure], first: int) -> None:
    assert first_cause(failures).rank == first


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (ValueError("Connection closed by peer"), Cause.own),  # no collective raises this type
        (RuntimeError("shapes do not match"), Cause.own),
        (RuntimeError("[pair.cc:547] Connection closed by peer [127.0.0.1]:5001"), Cause.peer),
        (RuntimeError("Timed out waiting 1800000ms for recv operation to complete"), Cause.peer),
        (dist.DistNetworkError("the client socket has failed"), Cause.peer),
        (ConnectionResetError(), Cause.peer),
    ],
)
def test_errors_of_lost_peers_are_told_apart(error: Exception, cause: Cause) -> None:
    assert Failure.of_error(0, error).cause is cause


@pytest.mark.parametrize(
    ("exit_code", "what", "cause"),
    [
        (-signal.SIGKILL, "killed by SIGKILL (out of memory?)", Cause.own),
        (-signal.SIGSEGV, "killed by SIGSEGV", Cause.own),
        (-signal.SIGABRT, "killed by SIGABRT", Cause.aborted),
        (-99, "killed by signal 99", Cause.own),
        (0, "exited with code 0 before it reported anything; its own output may say why", Cause.own),
        (None, "stopped reporting", Cause.own),
    ],
)
def test_deaths_are_named(exit_code: int | None, what: str, cause: Cause) -> None:
    death = Failure.of_death(0, exit_code, "forward")
    assert (death.what, death.cause, death.phase) == (what, cause, "forward")


class Stubborn(McoreRLError):
    """Cannot be made again from its arguments, so it cannot be pickled and read back."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first + second)


def test_an_error_that_does_not_survive_pickling_is_told_by_its_text() -> None:
    raised = Failure.of_error(0, Stubborn("no ", "room"))
    assert (raised.error, raised.what) == (None, "Stubborn: no room")
    survived = Failure.of_error(0, McoreRLError("no room")).error
    assert survived is not None and str(pickle.loads(survived)) == "no room"


def test_the_aftermath_on_other_ranks_is_one_line() -> None:
    assert Failure.of_error(0, RuntimeError("Broken pipe")).aftermath() == "stopped in no phase, its peers gone"
    assert Failure.of_death(0, 3, "forward").aftermath().startswith("failed in forward: exited with code 3 before")
    assert Failure.of_error(0, ValueError("one\ntwo")).aftermath() == "failed in no phase: ValueError: one"


def test_where_no_rank_gave_a_cause_the_message_says_so() -> None:
    message = failure_message(failure(0, Cause.peer, 1.0), "node7", ["rank 0", "rank 1"], {1: "stopped in backward"})
    assert message.splitlines() == [
        "rank 0 failed on node7: error 0",
        "This is what a rank says whose peers are gone; no rank reported a cause of its own.",
        "The other ranks:",
        "  rank 1: stopped in backward",
    ]


# ---- phases ----


def test_phases_nest_and_end() -> None:
    assert current_phase() == ""
    with phase("train_step"):
        with phase("forward", microbatch=3, chunk=1):
            assert current_phase() == "train_step > forward, microbatch 3, chunk 1"
        assert current_phase() == "train_step"
    assert current_phase() == ""


def test_an_error_remembers_the_innermost_phase() -> None:
    with phase("outer"):
        try:
            with phase("middle"), phase("inner"):
                raise ValueError("here")
        except ValueError as error:
            caught = error
        assert current_phase() == "outer"
    assert phase_of(caught) == "outer > middle > inner"
    with phase("elsewhere"):
        assert phase_of(ValueError("never raised")) == "elsewhere"


def test_another_process_can_read_the_phase_from_the_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mcore_rl.parallel.phase._mirror", None)
    slot = memoryview(bytearray(b"x" * SLOT_BYTES))
    with phase("before"):
        mirror_phase(slot)
        assert read_slot(slot) == "before"
        with phase("x" * 300 + " the end"):
            assert read_slot(slot).endswith("xxx the end")  # what is too long loses its outermost part
    assert read_slot(slot) == ""
