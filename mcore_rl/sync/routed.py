"""The transport for ranks whose sites are known: in rounds, over the vendor's library and then on each device.

Colocated: the training ranks exchange what their devices' rollout ranks want (stage one), and hand it over there (stage
two).  Separate: training and rollout ranks exchange it themselves, and there is no second stage.  On a CPU both are the
same, with gloo and memory of the host.

A round has two legs.  ``Exchange`` makes all transfers of a leg at once, in a group of its own, which joins processes
that already have default groups (Megatron's, vLLM's), and leaves these alone.  With the vendor's library (NCCL, RCCL) a
leg is one call of it, through the group's one communicator; sends that are not batched would make a communicator for
every pair of ranks.  Gloo sends and receives one by one, and only host memory: it would read a device's address as if
it were its own.

A killed peer closes its connections, so gloo's waits end at once; with a silent peer they end after
``Address.timeout_s``.  The vendor's waits are polled, and end where any member reports a failure.  A member that fails
leaves, which ends the waits of its own peers.  A process outlives all that: no watchdog looks at this group.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import GroupName

from mcore_rl.ground.errors import SyncError
from mcore_rl.parallel.device import Platform
from mcore_rl.parallel.device_details import UNWATCHED
from mcore_rl.parallel.failure import PEER_IS_GONE
from mcore_rl.parallel.launch import inherited_environment
from mcore_rl.parallel.meeting import listen_towards
from mcore_rl.sync.device_handle import DeviceMemory
from mcore_rl.sync.members import Address, Members, PeerLostError
from mcore_rl.sync.shared_memory import MappedMemory
from mcore_rl.sync.slots import SlotMemory, SlotReceiving, SlotSender
from mcore_rl.sync.transport import Parameters, Receiving
from mcore_rl.weights.rounds import Block, Round, aligned
from mcore_rl.weights.sites import DIRECT, Sites

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
        self.members = members
        self.backend = backend
        self.device = device
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
        group = self._group
        self._group = None
        if group is None:
            return
        for kept in (distributed_c10d._world.pg_map, distributed_c10d._world.pg_names):
            kept.pop(group, None)
        torch._C._distributed_c10d._unregister_process_group(group.group_name)
        if self.backend == GLOO:
            group.shutdown()
        else:
            group.abort()  # shutdown would wait for transfers whose peers are gone


NUM_MESSAGES = 2  # of a rollout rank that receives for itself: one is written to its model, one is on its way


@dataclass(frozen=True, kw_only=True)
class RoutedTransport:
    """``Transport`` in rounds.  sites: of all ranks; whether they have hosts decides between the two ways above."""

    address: Address
    platform: Platform
    sites: Sites
    name: ClassVar[str] = "routed"

    def outgoing(self, rank: int, device: torch.device) -> RoutedSender:
        """The sending end of a training rank."""
        members = Members.joined(self.address, rank)
        exchange = Exchange(members, self.sites.members, self.platform.backend, device)
        served = [number for number, host in enumerate(self.sites.hosts) if host == rank]
        memory = self._memory(device)
        return RoutedSender(members, exchange, {number: SlotSender(members, memory) for number in served})

    def incoming(self, bucket_bytes: int, rollout_rank: int) -> Receiving:
        """The receiving end of a rollout rank."""
        device = torch.device(self.platform.device_type)
        member = self.address.num_trainers + rollout_rank
        members = Members.joined(self.address, member)
        if self.sites.hosts:
            members.meet("the channel", self.address.join_timeout_s)  # as ``Exchange`` does
            return SlotReceiving(members, self._memory(device), bucket_bytes)
        exchange = Exchange(members, self.sites.members, self.platform.backend, device)
        return RoundReceiving(members, exchange, bucket_bytes)

    def _memory(self, device: torch.device) -> SlotMemory:
        return DeviceMemory(self.platform, device) if self.platform.is_accelerator else MappedMemory()


class RoutedSender:
    """A training rank's end.  hand_over: a sender for each rollout rank on its device."""

    def __init__(self, members: Members, exchange: Exchange, hand_over: dict[int, SlotSender]) -> None:
        self.members = members
        self._exchange = exchange
        self._hand_over = hand_over

    def send(self, rounds: Sequence[Round], parameters: Parameters) -> None:
        """Take part in all ``rounds``; hand their messages over; return when everything has left this process."""
        trip = RoundTrip(self._exchange, self.members.member, parameters)
        for messages in trip.messages(rounds, self._space, ahead=False):
            for rollout_rank, message in messages.items():
                self._hand_over[rollout_rank].send(message, rollout_rank)
        for sender in self._hand_over.values():
            sender.flush()

    def _space(self, rollout_rank: int, num_bytes: int) -> Tensor:
        return self._hand_over[rollout_rank].buffer(num_bytes)

    def release(self) -> None:
        """Free the memory until the next update."""
        for sender in self._hand_over.values():
            sender.release()

    def close(self) -> None:
        """Leave the channel."""
        self._exchange.close()
        for sender in self._hand_over.values():
            sender.close()


