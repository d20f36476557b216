"""Ray's own processes on this machine: no run outlives its head or its raylet, and none of them outlives the run.

Left to itself, Ray ends a program whose raylet died within a second, and one whose head (its GCS) died after a minute:
from C++, with exit code 1, without a word of what to do.  And a program that is killed leaves two agents for a minute.
Here both deaths are noticed at once, told in one message with the remedy, and end the program with ``os.EX_TEMPFAIL``,
at which a launcher begins it again; and a guard ends what the program leaves.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

import psutil
import ray
from rich.console import Console

from mcore_rl.runtime import ray_guard
from mcore_rl.tracking.secrets import without_secrets

VITAL = {"gcs_server": "Ray's head", "raylet": "Ray's raylet on this machine"}
GUARD_S = 2 * ray_guard.GRACE_S  # for the guard to have done its work


@dataclass(frozen=True)
class Held:
    """A process of Ray's.  handle: a descriptor (pidfd) that is readable once it has ended."""

    name: str
    pid: int
    handle: int

    def kill(self) -> None:
        """At once; nothing where it has ended."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.handle, signal.SIGKILL)


@contextmanager
def own_ray(before: set[psutil.Process], remedy: Callable[[], str]) -> Iterator[None]:
    """Within: Ray's processes, children of this one that were not there ``before``, are watched.  After: none is left.

    remedy: says how to go on, at the end of a message.
    """
    with ExitStack() as stack:
        held = _held(children() - before, stack)
        stack.enter_context(_guarded(held))
        stack.callback(ray.shutdown)
        stack.enter_context(_watched([each for each in held if each.name in VITAL], held, remedy))
        yield


@contextmanager
def joined_ray(remedy: Callable[[], str]) -> Iterator[None]:
    """Within: of a cluster that was there before, those processes are watched on which this program hangs directly.

    They are the raylet of this machine, and the head where it is on this machine.  After: the cluster goes on.
    """
    address, here = ray.get_runtime_context().gcs_address, ray.util.get_node_ip_address()
    host, _, port = address.rpartition(":")
    found = _running("raylet", {f"--gcs-address={address}", f"--node_ip_address={here}"})
    if host == here:
        found |= _running("gcs_server", {f"--gcs_server_port={port}", f"--node-ip-address={here}"})
    with ExitStack() as stack:
        stack.callback(ray.shutdown)
        stack.enter_context(_watched(_held(found, stack), [], remedy))
        yield


def children() -> set[psutil.Process]:
    """Of this process, and theirs."""
    return set(psutil.Process().children(recursive=True))


def _running(name: str, words: set[str]) -> set[psutil.Process]:
    """Processes of this machine with ``words`` on their command line."""
    found = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.name() == name and words <= set(process.cmdline()):
                found.add(process)
    return found


def _held(processes: Iterable[psutil.Process], stack: ExitStack) -> list[Held]:
    found = []
    for process in processes:
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            handle = os.pidfd_open(process.pid)
            stack.callback(os.close, handle)
            found.append(Held(process.name(), process.pid, handle))
    return found


@contextmanager
def _guarded(held: Sequence[Held]) -> Iterator[None]:
    """After, and should this program be killed within: none of ``held`` is alive."""
    reading, writing = os.pipe()
    handles = [reading, *(each.handle for each in held)]
    command = [sys.executable, "-I", "-S", ray_guard.__file__, *map(str, handles)]
    # In a session of its own: what ends this program's group must not end the guard before.
    guard = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, pass_fds=handles, start_new_session=True, env=without_secrets()
    )
    os.close(reading)
    try:
        yield
    finally:
        os.close(writing)
        guard.wait(GUARD_S)


@contextmanager
def _watched(vital: Sequence[Held], all_held: Sequence[Held], remedy: Callable[[], str]) -> Iterator[None]:
    """Within: should one of ``vital`` end, ``all_held`` are killed, and this program ends with a message."""
    reading, writing = os.pipe()

    def watch() -> None:
        poller = select.poll()
        for handle in (reading, *(each.handle for each in vital)):
            poller.register(handle, select.POLLIN)
        ended = {handle for handle, _ in poller.poll()}
        if reading not in ended:
            lost = next(each for each in vital if each.handle in ended)
            Console(stderr=True).show_cursor()
            message = f"\nerror: {VITAL[lost.name]} ({lost.name}, process {lost.pid}) died. {remedy()}\n"
            os.write(sys.stderr.fileno(), message.encode())
            for each in all_held:
                each.kill()
            os._exit(os.EX_TEMPFAIL)  # nothing of this program works without; Ray would end it a moment later

    thread = threading.Thread(target=watch, name="Ray's processes", daemon=True)
    thread.start()
    try:
        yield
    finally:
        os.close(writing)
        thread.join()
        os.close(reading)
