"""What a receiver keeps mapped of the memory of many senders, over a real store and real shared memory."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import weakref

import pytest
from torch import Tensor

from mcore_rl.parallel.secret_store import StoreServer
from mcore_rl.sync.members import Address, Members, PeerLostError
from mcore_rl.sync.shared_memory import NAME, MappedMemory
from mcore_rl.sync.slots import NUM_SLOTS, SlotReceiving, SlotSender

MESSAGE, SENDERS = 1 << 12, 5


class Counted:
    """How many were mapped, and at most at once."""

    def __init__(self, scarce: bool = False) -> None:
        self.scarce = scarce
        self._memory, self._alive, self.maps, self.most = MappedMemory(), weakref.WeakSet[Tensor](), 0, 0

    def map(self, handle: bytes) -> Tensor:
        mapped = self._memory.map(handle)
        self._alive.add(mapped)
        self.maps, self.most = self.maps + 1, max(self.most, len(self._alive))
        return mapped

    def settle(self) -> None: ...


def mapped_here() -> int:
    """Descriptors and maps of weights that this process has."""
    with open("/proc/self/maps") as file:
        maps = sum(NAME in line for line in file)
    with os.scandir("/proc/self/fd") as entries:
        return maps + sum(NAME in os.readlink(entry.path) for entry in entries if os.path.lexists(entry.path))


def test_no_more_than_half_a_bucket_stays_mapped() -> None:
    store = StoreServer("127.0.0.1")
    address = Address(store=store.access, name="slots", num_trainers=SENDERS, num_rollout=1)
    senders = [SlotSender(Members(address, rank), MappedMemory()) for rank in range(SENDERS)]
    memory = Counted()
    receiver = SlotReceiving(Members(address, SENDERS), memory, bucket_bytes=8 * MESSAGE)  # type: ignore[arg-type]
    order = [(number, rank) for number in range(NUM_SLOTS) for rank in range(SENDERS)]
    for number, rank in order:  # a slot of its own for each, so that nobody waits
        senders[rank].send(senders[rank].buffer(MESSAGE).fill_(10 * rank + number), 0)
    wanted = [(rank, MESSAGE) for _, rank in order]
    read = [int(message[0]) for message in receiver.messages(wanted)]
    assert read == [10 * rank + number for number, rank in order]
    assert memory.maps == len(order)
    assert memory.most == 5, "half a bucket, and the one that is read next"
    assert mapped_here()
    for sender in senders:
        sender.close()
    del memory, receiver, sender, senders
    gc.collect()
    assert mapped_here() == 0


class Scarce(MappedMemory):
    scarce = True


@pytest.mark.parametrize("scarce", [False, True])
def test_between_updates_memory_stays_unless_it_is_scarce(scarce: bool) -> None:
    store = StoreServer("127.0.0.1")
    address = Address(store=store.access, name="kept", num_trainers=1, num_rollout=1)
    sender = SlotSender(Members(address, 0), Scarce() if scarce else MappedMemory())
    memory = Counted(scarce)
    receiver = SlotReceiving(Members(address, 1), memory, bucket_bytes=8 * MESSAGE)  # type: ignore[arg-type]
    before, wanted = mapped_here(), [(0, MESSAGE)] * NUM_SLOTS
    for update in (1, 2, 3):
        for number in range(NUM_SLOTS):
            sender.send(sender.buffer(MESSAGE).fill_(10 * update + number), 0)
        read = [int(message[0]) for message in receiver.messages(wanted)]
        assert read == [10 * update + number for number in range(NUM_SLOTS)]
        sender.flush()
        sender.release()
        gc.collect()
        assert (mapped_here() == before) is scarce
    assert memory.maps == (3 if scarce else 1) * NUM_SLOTS
    receiver.close()
    sender.close()
    gc.collect()
    assert mapped_here() == before


def test_memory_that_took_another_s_descriptor_is_not_taken_for_it() -> None:
    """A descriptor that was closed is the next one's, of the same size maybe."""
    memory = MappedMemory()
    handles = []
    for _ in range(2):
        handles.append(memory.create(MESSAGE)[1])
        memory.forget(handles[-1])
    descriptors = {handle.split()[2] for handle in handles}
    assert len(descriptors) == 1, "else nothing is proven here"
    assert handles[0] != handles[1]


def send_and_die(address: Address) -> None:
    sender = SlotSender(Members(address, 0), MappedMemory())
    sender.send(sender.buffer(MESSAGE).fill_(1), 0)
    os.kill(os.getpid(), signal.SIGKILL)


def test_memory_of_a_dead_sender_is_the_sender_s_failure(processes: None) -> None:
    """It had said where its message lies; its memory went with it, before anybody mapped that."""
    store = StoreServer("127.0.0.1")
    address = Address(store=store.access, name="dead", num_trainers=1, num_rollout=1)
    receiver = SlotReceiving(Members(address, 1), MappedMemory(), bucket_bytes=8 * MESSAGE)
    sender = multiprocessing.get_context("spawn").Process(target=send_and_die, args=(address,))
    sender.start()
    sender.join()
    with pytest.raises(PeerLostError, match="training rank 0 is dead, and its memory gone"):
        next(receiver.messages([(0, MESSAGE)]))


def test_memory_that_cannot_be_mapped_while_its_owner_lives_is_our_failure() -> None:
    store = StoreServer("127.0.0.1")
    address = Address(store=store.access, name="alive", num_trainers=1, num_rollout=1)
    sender = SlotSender(Members(address, 0), MappedMemory())
    receiver = SlotReceiving(Members(address, 1), MappedMemory(), bucket_bytes=8 * MESSAGE)
    sender.send(sender.buffer(MESSAGE), 0)
    sender.close()
    with pytest.raises(RuntimeError, match="unable to open file"):
        next(receiver.messages([(0, MESSAGE)]))
