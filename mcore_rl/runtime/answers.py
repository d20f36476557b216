"""What a worker answers: a result, or a ``Failure`` that says where and why: no error loses its cause in Ray."""

from __future__ import annotations

import faulthandler
import mmap
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_rl.parallel.failure import Failure
from mcore_rl.parallel.phase import SLOT_BYTES, mirror_phase, phase, read_slot


@dataclass(frozen=True)
class Answer:
    """Of one call: ``value``, unless there is a ``failure``."""

    value: Any = None
    failure: Failure | None = None


class Answering:
    """A worker process: output to ``log``, the current phase to a file beside it, calls by name to ``Answer``."""

    def __init__(self, rank: int, log: Path) -> None:
        self.rank = rank
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the controller too, and it decides
        log.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for number in (1, 2):
            os.dup2(descriptor, number)
        faulthandler.enable(file=2)
        with open(phase_file(log), "w+b") as file:
            file.write(bytes(SLOT_BYTES))
            file.flush()
            self._mirror = mmap.mmap(file.fileno(), SLOT_BYTES)
        mirror_phase(memoryview(self._mirror))

    def call(self, method: str, *args: Any) -> Answer:
        """``method`` of this worker."""
        try:
            with phase(method):
                return Answer(value=getattr(self, method)(*args))
        except BaseException as error:  # noqa: BLE001  raised by the controller, which knows the others
            return Answer(failure=Failure.of_error(self.rank, error))


def phase_file(log: Path) -> Path:
    """Where the worker that logs to ``log`` mirrors its phase."""
    return log.with_suffix(".phase")


def last_phase(log: Path) -> str:
    """What the worker that logs to ``log`` was doing when it was last heard of; "" where that cannot be read."""
    try:
        return read_slot(memoryview(bytearray(phase_file(log).read_bytes()[:SLOT_BYTES])))
    except OSError:
        return ""
