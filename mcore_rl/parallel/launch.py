"""Start a function on several processes of this machine, and bring them all down, with one message, when one fails.

For tests and commands on one machine; on a cluster Ray starts the processes.  It restarts nothing, does not redirect
what the processes print, and does not know of processes that they start in turn.

The invariant: when ``run_ranks`` returns or raises, none of its processes is alive and nothing they shared is left.
If the parent is killed, its processes end themselves.
"""

from __future__ import annotations

import ctypes
import faulthandler
import itertools
import multiprocessing
import os
import pickle
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess, SpawnContext, SpawnProcess
from typing import Any

import torch
import torch.distributed as dist

from mcore_rl.ground.errors import WorkerError
from mcore_rl.parallel.cpu import UNCOMPILED
from mcore_rl.parallel.device import Platform, num_cores, set_device
from mcore_rl.parallel.failure import Cause, Failure, failure_message, first_cause
from mcore_rl.parallel.layout import Layout
from mcore_rl.parallel.meeting import join_group
from mcore_rl.parallel.phase import SLOT_BYTES, mirror_phase, phase, read_slot, write_slot
from mcore_rl.parallel.secret_store import StoreAccess, StoreServer

HOST = "127.0.0.1"
SETTLE_S = 0.2  # after a rank failed by itself: wait for reports that are already on their way
UNWIND_S = 2.0  # for the report of a rank that is in no phase any more
STOP_S = 1.0  # between SIGTERM and SIGKILL
EXIT_S = 30.0  # for a rank that has returned its result: to flush logs and leave its process groups

ProcessContext = SpawnContext | ForkServerContext
ChildProcess = SpawnProcess | ForkServerProcess
FRESH = multiprocessing.get_context("spawn")  # every process imports what it needs itself

_num_groups = itertools.count()


@dataclass(frozen=True, kw_only=True)
class Rank:
    """A rank, as its target gets it.  store: the parent's key-value store, on ``HOST``."""

    rank: int
    world_size: int
    store: StoreAccess
    layout: Layout | None

    def __str__(self) -> str:
        return f"rank {self.rank}" if self.layout is None else f"rank {self.rank} ({self.layout.coords(self.rank)})"

    def init_process_group(self, platform: Platform, timeout_s: float = 600.0) -> None:
        """Join the default process group of ``torch.distributed`` on this rank's device.  Every rank must call it.

        timeout_s: how long a collective waits for a missing rank.
        """
        set_device(platform, self.rank)
        # A new prefix each time: a second group must not read the addresses of the first.
        join_group(self.store, f"group_{next(_num_groups)}", platform, self.rank, self.world_size, timeout_s)


