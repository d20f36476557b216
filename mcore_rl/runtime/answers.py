"""What a worker answers: a result, or a ``Failure`` that says where and why: no error loses its cause in Ray."""

from __future__ import annotations

import faulthandler
import mmap
import os
import pickle
import signal
import socket
import struct
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from mcore_rl.parallel.failure import Failure
from mcore_rl.parallel.phase import SLOT_BYTES, mirror_phase, phase, read_since, read_slot
from mcore_rl.runtime.shard import Portion, Shard, WorkerInput, WorkerOutput
from mcore_rl.tracking.secrets import forget_secrets


@dataclass(frozen=True)
class Answer:
    """Of one call: ``value``, unless there is a ``failure``."""

    value: Any = None
    failure: Failure | None = None


@dataclass(frozen=True)
class Whereabouts:
    """Of a worker.  node_id: Ray's."""

    pid: int
    node_id: str


class Answering:
    """A worker process: output to ``log``, the current phase to a file beside it, calls by name to ``Answer``."""

    def __init__(self, rank: int, log: Path) -> None:
        self.rank = rank
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the controller too, and it decides
        forget_secrets()  # that a cluster was started with; so the log has none
        log.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for number in (1, 2):
            os.dup2(descriptor, number)
        faulthandler.enable(file=2)
        self._stacks = open(stacks_file(log), "w")  # noqa: SIM115  as long as the process lives
        faulthandler.register(signal.SIGUSR2, file=self._stacks, all_threads=True)  # the watchdog asks for them
        with open(phase_file(log), "w+b") as file:
            file.write(bytes(SLOT_BYTES))
            file.flush()
            self._mirror = mmap.mmap(file.fileno(), SLOT_BYTES)
        mirror_phase(memoryview(self._mirror))

    def host(self) -> str:
        """The name of the machine that this worker runs on."""
        return socket.gethostname()

    def whereabouts(self) -> Whereabouts:
        """Where this process can be sent a signal."""
        return Whereabouts(os.getpid(), ray.get_runtime_context().get_node_id())

    def call(self, message: bytes) -> Answer:
        """What ``message``, of ``message_of``, asks of this worker."""
        return self._answer(message)[0]

    @ray.method(num_returns=2)
    def call_on(self, message: bytes, portion: bytes, *shards: Shard) -> tuple[Answer, Shard | None]:
        """As ``call``, of a method that takes a ``WorkerInput`` and returns a ``WorkerOutput``: its value, its shard.

        portion: a ``Portion`` of ``shards``, pickled.
        """
        return self._answer(message, portion, shards)

    def _answer(self, message: bytes, portion: bytes = b"", shards: tuple[Shard, ...] = ()) -> tuple[Answer, Any]:
        try:
            name, args, kwargs = pickle.loads(message)
            with phase(name):
                if portion:
                    wanted: Portion[Any] = pickle.loads(portion)
                    args = (WorkerInput(wanted.join(shards), wanted.payload), *args)
                found = getattr(self, name)(*args, **kwargs)
            return (Answer(found.value), found.shard) if isinstance(found, WorkerOutput) else (Answer(found), None)
        except BaseException as error:  # noqa: BLE001  raised by the controller, which knows the others
            return Answer(failure=Failure.of_error(self.rank, error)), None


def message_of(method: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]) -> bytes:
    """A call of ``method``: pickled once for all workers, since Ray would pickle the arguments again for each.

    It goes by name, so that a subclass of the worker may do it in its own way.
    """
    return pickle.dumps((method.__name__, args, kwargs), protocol=pickle.HIGHEST_PROTOCOL)


def phase_file(log: Path) -> Path:
    """Where the worker that logs to ``log`` mirrors its phase."""
    return log.with_suffix(".phase")


def phase_since(log: Path) -> float | None:
    """When the worker that logs to ``log`` entered its phase, seconds since the epoch; None where that is unknown."""
    try:
        return read_since(memoryview(phase_file(log).read_bytes()))
    except (OSError, struct.error):
        return None


def stacks_file(log: Path) -> Path:
    """Where the worker that logs to ``log`` writes the Python stacks of its threads, each time that it is asked."""
    return log.with_suffix(".stacks")


def last_phase(log: Path) -> str:
    """What the worker that logs to ``log`` was doing when it was last heard of; "" where that cannot be read."""
    try:
        return read_slot(memoryview(bytearray(phase_file(log).read_bytes()[:SLOT_BYTES])))
    except OSError:
        return ""
