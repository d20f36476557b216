"""The interface of transports: from training ranks to rollout ranks, in an order that both sides know.

A transport moves bytes.  The plan decides their content and order; ``members`` decides who takes part, and handles
failures.  There are two:

shared_memory   one host, no accelerator: both sides map the same memory (``weights/messages.py``)
routed          all others: by rounds, to the device of a rollout rank and then inside it (``weights/rounds.py``)

Invariant: a sender holds two messages under way; a receiver maps half a bucket of them, or one that is larger.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar, Protocol, TypeVar

import torch
from torch import Tensor

from mcore_rl.ground.errors import SyncError
from mcore_rl.sync.members import Address, Members
from mcore_rl.weights.messages import MessagePart
from mcore_rl.weights.rounds import Round
from mcore_rl.weights.sites import Sites


class SendingEnd(Protocol):
    """What the sending end of a training rank is, whatever it sends."""

    members: Members

    def release(self) -> None:
        """Free the memory of the buffers until the next update."""
        ...

    def close(self) -> None:
        """Leave the channel."""
        ...


class Outgoing(SendingEnd, Protocol):
    """The sending end of messages."""

    def buffer(self, num_bytes: int) -> Tensor:
        """Uint8 [num_bytes] to fill for the next message; waits until one of two is free."""
        ...

    def send(self, message: Tensor, rollout_rank: int) -> None:
        """Send the last ``buffer``, to any number of ranks; it becomes free when all have received it."""
        ...

    def flush(self) -> None:
        """Wait until everything has left this process."""
        ...


class Parameters(Protocol):
    """The parameters of a training rank, as its parts are asked for."""

    def live(self, part: MessagePart) -> Tensor:
        """The elements of ``part`` now, as a view."""
        ...

    def dtype_of(self, part: MessagePart) -> torch.dtype:
        """The dtype in which ``part`` is sent."""
        ...


class RoundOutgoing(SendingEnd, Protocol):
    """The sending end where updates go in rounds."""

    def send(self, rounds: Sequence[Round], parameters: Parameters) -> None:
        """Take part in ``rounds``; return when everything has left this process."""
        ...


class Receiving:
    """The base of all receiving ends: ``rollout.weight_channel.Incoming`` without ``messages``."""

    def __init__(self, members: Members, bucket_bytes: int) -> None:
        self.members = members
        self.bucket_bytes = bucket_bytes

    def begin(self, version: int) -> None:
        """See ``Incoming.begin``."""
        self.members.meet(f"update {version}")

    def messages(self, wanted: Sequence[tuple[int, int]], rounds: Sequence[Round] = ()) -> Iterator[Tensor]:
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
    """Makes both ends of a channel; a frozen dataclass of plain fields, so that it can be sent as JSON.

    name: by which ``sync.receiver`` knows it.
    """

    name: ClassVar[str]

    @property
    def address(self) -> Address:
        """Where the members of the channel meet."""
        ...

    @property
    def sites(self) -> Sites | None:
        """Where the ranks are; None: it sends messages, and no rounds."""
        ...

    def outgoing(self, rank: int, device: torch.device) -> Outgoing | RoundOutgoing:
        """The end of a training rank: one for rounds if it has ``sites``.  Collective over all members."""
        ...

    def incoming(self, bucket_bytes: int, rollout_rank: int) -> Receiving:
        """The end of a rollout rank, inside vLLM's worker.  Collective over all members."""
        ...


AnyTransport = TypeVar("AnyTransport", bound=Transport)


def at_attempt(transport: AnyTransport, attempt: int) -> AnyTransport:
    """The same transport under another name in the store, which no earlier attempt has used."""
    address = replace(transport.address, name=f"{transport.address.name}/{attempt}")
    return replace(transport, address=address)  # type: ignore[type-var]  # every transport is a frozen dataclass
