"""Stage one of the routed weight path: one leg of a round, all its transfers at once, in a group of its own.

The group joins processes that already have default groups (Megatron's, vLLM's), and leaves these alone.  With the
vendor's library (NCCL, RCCL) a leg is one call of it, through the group's one communicator; sends that are not batched
would make a communicator for every pair of ranks.  Gloo sends and receives one by one, and only host memory: it would
read a device's address as if it were its own.

A killed peer closes its connections, so gloo's waits end at once; with a silent peer they end after
``Address.timeout_s``.  The vendor's waits are polled, and end where any member reports a failure.  A member that fails
leaves, which ends the waits of its own peers.  A process outlives all that: no watchdog looks at this group.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import GroupName

from mcore_rl.errors import SyncError
from mcore_rl.parallel.device_details import UNWATCHED
from mcore_rl.parallel.failure import PEER_IS_GONE
from mcore_rl.parallel.launch import inherited_environment
from mcore_rl.parallel.meeting import listen_towards
from mcore_rl.sync.members import Members, PeerLostError

POLL_S = 0.0002
GLOO = "gloo"


@dataclass(frozen=True)
class Transfer:
    """``data``, uint8, to or from member ``peer``."""

    peer: int
    data: Tensor


class Exchange:
    """The group of the first ``size`` members.  Making it is collective over them.

    backend: ``Platform.backend``.  device: of the memory that is sent and received.
    """

    def __init__(self, members: Members, size: int, backend: str, device: torch.device) -> None:
        self.members, self.backend, self.device = members, backend, device
        self._sent = torch.empty(0, dtype=torch.uint8)
        self._group: dist.ProcessGroup | None = self._join(size)
        if backend != GLOO:  # a batch in which not all take part may not be a communicator's first call
            first = self._group.allreduce([torch.zeros(1, device=device)])
            try:
                self.wait([(int(members.member == 0), first)])  # of all others one
            except BaseException:
                self.close()
                raise

    def _join(self, size: int) -> dist.ProcessGroup:
        members = self.members
        # First, because connecting cannot check for failed members and would wait for one that never comes.
        members.meet("the channel", members.address.join_timeout_s)
        listen_towards(members.address.store.host)
        with inherited_environment(UNWATCHED):  # the group reads it while it is made
            group, _ = distributed_c10d._new_process_group_helper(
                size,
                members.member,
                [],
                self.backend,
                members.store,
                group_name=GroupName(f"sync_{members.address.name}"),
                timeout=timedelta(seconds=members.address.timeout_s),
            )
        assert isinstance(group, dist.ProcessGroup)
        return group

    def start(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> list[tuple[int, Any]]:
        """Begins all transfers; returns (peer, work) for ``wait``.  The memory must stay as it is until then.

        SyncError: gloo was given memory of an accelerator.
        """
        assert self._group is not None, "the channel is closed"
        group = self._group
        if not sends and not receives:
            return []
        self._refuse_foreign_memory([*sends, *receives])
        if self.backend == GLOO:
            return [
                *((each.peer, self._posted(group.recv, each)) for each in receives),
                *((each.peer, self._posted(group.send, each)) for each in sends),
            ]
        group._start_coalescing(self.device)
        for each in receives:
            group.recv([each.data], each.peer, 0)
        for each in sends:
            group.send([each.data], each.peer, 0)
        return [((sends or receives)[0].peer, group._end_coalescing(self.device))]

    def _refuse_foreign_memory(self, transfers: Sequence[Transfer]) -> None:
        for each in transfers:
            if self.backend == GLOO and each.data.device.type != "cpu":
                raise SyncError(
                    f"gloo cannot read {each.data.device}'s memory, and would end the process. "
                    "Give the vendor's backend, Platform.backend, for an accelerator"
                )

    def _posted(self, post: Any, transfer: Transfer) -> Any:
        try:
            return post([transfer.data], transfer.peer, 0)
        except RuntimeError as error:
            raise self._lost(transfer.peer, error) from error

    def wait(self, works: Sequence[tuple[int, Any]]) -> None:
        """Returns when the transfers of ``start`` are done; on an accelerator, when its queue may use what came."""
        for peer, work in works:
            try:
                if self.backend != GLOO:
                    self._poll(peer, work)
                work.wait(timedelta(seconds=self.members.address.timeout_s))
            except RuntimeError as error:
                if any(gone in str(error).lower() for gone in PEER_IS_GONE):
                    raise self._lost(peer, error) from error
                raise

    def _poll(self, peer: int, work: Any) -> None:
        """Waits on the host, so that a failure elsewhere, which the library never notices, ends it."""
        until = time.monotonic() + self.members.address.timeout_s
        while not work.is_completed():
            self.members.look_around([])
            if time.monotonic() > until:
                limit = self.members.address.timeout_s
                raise PeerLostError(peer, f"a batch of transfers timed out: it was not done after {limit:g} s")
            time.sleep(POLL_S)

    def _lost(self, peer: int, error: BaseException) -> PeerLostError:
        return PeerLostError(peer, f"{self.members.address.title(peer)}: {error}")

    def close(self) -> None:
        """Leaves the group; transfers under way end with an error."""
        group, self._group = self._group, None
        if group is None:
            return
        for kept in (distributed_c10d._world.pg_map, distributed_c10d._world.pg_names):
            kept.pop(group, None)
        torch._C._distributed_c10d._unregister_process_group(group.group_name)
        if self.backend == GLOO:
            group.shutdown()
        else:
            group.abort()  # shutdown would wait for transfers whose peers are gone
