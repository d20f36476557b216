"""Copies between a device and host memory beside what the device computes; a part of the device layer.

On an accelerator they run on a stream of their own, one after another; on the CPU, which has one memory, a copy is
done when it is started.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from mcore_rl.parallel.device import Platform


class Copied(Protocol):
    """Copies that were started.  Until they are done, nobody may write to or free either side."""

    def done(self) -> bool:
        """Whether they are done; waits for nothing."""

    def wait(self) -> None:
        """Makes this process wait until they are done."""

    def order(self) -> None:
        """Makes what the device is told to compute from now on wait until they are done."""


class Copies(Protocol):
    """Starts copies, which are done in the order in which they were started."""

    def start(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> Copied:
        """Starts to copy each second tensor into the first, once the device has computed what it was told so far."""


class _Done:
    def done(self) -> bool:
        return True

    def wait(self) -> None: ...

    def order(self) -> None: ...


class HostCopies:
    """``Copies`` of a platform without devices."""

    def start(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> Copied:
        """Copies at once."""
        for target, source in pairs:
            target.copy_(source)
        return _Done()


class _OnStream:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def done(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self._event.synchronize()

    def order(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)


class StreamCopies:
    """``Copies`` of an accelerator, on a stream that is made with the first.

    The host's side must be pinned: torch would make a copy from or to other memory wait for the stream.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    def start(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> Copied:
        """Queues the copies, and returns before they are done."""
        stream = self._stream = self._stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
        # What the device has yet to compute may write to a source, or still read memory that a target has now.
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        return _OnStream(stream.record_event())


def copies_of(platform: Platform) -> Copies:
    """The copies of ``platform``."""
    return StreamCopies() if platform.is_accelerator else HostCopies()
