"""The transport for ranks whose sites are known: in rounds, over the vendor's library and then on each device.

Colocated: the training ranks exchange what their devices' rollout ranks want (stage one), and hand it over there (stage
two).  Separate: training and rollout ranks exchange it themselves, and there is no second stage.  On a CPU both are the
same, with gloo and memory of the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mcore_rl.parallel.device import Platform
from mcore_rl.sync.device_handle import DeviceMemory
from mcore_rl.sync.exchange import Exchange
from mcore_rl.sync.members import Address, Members
from mcore_rl.sync.round_trip import RoundTrip
from mcore_rl.sync.shared_memory import MappedMemory
from mcore_rl.sync.slots import SlotMemory, SlotReceiving, SlotSender
from mcore_rl.sync.transport import Parameters, Receiving
from mcore_rl.weights.rounds import Round
from mcore_rl.weights.sites import Sites

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
        self.members, self._exchange, self._hand_over = members, exchange, hand_over

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
        me, device = self.members.member - self.members.address.num_trainers, self._exchange.device
        spaces, number = [torch.empty(0, dtype=torch.uint8, device=device) for _ in range(NUM_MESSAGES)], 0

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
