"""Point to point through ``torch.distributed``, in a group of its own: gloo on CPU, the vendor's library between GPUs.

The group joins processes that already have default groups (Megatron's, vLLM's), and leaves these alone.  A killed peer
closes its connections, so gloo's waits end at once; with a silent peer they end after ``Address.timeout_s``.  A member
that fails leaves, which ends the waits of its own peers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import GroupName

from mcore_rl.parallel.failure import PEER_IS_GONE
from mcore_rl.sync.members import Address, Members, PeerLostError
from mcore_rl.sync.transport import Receiving

NUM_BUFFERS = 2


@dataclass(frozen=True, kw_only=True)
class ProcessGroupTransport:
    """``Transport`` through ``torch.distributed``.  backend: ``Platform.backend``, the same on both sides."""

    address: Address
    backend: str
    in_place: ClassVar[bool] = True

    def outgoing(self, rank: int, device: torch.device) -> PointToPoint:
        """The sending end; see ``Transport``."""
        members = Members.joined(self.address, rank)
        return PointToPoint(members, _join(self, members), device)

    def incoming(self, bucket_bytes: int, rollout_rank: int) -> PointToPointReceiving:
        """The receiving end; see ``Transport``."""
        members = Members.joined(self.address, self.address.num_trainers + rollout_rank)
        return PointToPointReceiving(members, _join(self, members), bucket_bytes)


def _join(transport: ProcessGroupTransport, members: Members) -> dist.ProcessGroup:
    members.meet(
        "the channel", transport.address.join_timeout_s
    )  # first, because connecting cannot check for failed members and would wait for one that never comes
    group, _ = distributed_c10d._new_process_group_helper(
        transport.address.num_members,
        members.member,
        [],
        transport.backend,
        members.store,
        group_name=GroupName(f"sync_{transport.address.name}"),
        timeout=timedelta(seconds=transport.address.timeout_s),
    )
    assert isinstance(group, dist.ProcessGroup)
    return group


def _leave(group: dist.ProcessGroup | None) -> None:
    if group is not None:
        for kept in (distributed_c10d._world.pg_map, distributed_c10d._world.pg_names):
            kept.pop(group, None)
        torch._C._distributed_c10d._unregister_process_group(group.group_name)
        group.shutdown()


def _wait(works: Sequence[Any], peer: int, members: Members) -> None:
    """Wait for transfers to or from ``peer``."""
    try:
        for work in works:
            work.wait(timedelta(seconds=members.address.timeout_s))
    except RuntimeError as error:
        words = str(error).lower()
        if any(gone in words for gone in PEER_IS_GONE):
            raise PeerLostError(peer, f"{members.address.title(peer)}: {error}") from error
        raise


class PointToPoint:
    """``Outgoing`` with two buffers and asynchronous sends."""

    def __init__(self, members: Members, group: dist.ProcessGroup, device: torch.device) -> None:
        self.members, self.device = members, device
        self._group: dist.ProcessGroup | None = group
        self._memory = [torch.empty(0, dtype=torch.uint8, device=device) for _ in range(NUM_BUFFERS)]
        self._works: list[list[tuple[int, Any]]] = [[] for _ in range(NUM_BUFFERS)]
        self._next = 0

    def buffer(self, num_bytes: int) -> Tensor:
        """See ``Outgoing.buffer``."""
        self._next = (self._next + 1) % NUM_BUFFERS
        self._free(self._next)
        if len(self._memory[self._next]) < num_bytes:
            self._memory[self._next] = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        return self._memory[self._next][:num_bytes]

    def send(self, message: Tensor, rollout_rank: int) -> None:
        """See ``Outgoing.send``."""
        assert self._group is not None, "the channel is closed"
        peer = self.members.address.num_trainers + rollout_rank
        try:
            work = self._group.send([message], peer, 0)
        except RuntimeError as error:
            raise PeerLostError(peer, f"{self.members.address.title(peer)}: {error}") from error
        self._works[self._next].append((peer, work))

    def flush(self) -> None:
        """See ``Outgoing.flush``."""
        for index in range(NUM_BUFFERS):
            self._free(index)

    def _free(self, index: int) -> None:
        for peer, work in self._works[index]:
            _wait([work], peer, self.members)
        self._works[index] = []

    def release(self) -> None:
        """Give the buffers' memory back until the next update."""
        self._memory = [torch.empty(0, dtype=torch.uint8, device=self.device) for _ in range(NUM_BUFFERS)]

    def close(self) -> None:
        """See ``Outgoing.close``."""
        group, self._group = self._group, None
        _leave(group)
        self._works = [[] for _ in range(NUM_BUFFERS)]


class PointToPointReceiving(Receiving):
    """``Incoming`` that receives the next messages while the caller unpacks one."""

    def __init__(self, members: Members, group: dist.ProcessGroup, bucket_bytes: int) -> None:
        super().__init__(members, bucket_bytes)
        self._group: dist.ProcessGroup | None = group

    def messages(self, wanted: Sequence[tuple[int, int]], place: Callable[[int], Tensor]) -> Iterator[Tensor]:
        """See ``Incoming.messages``."""
        room = max([self.bucket_bytes // 2, *(size for _, size in wanted)])  # bytes that may be under way
        coming = deque[tuple[Tensor, Any]]()
        posted = 0
        for source, size in wanted:
            while posted < len(wanted) and wanted[posted][1] <= room:
                room -= wanted[posted][1]
                message = place(posted)
                coming.append((message, self._receive(message, wanted[posted][0])))
                posted += 1
            message, work = coming.popleft()
            _wait([work], source, self.members)
            yield message
            room += size

    def _receive(self, message: Tensor, source: int) -> Any:
        assert self._group is not None, "the channel is closed"
        try:
            return self._group.recv([message], source, 0)
        except RuntimeError as error:
            raise PeerLostError(source, f"{self.members.address.title(source)}: {error}") from error

    def close(self) -> None:
        """See ``Incoming.close``."""
        group, self._group = self._group, None
        _leave(group)
