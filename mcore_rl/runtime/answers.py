"""What a worker returns: a result, or a ``Failure`` that says where and why, so that no cause is lost in Ray."""

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

from mcore_rl.ground.secrets import forget_secrets
from mcore_rl.parallel.failure import Failure
from mcore_rl.parallel.phase import SLOT_BYTES, mirror_phase, phase, read_since, read_slot
from mcore_rl.runtime.shard import Portion, Shard, WorkerInput, WorkerOutput


@dataclass(frozen=True)
class Answer:
    """The result of one call: ``value``, unless there is a ``failure``."""

    value: Any = None
    failure: Failure | None = None


@dataclass(frozen=True)
class Whereabouts:
    """Where a worker's process is.  pid: its process id on its machine.  node_id: the machine's id in Ray."""

    pid: int
    node_id: str

    @classmethod
    def here(cls) -> Whereabouts:
        """The whereabouts of this process."""
        return cls(os.getpid(), ray.get_runtime_context().get_node_id())


class Answering:
    """Base class of worker processes: runs calls by name, and returns an ``Answer`` to each.

    It writes its output to ``log``, and its current phase and its stacks to files beside it.
    """

    def __init__(self, rank: int, log: Path) -> None:
        self.rank = rank
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the controller gets Ctrl-C too, and handles it
        forget_secrets()  # those that a cluster was started with, so that the log has none
        log.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for number in (1, 2):
            os.dup2(descriptor, number)
        faulthandler.enable(file=2)
        self._stacks = open(stacks_file(log), "w")  # noqa: SIM115  as long as the process lives
        faulthandler.register(signal.SIGUSR2, file=self._stacks, all_threads=True)  # the watchdog sends the signal
        with open(phase_file(log), "w+b") as file:
            file.write(bytes(SLOT_BYTES))
            file.flush()
            self._mirror = mmap.mmap(file.fileno(), SLOT_BYTES)
        mirror_phase(memoryview(self._mirror))

    def host(self) -> str:
        """The name of the machine that this worker runs on."""
        return socket.gethostname()

    def whereabouts(self) -> Whereabouts:
        """The process id and node of this worker, to send it a signal."""
        return Whereabouts.here()

    def call(self, message: bytes) -> Answer:
        """Runs the call in ``message``, which ``message_of`` made."""
        return self._answer(message)[0]

    @ray.method(num_returns=2)
    def call_on(self, message: bytes, portion: bytes, *given: Any) -> tuple[Answer, Shard | None]:
        """Like ``call``, for a method that takes a ``WorkerInput`` and returns a ``WorkerOutput``.

        portion: a pickled ``Portion`` of what is ``given``: shards, and patches of pictures.  Returns (the output's
        value, the output's shard).
        """
        return self._answer(message, portion, given)

    def _answer(self, message: bytes, portion: bytes = b"", given: tuple[Any, ...] = ()) -> tuple[Answer, Any]:
        try:
            name, args, kwargs = pickle.loads(message)
            with phase(name):
                if portion:
                    wanted: Portion[Any] = pickle.loads(portion)
                    args = (WorkerInput(wanted.join(given), wanted.payload), *args)
                result = getattr(self, name)(*args, **kwargs)
            return (Answer(result.value), result.shard) if isinstance(result, WorkerOutput) else (Answer(result), None)
        except BaseException as error:  # noqa: BLE001  the controller raises it, with the state of the other workers
            return Answer(failure=Failure.of_error(self.rank, error)), None


def message_of(method: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]) -> bytes:
    """A call of ``method``, pickled once for all workers; Ray would pickle the arguments again for each worker.

    It holds the method's name, so that a subclass of the worker may override the method.
    """
    return pickle.dumps((method.__name__, args, kwargs), protocol=pickle.HIGHEST_PROTOCOL)


def phase_file(log: Path) -> Path:
    """The file to which the worker that logs to ``log`` mirrors its phase."""
    return log.with_suffix(".phase")


def phase_since(log: Path) -> float | None:
    """When the worker that logs to ``log`` entered its phase, seconds since the epoch; None if that is unknown."""
    try:
        return read_since(memoryview(phase_file(log).read_bytes()))
    except (OSError, struct.error):
        return None


def stacks_file(log: Path) -> Path:
    """The file to which the worker that logs to ``log`` appends the Python stacks of its threads, at each SIGUSR2."""
    return log.with_suffix(".stacks")


def last_phase(log: Path) -> str:
    """The last phase of the worker that logs to ``log``, also if it has died; "" if the file cannot be read."""
    try:
        return read_slot(memoryview(bytearray(phase_file(log).read_bytes()[:SLOT_BYTES])))
    except OSError:
        return ""