class RoundReceiving(Receiving):
    """The end of a rollout rank that receives for itself."""

    def __init__(self, members: Members, exchange: Exchange, bucket_bytes: int) -> None:
        super().__init__(members, bucket_bytes)
        self._exchange = exchange

    def messages(self, wanted: Sequence[tuple[int, int]], rounds: Sequence[Round] = ()) -> Iterator[Tensor]:
        """See ``Incoming.messages``."""
        me = self.members.member - self.members.address.num_trainers
        device = self._exchange.device
        spaces = [torch.empty(0, dtype=torch.uint8, device=device) for _ in range(NUM_MESSAGES)]
        number = 0

        def space(_: int, num_bytes: int) -> Tensor:
            nonlocal number
            number = (number + 1) % NUM_MESSAGES
            if len(spaces[number]) < num_bytes:
                spaces[number] = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            return spaces[number][:num_bytes]

        trip = RoundTrip(self._exchange, self.members.member, None)
        for messages in trip.messages(rounds, space, ahead=True):
            if me in messages:
                yield messages[me]

    def close(self) -> None:
        """See ``Incoming.close``."""
        self._exchange.close()


class RoundTrip:
    """Takes ``member`` through the rounds of one update; what it sends is packed into a buffer that goes with it.

    parameters: None for a rollout rank, which sends only what it received.
    """

    def __init__(self, exchange: Exchange, member: int, parameters: Parameters | None) -> None:
        self._exchange = exchange
        self._member = member
        self._parameters = parameters
        self._packed = self._empty()

    def _empty(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self._exchange.device)

    def messages(
        self, rounds: Sequence[Round], space: Callable[[int, int], Tensor], *, ahead: bool
    ) -> Iterator[dict[int, Tensor]]:
        """Yields the messages of each round, by rollout rank, uint8, when they are whole.

        space: gives the memory for a message (rollout rank, bytes), which may be used again two rounds later.
        ahead: the first leg of the next round is under way meanwhile.
        """
        whole: dict[int, Tensor] | None = None
        for each in rounds:
            messages = {rank: space(rank, num_bytes) for rank, num_bytes in each.lands.items()}
            works = self._leg(each.legs[0], messages)
            if whole is not None:
                yield whole
            self._exchange.wait(works)
            self._exchange.wait(self._leg(each.legs[1], messages))
            whole = messages
            if not ahead:
                yield whole
                whole = None
        if whole is not None:
            yield whole

    @torch.no_grad()
    def _leg(self, blocks: Sequence[Block], messages: dict[int, Tensor]) -> list[tuple[int, Any]]:
        """Copies what stays here, packs what is sent, and begins all transfers of a leg."""
        sends = list[Transfer]()
        receives = list[Transfer]()
        used = 0
        leaving = [block for block in blocks if block.sender == self._member != block.receiver]
        self._make_room(sum(aligned(block.num_bytes) for block in leaving))
        for block in blocks:
            if block.receiver == self._member:
                place = messages[block.rollout_rank][block.begin : block.begin + block.num_bytes]
                if block.sender == self._member:
                    self._pack(block, messages, place)
                else:
                    receives.append(Transfer(block.sender, place))
                continue
            data = self._whole(block, messages)
            if data is None:
                data = self._packed[used : used + block.num_bytes]
                used += aligned(block.num_bytes)
                self._pack(block, messages, data)
            sends.append(Transfer(block.receiver, data))
        return self._exchange.start(sends, receives)

    def _make_room(self, num_bytes: int) -> None:
        if len(self._packed) < num_bytes:
            self._packed = self._empty()  # first, so that both are never there at once
            self._packed = torch.empty(num_bytes, dtype=torch.uint8, device=self._exchange.device)

    def _whole(self, block: Block, messages: dict[int, Tensor]) -> Tensor | None:
        """The bytes of ``block`` where they lie, if they lie there as they are sent; else None."""
        if block.relay != DIRECT:
            shifts = {at - part.begin for at, part in zip(block.copied_from, block.parts, strict=True)}
            if len(shifts) > 1:
                return None
            (begin,) = shifts
            held = messages[block.relay]
            return held[begin : begin + block.num_bytes]
        if len(block.parts) > 1:
            return None
        assert self._parameters is not None, "a rollout rank has no parameters to send"
        (part,) = block.parts
        live = self._parameters.live(part)
        if live.is_contiguous() and live.dtype == self._parameters.dtype_of(part):
            return live.view(-1).view(torch.uint8)
        return None

    def _pack(self, block: Block, messages: dict[int, Tensor], into: Tensor) -> None:
        for number, part in enumerate(block.parts):
            space = into[part.begin : part.begin + part.num_bytes]
            if block.relay == DIRECT:
                assert self._parameters is not None, "a rollout rank has no parameters to send"
                space = space.view(self._parameters.dtype_of(part)).view(part.target_slice.shape)
                space.copy_(self._parameters.live(part))
            else:
                begin = block.copied_from[number]
                space.copy_(messages[block.relay][begin : begin + part.num_bytes])
