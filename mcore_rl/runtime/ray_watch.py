"""Watches Ray's own processes on this machine: a run ends with Ray's head or raylet, and these end with the run.

By itself, Ray ends a program whose raylet died within a second, and one whose head (its GCS) died after a minute:
from C++, with exit code 1, without a word of what to do.  And a program that is killed leaves two agents for a minute.
Here both deaths are noticed at once, told in one message with the remedy, and end the program with ``os.EX_TEMPFAIL``,
at which a launcher begins it again; and a guard ends what the program leaves.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

import psutil
import ray
from rich.console import Console

from mcore_rl.processes.guarding import start_guard

VITAL = {"gcs_server": "Ray's head", "raylet": "Ray's raylet on this machine"}
LOOK_S = 5.0  # between two looks whether a process is stopped
STOPPED_S = 30.0  # a process that is stopped (SIGSTOP) for so long is as good as dead: nothing else notices it
GRACE_S = 5.0  # how long a regular shutdown of Ray may take
GUARD_S = 2 * GRACE_S  # the time limit for the guard to finish


@dataclass(frozen=True)
class Held:
    """A process of Ray's.  handle: its pidfd, which is readable once the process has ended."""

    name: str
    pid: int
    handle: int

    def kill(self) -> None:
        """Kills the process; does nothing if it has ended."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.handle, signal.SIGKILL)


@contextmanager
def own_ray(before: set[psutil.Process], remedy: Callable[[], str]) -> Iterator[None]:
    """Watches Ray's processes while active; on exit, ends all of them.

    before: the children of this process before Ray was started; all other children are Ray's.
    remedy: gives the end of the message if one dies, which says how to go on.
    """
    with ExitStack() as stack:
        held = _held(children() - before, stack)
        stack.enter_context(_guarded(held))
        stack.callback(ray.shutdown)
        stack.enter_context(_watched([each for each in held if each.name in VITAL], held, remedy))
        yield


@contextmanager
def joined_ray(remedy: Callable[[], str]) -> Iterator[None]:
    """For a cluster that others started: watches the processes that this program needs; on exit, the cluster goes on.

    They are the raylet of this machine, and Ray's head if it is on this machine.
    """
    address, here = ray.get_runtime_context().gcs_address, ray.util.get_node_ip_address()
    host, _, port = address.rpartition(":")
    vital = _running("raylet", {f"--gcs-address={address}", f"--node_ip_address={here}"})
    if host == here:
        vital |= _running("gcs_server", {f"--gcs_server_port={port}", f"--node-ip-address={here}"})
    with ExitStack() as stack:
        stack.callback(ray.shutdown)
        stack.enter_context(_watched(_held(vital, stack), [], remedy))
        yield


def children() -> set[psutil.Process]:
    """The children of this process, and their descendants."""
    return set(psutil.Process().children(recursive=True))


def _running(name: str, words: set[str]) -> set[psutil.Process]:
    """The processes of this machine called ``name`` that have all ``words`` on their command line."""
    processes = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.name() == name and words <= set(process.cmdline()):
                processes.add(process)
    return processes


def _held(processes: Iterable[psutil.Process], stack: ExitStack) -> list[Held]:
    held = []
    for process in processes:
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            handle = os.pidfd_open(process.pid)
            stack.callback(os.close, handle)
            held.append(Held(process.name(), process.pid, handle))
    return held


@contextmanager
def _guarded(held: Sequence[Held]) -> Iterator[None]:
    """Ends all of ``held`` on exit, and also if this program is killed meanwhile."""
    reading, writing = os.pipe()
    guard = start_guard([reading], grace_s=GRACE_S, processes=[each.handle for each in held])
    os.close(reading)
    try:
        yield
    finally:
        os.close(writing)
        guard.wait(GUARD_S)


def lost_of(vital: Sequence[Held], until: int) -> tuple[Held, str] | None:
    """Waits until one of ``vital`` has ended or was stopped too long; returns it, and what became of it.

    None: the descriptor ``until`` was closed before.
    """
    poller = select.poll()
    for handle in (until, *(each.handle for each in vital)):
        poller.register(handle, select.POLLIN)
    since = dict[int, float]()  # by process, when it was first seen stopped
    while True:
        ended = {handle for handle, _ in poller.poll(1000 * LOOK_S)}
        if until in ended:
            return None
        for each in vital:
            if each.handle in ended:
                return each, "died"
            if not _is_stopped(each.pid):
                since.pop(each.pid, None)
            elif time.monotonic() - since.setdefault(each.pid, time.monotonic()) >= STOPPED_S:
                return each, f"has been stopped (SIGSTOP) for {STOPPED_S:.0f} s"


def _is_stopped(pid: int) -> bool:
    with suppress(psutil.Error):
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    return False


@contextmanager
def _watched(vital: Sequence[Held], all_held: Sequence[Held], remedy: Callable[[], str]) -> Iterator[None]:
    """While active: if one of ``vital`` ends or is stopped, kills ``all_held`` and ends this program with a message."""
    reading, writing = os.pipe()

    def watch() -> None:
        if (loss := lost_of(vital, reading)) is not None:
            lost, how = loss
            Console(stderr=True).show_cursor()
            message = f"\nerror: {VITAL[lost.name]} ({lost.name}, process {lost.pid}) {how}. {remedy()}\n"
            os.write(sys.stderr.fileno(), message.encode())
            for each in all_held:
                each.kill()
            os._exit(os.EX_TEMPFAIL)  # this program cannot go on without it; Ray would end it a moment later

    thread = threading.Thread(target=watch, name="Ray's processes", daemon=True)
    thread.start()
    try:
        yield
    finally:
        os.close(writing)
        thread.join()
        os.close(reading)
