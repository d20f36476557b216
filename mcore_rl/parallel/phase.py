"""The current activity of this process, in words, for messages about errors and deaths.

There is one current phase per process, not per thread: the engine's.  A phase costs one or two microseconds, so it
marks microbatches and stages, not operators.  It measures no time and prints nothing; a profiler can mark phases in its
trace (``mark_phases``).

The invariant: the mirror, if there is one, always holds the current phase, so that others can read it after this
process was killed.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

SLOT_BYTES = 256
_SINCE = struct.Struct("d")  # seconds since the epoch, before the text

Marker = Callable[[str], AbstractContextManager[object]]

_current = ""
_mirror: memoryview | None = None
_marker: Marker | None = None


class phase:
    """``with phase("forward", microbatch=3):`` reads "forward, microbatch 3", after the phases around it."""

    __slots__ = ("_mark", "_outer", "_text")

    def __init__(self, name: str, **details: object) -> None:
        self._text = name if not details else ", ".join([name, *(f"{key} {value}" for key, value in details.items())])

    def __enter__(self) -> None:
        self._outer, self._mark = _current, None if _marker is None else _marker(self._text)
        if self._mark is not None:
            self._mark.__enter__()
        _enter(f"{self._outer} > {self._text}" if self._outer else self._text)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:  # it was raised in the innermost phase that it leaves
            error.__dict__.setdefault("_phase", _current)
        _enter(self._outer)
        if self._mark is not None:
            self._mark.__exit__(None, None, None)


def current_phase() -> str:
    """All phases around the caller, outermost first: "train_step > forward, microbatch 3"; "" outside any."""
    return _current


def phase_of(error: BaseException) -> str:
    """The phase in which ``error`` was raised."""
    return str(error.__dict__.get("_phase", _current))


def mark_phases(marker: Marker | None) -> None:
    """Wrap every phase entered from now on in ``marker(text of the phase)``; None: stop that."""
    global _marker
    _marker = marker


def mirror_phase(slot: memoryview) -> None:
    """Copy every change of the phase into ``slot``, ``SLOT_BYTES`` of memory shared with another process."""
    global _mirror
    assert slot.nbytes == SLOT_BYTES
    _mirror = slot
    _enter(_current)


def write_slot(slot: memoryview, text: str) -> None:
    """Write the time and ``text`` into ``slot``; a text that is too long loses its outermost phases."""
    room = SLOT_BYTES - _SINCE.size
    slot[:] = _SINCE.pack(time.time()) + text.encode()[-room:].ljust(room, b"\0")


def read_slot(slot: memoryview) -> str:
    """The phase that another process mirrors into ``slot``."""
    return bytes(slot[_SINCE.size :]).rstrip(b"\0").decode(errors="replace")


def read_since(slot: memoryview) -> float:
    """When that process entered, or came back to, its phase; seconds since the epoch, by its own clock."""
    return float(_SINCE.unpack(slot[: _SINCE.size])[0])


def _enter(text: str) -> None:
    global _current
    _current = text
    if _mirror is not None:
        write_slot(_mirror, text)