def run_ranks(
    target: Callable[..., Any],
    world_size: int,
    args: Sequence[object] = (),
    *,
    layout: Layout | None = None,
    timeout_s: float | None = None,
    grace_s: float = 2.0,
    threads_per_rank: int | None = None,
    context: ProcessContext = FRESH,
) -> list[Any]:
    """The results, in order of the ranks, of ``target(rank, *args)`` in ``world_size`` fresh processes.

    ``rank`` is a ``Rank``.  ``target``, ``args`` and the results are pickled, so ``target`` is a function of a module.
    Each process has RANK, LOCAL_RANK, WORLD_SIZE and OMP_NUM_THREADS in its environment before it imports anything;
    ``Rank.init_process_group`` meets at a store that the parent holds open, so no port is guessed.

    layout: for the ranks' coordinates in messages.  timeout_s: limit of the whole run; None: no limit.  grace_s: after
    a rank failed because its peers were gone, how long to wait for the report of the rank that caused it.
    threads_per_rank: None: share the cores evenly.  context: starts the processes; they must be as good as fresh.

    Raises, after all processes have stopped: the McoreRLError of the first failing rank; else a WorkerError that names
    rank, coordinates, phase and first cause, also after ``timeout_s``.
    """
    assert layout is None or layout.world_size == world_size, "the layout is of another world"
    slots = context.RawArray(ctypes.c_char, SLOT_BYTES * world_size)  # unlinked from the start: it cannot leak
    store = StoreServer(HOST)
    threads = threads_per_rank or max(1, num_cores() // world_size)
    children: list[_Child] = []
    try:
        for index in range(world_size):
            rank = Rank(rank=index, world_size=world_size, store=store.access, layout=layout)
            reader, writer = context.Pipe(duplex=False)
            process = context.Process(target=_main, args=(target, rank, args, writer, slots), name=str(rank))
            children.append(_Child(rank, process, reader, _slot(slots, index)))
            with inherited_environment(_rank_environment(rank, threads)):
                process.start()
            writer.close()  # so that the pipe ends when the child does
        timed_out = _watch(children, timeout_s, grace_s)
        _raise_first_cause(children, timeout_s if timed_out else None)
        return [child.result for child in children]
    finally:
        _stop(children)
        store.close()


class _Child:
    """The parent's side of one rank."""

    def __init__(self, rank: Rank, process: ChildProcess, reader: Connection, slot: memoryview) -> None:
        self.rank = rank
        self.process = process
        self.reader = reader
        self.slot = slot
        self.reported = False
        self.result: Any = None
        self.failure: Failure | None = None
        write_slot(slot, "starting up")

    def listen(self) -> None:
        """Read the report, or note the death, after ``wait`` has returned this child."""
        self.reported = True
        try:
            report = pickle.loads(self.reader.recv_bytes()) if self.reader.poll() else None
        except (EOFError, OSError):  # it ended before or while it wrote
            report = None
        if report is None:
            self.process.join(STOP_S)  # the pipe may end a moment before the process
            self.failure = Failure.of_death(self.rank.rank, self.process.exitcode, read_slot(self.slot))
        elif isinstance(report, Failure):
            self.failure = report
        else:
            (self.result,) = report

    def words(self) -> str:
        """How this rank ended, for a message about another one."""
        if not self.reported and not read_slot(self.slot) and self.reader.poll(UNWIND_S):
            self.listen()  # it had left its phases, on its way to report
        if self.failure is not None:
            return self.failure.aftermath()
        return "had finished" if self.reported else f"stopped in {read_slot(self.slot) or 'no phase'}"


def _watch(children: Sequence[_Child], timeout_s: float | None, grace_s: float) -> bool:
    """Wait until all children have reported, or enough to name the first cause.  True if ``timeout_s`` ran out."""
    started = time.monotonic()
    deadline = float("inf") if timeout_s is None else started + timeout_s
    failed_at: float | None = None
    while waiting := [child for child in children if not child.reported]:
        failures = [child.failure for child in children if child.failure is not None]
        until = deadline
        if failures:
            failed_at = failed_at or time.monotonic()
            until = failed_at + (SETTLE_S if first_cause(failures).cause is Cause.own else grace_s)
        remaining = until - time.monotonic()
        if remaining <= 0:
            return not failures
        handles: dict[Any, _Child] = {child.reader: child for child in waiting}
        handles |= {child.process.sentinel: child for child in waiting}
        ready = wait(list(handles), None if remaining == float("inf") else remaining)
        for child in {handles[handle] for handle in ready}:  # often both handles of one child
            child.listen()
    return False


def _raise_first_cause(children: Sequence[_Child], timeout_s: float | None) -> None:
    failures = [child.failure for child in children if child.failure is not None]
    host = socket.gethostname()
    if failures:
        first = first_cause(failures)
        others = {child.rank.rank: child.words() for child in children if child.rank.rank != first.rank}
        if first.error is not None:
            error = pickle.loads(first.error)
            error.add_note(f"Raised by {children[first.rank].rank} on {host} in {first.phase or 'no phase'}")
            raise error
        raise WorkerError(failure_message(first, host, [str(child.rank) for child in children], others))
    if timeout_s is not None:
        lines = [f"  {child.rank}: {child.words()}" for child in children]
        raise WorkerError("\n".join([f"The ranks on {host} did not finish within {timeout_s:g} s:", *lines]))


def _stop(children: Sequence[_Child]) -> None:
    """Wait for all processes if every one has returned its result; else end them by signals."""
    finished = all(child.reported and child.failure is None for child in children)
    started = [child.process for child in children if child.process.pid is not None]
    try:
        if not finished:
            for process in started:
                process.terminate()
        until = time.monotonic() + (EXIT_S if finished else STOP_S)
        for process in started:
            process.join(max(0.0, until - time.monotonic()))
    finally:  # also after a second Ctrl-C
        for process in started:
            process.kill()
        for process in started:
            process.join()
            process.close()
        for child in children:
            child.reader.close()


def _rank_environment(rank: Rank, threads: int) -> dict[str, str | None]:
    return {
        "RANK": str(rank.rank),
        "LOCAL_RANK": str(rank.rank),
        "WORLD_SIZE": str(rank.world_size),
        "OMP_NUM_THREADS": str(threads),
        **({} if torch.accelerator.is_available() else UNCOMPILED),
    }


@contextmanager
def inherited_environment(wanted: Mapping[str, str | None]) -> Iterator[None]:
    """Within: a process started here inherits ``wanted`` (None: unset), from its first import on."""
    before = {name: os.environ.get(name) for name in wanted}
    try:
        _set_environment(wanted)
        yield
    finally:
        _set_environment(before)


@contextmanager
def kept_environment() -> Iterator[None]:
    """Within: what changes the environment, as the import of a library, changes it until the end alone."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _set_environment(wanted: Mapping[str, str | None]) -> None:
    for name, value in wanted.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _slot(slots: Any, index: int) -> memoryview:
    return memoryview(slots).cast("B")[index * SLOT_BYTES : (index + 1) * SLOT_BYTES]


def _main(target: Callable[..., Any], rank: Rank, args: Sequence[object], writer: Connection, slots: Any) -> None:
    """The main function of a child; it reports once: a 1-tuple with the result, or a ``Failure``."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, and the parent decides
    threading.Thread(target=_end_with_parent, daemon=True).start()
    faulthandler.enable()
    mirror_phase(_slot(slots, rank.rank))
    try:
        result = target(rank, *args)
        with phase("returning the result"):
            writer.send_bytes(pickle.dumps((result,)))
        with phase("leaving the process groups"):
            # The groups' threads must not outlive the interpreter, or now and then one crashes it at exit.
            # No rank may leave while another still connects a group: the other would see a closed connection.
            if dist.is_initialized():
                dist.barrier()
                dist.destroy_process_group()
    except BaseException as error:  # noqa: BLE001  # report everything, also SystemExit: leaving early fails the others
        writer.send_bytes(pickle.dumps(Failure.of_error(rank.rank, error)))
    writer.close()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
