"""The members of an update: they meet at the run's store, and one that fails tells the others why.

Members are the training ranks, then the rollout ranks.  Only a few bytes go through the store, as JSON.  The store
answers nobody without the run's secret (``parallel/secret_store.py``), so a member believes what it reads there.

Invariant: whoever dies, no wait is longer than ``timeout_s`` plus ``GRACE_S``, and the error then names the first cause
as far as the remaining members know it.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec
import psutil

from mcore_rl.ground.errors import SyncError
from mcore_rl.parallel.failure import Cause, Failure, first_cause
from mcore_rl.parallel.secret_store import Prefixed, SecretStore, StoreAccess

POLL_S = 0.002  # between two looks at a process
LOOK_S = 0.5  # between two checks whether others failed or died
GRACE_S = 3.0  # wait for reports of members nearer to the cause


class PeerLostError(ConnectionError):
    """The member that this one waits for is gone, or silent for too long.  peer: its index."""

    def __init__(self, peer: int, message: str) -> None:
        super().__init__(message)
        self.peer = peer


@dataclass(frozen=True, kw_only=True)
class Address:
    """Where the members of one channel meet.

    store: that outlives the channel.  name: unique among the channels of this store.  num_trainers,
    num_rollout: ranks of each.  timeout_s: the longest wait for a member.  join_timeout_s: for all to open the channel.
    """

    store: StoreAccess
    name: str
    num_trainers: int
    num_rollout: int
    timeout_s: float = 20.0
    join_timeout_s: float = 60.0

    @property
    def num_members(self) -> int:
        """Number of training and rollout ranks."""
        return self.num_trainers + self.num_rollout

    def title(self, member: int) -> str:
        """The name of a member in messages."""
        if member < self.num_trainers:
            return f"training rank {member}"
        return f"rollout rank {member - self.num_trainers}"


@dataclass(frozen=True)
class _Note:
    failure: Failure
    doing: str
    lost: int | None


class Members:
    """This process's connection to the other members."""

    def __init__(self, address: Address, member: int) -> None:
        """Connect and register as ``member``.  Does not wait for the others."""
        self.address = address
        self.member = member
        self._shared = SecretStore(address.store, address.timeout_s)
        self.store = Prefixed(address.name, self._shared)
        self._looked = 0.0
        self._people: dict[int, tuple[str, int]] = {}
        self._num_meetings = 0
        self.set(f"member/{member}", msgspec.json.encode((socket.gethostname(), os.getpid())))

    @classmethod
    def joined(cls, address: Address, member: int) -> Members:
        """Connect, and wait until all members have.  Raises SyncError if one does not, or fails."""
        members = cls(address, member)
        try:
            members.meet("the channel", address.join_timeout_s)
        except PeerLostError as error:
            raise members.failed(error, "opening the channel") from error
        return members

    def set(self, key: str, value: bytes) -> None:
        """Store ``value`` under ``key`` for all members."""
        self.store.set(key, value)  # type: ignore[arg-type]  # declared for str, and binds bytes

    def delete(self, key: str) -> None:
        """Delete ``key`` from the store."""
        self.store.delete_key(key)

    def get(self, key: str, peer: int, timeout_s: float | None = None) -> bytes:
        """Wait for the value that ``peer`` stores under ``key``.

        Raises PeerLostError if ``peer`` is gone or silent, or any member failed.
        """
        self._wait(key, lambda: [peer], timeout_s)
        value: bytes = self.store.get(key)
        return value

    def _wait(self, key: str, waited_for: Callable[[], Sequence[int]], timeout_s: float | None) -> None:
        """Wait for ``key``: the store answers when it is there, and else once per ``LOOK_S``, as it serves hundreds."""
        limit = self.address.timeout_s if timeout_s is None else timeout_s
        begun = time.monotonic()
        full_key = f"{self.address.name}/{key}"  # as ``Prefixed`` has it
        while not self._shared.comes([full_key], min(LOOK_S, max(POLL_S, begun + limit - time.monotonic()))):
            waited = time.monotonic() - begun
            if waited > limit or self._looks_again():
                peers = waited_for()
                if not peers:  # all have come, and one was killed before it could say that it was the last
                    return
                try:
                    self.look_around(peers)
                except PeerLostError:
                    if self.store.check([key]):  # it came, and left, since it was asked for
                        return
                    raise
                if waited > limit:
                    message = f"{self.address.title(peers[0])} timed out: nothing came for {limit:g} s"
                    raise PeerLostError(peers[0], message)

    def _looks_again(self) -> bool:
        return time.monotonic() >= self._looked + LOOK_S

    def meet(self, why: str, timeout_s: float | None = None) -> None:
        """Wait until all members have called this, in the same order of calls.  Raises as ``get`` does."""
        self._num_meetings += 1
        place = f"met/{self._num_meetings}"
        size = self.address.num_members

        def missing() -> list[int]:
            return [member for member in range(size) if not self.store.check([f"{place}/{member}"])]

        self.set(f"{place}/{self.member}", why.encode())
        if self.store.add(f"{place}/count", 1) == size:
            self.set(f"{place}/all", b"")
        self._wait(f"{place}/all", missing, timeout_s)
        if self._num_meetings > 1:  # all members have left the earlier meeting
            earlier = f"met/{self._num_meetings - 1}"
            for name in (str(self.member), *(("count", "all") if self.member == 0 else ())):
                self.delete(f"{earlier}/{name}")

    def look_around(self, waited_for: Sequence[int]) -> None:
        """Raise PeerLostError if any member failed, or one of ``waited_for`` is dead; checks once per ``LOOK_S``."""
        if not self._looks_again():
            return
        self._looked = time.monotonic()
        if self.store.check(["failed"]):
            peer = int(self.store.get("failed"))
            raise PeerLostError(peer, f"{self.address.title(peer)} failed, connection closed")
        for peer in waited_for:
            if self._is_dead(peer):
                raise PeerLostError(peer, f"{self.address.title(peer)} is dead, connection closed")

    def dies(self, peer: int) -> bool:
        """Whether a member on this host dies within ``LOOK_S``; polls, as its resources vanish before the process."""
        until = time.monotonic() + LOOK_S
        while not (dead := self._is_dead(peer)) and time.monotonic() < until:
            time.sleep(POLL_S)
        return dead

    def _is_dead(self, peer: int) -> bool:
        """Whether ``peer`` is dead; False for a process on another host, of which this cannot be known."""
        person = self._person(peer)
        if person is None or person[0] != socket.gethostname():
            return False
        try:
            return bool(psutil.Process(person[1]).status() == psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return True

    def _person(self, peer: int) -> tuple[str, int] | None:
        if peer not in self._people and self.store.check([f"member/{peer}"]):
            self._people[peer] = msgspec.json.decode(self.store.get(f"member/{peer}"), type=tuple[str, int])
        return self._people.get(peer)

    def failed(self, error: BaseException, doing: str) -> SyncError:
        """Report ``error`` to the others, wait briefly for their reports, and return the error for all to raise."""
        lost = error.peer if isinstance(error, PeerLostError) else None
        note = _Note(replace(Failure.of_error(self.member, error), traceback="", error=None), doing, lost)
        try:
            self.set(f"failure/{self.member}", msgspec.json.encode(note))
            self.set("failed", str(self.member).encode())
            return SyncError(self._message(self._gather()))
        except Exception:  # noqa: BLE001  # a store that is gone may raise anything
            where = f"{self.address.store.host}:{self.address.store.port}"
            head = f"{self.address.title(self.member)} failed while {doing}: {note.failure.what}"
            remedy = "start one that outlives the run, open a channel and publish"
            return SyncError(f"{head}. The store at {where}, where members meet, does not answer: {remedy}")

    def _gather(self) -> list[_Note]:
        until = time.monotonic() + GRACE_S
        while True:
            members = range(self.address.num_members)
            keys = {member: f"failure/{member}" for member in members}
            told = [self.store.get(key) for key in keys.values() if self.store.check([key])]
            notes = [msgspec.json.decode(note, type=_Note) for note in told]
            reporters = {note.failure.rank for note in notes}
            explained = any(note.failure.cause is Cause.own for note in notes)
            silent = {note.lost for note in notes} | {member for member in members if self._is_dead(member)}
            if explained or reporters | silent >= set(members) or time.monotonic() > until:
                return notes
            time.sleep(20 * POLL_S)

    def _message(self, notes: Sequence[_Note]) -> str:
        notes_by_member = {note.failure.rank: note for note in notes}
        explained = any(note.failure.cause is Cause.own for note in notes)
        silent = [note for note in notes if note.lost is not None and note.lost not in notes_by_member]
        if explained or not silent:
            first = first_cause([note.failure for note in notes])
            head = f"{self._named(first.rank)} failed while {notes_by_member[first.rank].doing}: {first.what}"
        else:
            note = min(silent, key=lambda note: note.failure.time_s)
            others = [member for member in range(self.address.num_members) if member not in notes_by_member]
            gone = [member for member in others if member == note.lost or self._is_dead(member)]
            names = " and ".join(map(self._named, gone))  # an engine ends all of its ranks when one dies
            head = f"{names} {'is' if len(gone) == 1 else 'are'} gone, killed or stuck, while others were {note.doing}"
            head += f" ({self._named(note.failure.rank)} says: {note.failure.what.splitlines()[0]})"
        return f"{head}. The rollout ranks hold no complete weights: restart what failed, open a channel and publish"

    def _named(self, member: int) -> str:
        person = self._person(member)
        return self.address.title(member) + (f" (process {person[1]} on {person[0]})" if person else "")
