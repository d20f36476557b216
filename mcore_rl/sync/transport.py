"""What a transport is: messages from training ranks to rollout ranks, in the order that both sides know.

A transport moves bytes.  What is in them, and in which order they come, is the plan's (``weights/messages.py``); who is
there, and what happens when somebody is not, is ``members``.  One file of this package for each:

process_group   point to point through ``torch.distributed``: gloo on CPU, the vendor's library between GPUs
shared_memory   one host, no accelerator: a message is written once and read where it lies
device_ipc      one GPU: as shared_memory, in the GPU's memory

Invariant: of messages on their way a sender holds two, a receiver half a bucket, or one that is larger.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from mcore_rl.errors import SyncError
from mcore_rl.sync.members import Address, Members


class Outgoing(Protocol):
    """The sending end, of one training rank."""

    members: Members

    def buffer(self, num_bytes: int) -> Tensor:
        """Uint8 [num_bytes] to fill for the next message; waits until one of two is free."""
        ...

    def send(self, message: Tensor, rollout_rank: int) -> None:
        """Send what ``buffer`` gave, to any number of ranks; it is free again when all have it.

        A transport that is ``in_place`` sends any other uint8 memory too, which must not change until ``flush``.
        """
        ...

    def flush(self) -> None:
        """Wait until everything has left this process."""
        ...

    def release(self) -> None:
        """Give the memory of the buffers back until the next update."""
        ...

    def close(self) -> None:
        """Leave."""
        ...


class Receiving:
    """What all receiving ends share; ``rollout.weight_channel.Incoming`` but for ``messages``."""

    def __init__(self, members: Members, bucket_bytes: int) -> None:
        self.members, self.bucket_bytes = members, bucket_bytes

    def begin(self, version: int) -> None:
        """See ``Incoming``."""
        self.members.meet(f"update {version}")

    def messages(self, wanted: Sequence[tuple[int, int]], place: Callable[[int], Tensor]) -> Iterator[Tensor]:
        """See ``Incoming``."""
        raise NotImplementedError

    def finish(self) -> None:
        """See ``Incoming``."""
        self.members.meet("applied")

    def failed(self, error: BaseException, doing: str) -> SyncError:
        """See ``Incoming``."""
        self.close()  # the sooner others hear of it, the sooner they stop
        return self.members.failed(error, doing)

    def close(self) -> None:
        """See ``Incoming``."""


class Transport(Protocol):
    """Makes both ends; a frozen dataclass, which travels by pickle.  ``address`` says where and who."""

    @property
    def address(self) -> Address:
        """Where the members meet."""
        ...

    @property
    def in_place(self) -> bool:
        """Whether it sends from any memory and receives into any: else messages pass through memory of its own."""
        ...

    def outgoing(self, rank: int, device: torch.device) -> Outgoing:
        """The end of a training rank.  Collective over all members."""
        ...

    def incoming(self, bucket_bytes: int, rollout_rank: int) -> Receiving:
        """The end of a rollout rank, inside vLLM's worker.  Collective over all members."""
        ...


AnyTransport = TypeVar("AnyTransport", bound=Transport)


def at_attempt(transport: AnyTransport, attempt: int) -> AnyTransport:
    """The same transport at a place in the store that no attempt before has written to."""
    address = replace(transport.address, name=f"{transport.address.name}/{attempt}")
    return replace(transport, address=address)  # type: ignore[type-var]  # every transport is a frozen dataclass


def connector(transport: Transport, bucket_bytes: int) -> Callable[[int], Receiving]:
    """``Opening.connect``."""
    return partial(transport.incoming, bucket_bytes)
