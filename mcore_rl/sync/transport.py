"""The interface of transports: messages from training ranks to rollout ranks, in an order that both sides know.

A transport moves bytes.  The plan decides their content and order (``weights/messages.py``); ``members`` decides who
takes part, and handles failures.  One file for each transport:

process_group   point to point through ``torch.distributed``: gloo on CPU, the vendor's library between GPUs
shared_memory   one host, no accelerator: both sides map the same memory
device_ipc      one GPU: as shared_memory, in the GPU's memory

Invariant: a sender holds two messages under way; a receiver holds half a bucket of them, or one that is larger.
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
        """Send the last ``buffer``, to any number of ranks; it becomes free when all have received it.

        A transport that is ``in_place`` also sends other uint8 memory; the caller must not change it until ``flush``.
        """
        ...

    def flush(self) -> None:
        """Wait until everything has left this process."""
        ...

    def release(self) -> None:
        """Free the memory of the buffers until the next update."""
        ...

    def close(self) -> None:
        """Leave the channel."""
        ...


class Receiving:
    """The base of all receiving ends: ``rollout.weight_channel.Incoming`` without ``messages``."""

    def __init__(self, members: Members, bucket_bytes: int) -> None:
        self.members, self.bucket_bytes = members, bucket_bytes

    def begin(self, version: int) -> None:
        """See ``Incoming.begin``."""
        self.members.meet(f"update {version}")

    def messages(self, wanted: Sequence[tuple[int, int]], place: Callable[[int], Tensor]) -> Iterator[Tensor]:
        """See ``Incoming.messages``."""
        raise NotImplementedError

    def finish(self) -> None:
        """See ``Incoming.finish``."""
        self.members.meet("applied")

    def failed(self, error: BaseException, doing: str) -> SyncError:
        """See ``Incoming.failed``."""
        self.close()  # first, so that peers that wait for this member stop
        return self.members.failed(error, doing)

    def close(self) -> None:
        """See ``Incoming.close``."""


class Transport(Protocol):
    """Makes both ends of a channel; a frozen dataclass, so that it can be pickled."""

    @property
    def address(self) -> Address:
        """Where the members of the channel meet."""
        ...

    @property
    def in_place(self) -> bool:
        """Whether it sends from and receives into any memory; else messages go through its own memory."""
        ...

    def outgoing(self, rank: int, device: torch.device) -> Outgoing:
        """The end of a training rank.  Collective over all members."""
        ...

    def incoming(self, bucket_bytes: int, rollout_rank: int) -> Receiving:
        """The end of a rollout rank, inside vLLM's worker.  Collective over all members."""
        ...


AnyTransport = TypeVar("AnyTransport", bound=Transport)


def at_attempt(transport: AnyTransport, attempt: int) -> AnyTransport:
    """The same transport under another name in the store, which no earlier attempt has used."""
    address = replace(transport.address, name=f"{transport.address.name}/{attempt}")
    return replace(transport, address=address)  # type: ignore[type-var]  # every transport is a frozen dataclass


def connector(transport: Transport, bucket_bytes: int) -> Callable[[int], Receiving]:
    """The function for ``Opening.connect``."""
    return partial(transport.incoming, bucket_bytes)
