"""Finds which rank failed first, and writes the message about it.

When one rank of a collective raises or dies, the others fail too, with "connection closed by peer" or a time-out, and
those errors often arrive first.  This module turns the reports of all ranks into one message that names the first
cause.  It does not start, watch or stop processes.
"""

from __future__ import annotations

import pickle
import signal
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch.distributed as dist

from mcore_rl.ground.errors import McoreRLError
from mcore_rl.parallel.phase import phase_of

# Error texts of the collective libraries on a rank whose peers are gone.
PEER_IS_GONE = (
    "closed by peer",
    "reset by peer",
    "connection closed",
    "connection was likely closed",
    "connection refused",
    "broken pipe",
    "timed out",
    "timeout",
    "remote process exited",
    "communicator was aborted",
    "pair closure",
)
SIGNAL_HINTS = {
    signal.SIGKILL: "out of memory?",
    signal.SIGTERM: "stopped by the scheduler?",
    signal.SIGBUS: "shared memory full?",
}


class Cause(IntEnum):
    """How likely a failure is the first cause; the lowest of all ranks is taken, then the earliest."""

    own = 0  # an error of this rank's own, or a silent death
    aborted = 1  # perhaps killed by the watchdog of a collective library
    peer = 2  # the error of a rank whose peers are gone


@dataclass(frozen=True, kw_only=True)
class Failure:
    """How one rank failed.

    phase: what it was doing.  what: "ValueError: ..." or "killed by SIGKILL".  time_s: of the monotonic clock, which
    all processes of a machine share.  error: the pickled McoreRLError, for the caller to raise again.
    """

    rank: int
    cause: Cause
    phase: str
    what: str
    time_s: float
    traceback: str = ""
    error: bytes | None = None

    @classmethod
    def of_error(cls, rank: int, error: BaseException) -> Failure:
        """The failure of a rank that caught ``error``; call it in that process."""
        message = str(error)
        return cls(
            rank=rank,
            cause=Cause.peer if _peer_is_gone(error) else Cause.own,
            phase=phase_of(error),
            what=f"{type(error).__name__}: {message}" if message else type(error).__name__,
            time_s=time.monotonic(),
            traceback="".join(traceback.format_exception(error)),
            error=_pickled(error),
        )

    @classmethod
    def of_death(cls, rank: int, exit_code: int | None, phase: str) -> Failure:
        """The failure of a process that ended without a report.  exit_code: multiprocessing's."""
        cause = Cause.aborted if exit_code == -signal.SIGABRT else Cause.own
        return cls(rank=rank, cause=cause, phase=phase, what=_death(exit_code), time_s=time.monotonic())

    def aftermath(self) -> str:
        """How this rank ended, for a message about another rank's failure."""
        where = self.phase or "no phase"
        if self.cause is Cause.peer:
            return f"stopped in {where}, its peers gone"
        return f"failed in {where}: {self.what.splitlines()[0]}"


def first_cause(failures: Sequence[Failure]) -> Failure:
    """The failure that most likely caused the others."""
    return min(failures, key=lambda failure: (failure.cause, failure.time_s))


def failure_message(first: Failure, host: str, names: Sequence[str], others: Mapping[int, str]) -> str:
    """A message with the first cause, how the others ended, and the first cause's traceback.

    names: of all ranks, with their coordinates if they have some.  others: rank -> how it ended.
    """
    where = f" in {first.phase}" if first.phase else ""
    lines = [f"{names[first.rank]} failed on {host}{where}: {first.what}"]
    if first.cause is Cause.peer:
        lines.append("This is what a rank says whose peers are gone; no rank reported a cause of its own.")
    if others:
        lines += ["The other ranks:", *(f"  {names[rank]}: {words}" for rank, words in sorted(others.items()))]
    if first.traceback:
        lines += ["", f"Traceback of rank {first.rank}:", first.traceback.rstrip()]
    return "\n".join(lines)


def _peer_is_gone(error: BaseException) -> bool:
    message = str(error).lower()
    return isinstance(error, (dist.DistError, ConnectionError)) or (
        isinstance(error, RuntimeError) and any(words in message for words in PEER_IS_GONE)
    )


def _pickled(error: BaseException) -> bytes | None:
    """``error`` pickled if it is meant for the user and survives pickling; None: report its text only."""
    if not isinstance(error, McoreRLError):
        return None
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    except Exception:  # noqa: BLE001  # whatever a subclass with its own constructor may raise
        return None
    return pickled


def _death(exit_code: int | None) -> str:
    if exit_code is None:
        return "stopped reporting"
    if exit_code >= 0:
        return f"exited with code {exit_code} before it reported anything; its own output may say why"
    try:
        name = signal.Signals(-exit_code)
    except ValueError:
        return f"killed by signal {-exit_code}"
    hint = SIGNAL_HINTS.get(name)
    return f"killed by {name.name}" + (f" ({hint})" if hint else "")
