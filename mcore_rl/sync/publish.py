"""The trainer's end of a weight update: one ``Publisher`` on every training rank.

The plan is made once.  ``publish`` sends this rank's live parameters along it: in messages that are packed into shared
memory, or in rounds with all other members.  ``update`` pauses the engines and calls their workers; ``check`` verifies
their weights afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import msgspec
import torch
from torch import Tensor

from mcore_rl.checkpoints.export import BUCKET_BYTES
from mcore_rl.errors import SyncError
from mcore_rl.parallel.phase import phase
from mcore_rl.rollout.weight_channel import Opening
from mcore_rl.sync.transport import Outgoing, RoundOutgoing, Transport, at_attempt
from mcore_rl.weights.binding import bind
from mcore_rl.weights.fingerprint import fingerprint
from mcore_rl.weights.messages import Message, MessagePart, messages_from, plan_id
from mcore_rl.weights.published import PublishedTensors
from mcore_rl.weights.reshard import ReshardPlan, plan_reshard
from mcore_rl.weights.rollout_table import RolloutTable
from mcore_rl.weights.rounds import Round, Rounds, rounds_id
from mcore_rl.weights.sites import Sites
from mcore_rl.weights.table import Table
from mcore_rl.weights.views import view_of


@dataclass(frozen=True, kw_only=True)
class Published:
    """One rank's statistics of one update.

    num_bytes: of its parameters that it sent, or handed over on its own device.
    seconds: in all; pack_s of them copying into messages, wait_s waiting for the transport (rounds pack by themselves).
    bytes_over_bound: bytes sent over bytes stored, of the whole plan; 1.0 is the minimum.
    """

    version: int
    num_bytes: int
    seconds: float
    pack_s: float
    wait_s: float
    bytes_over_bound: float

    @property
    def gb_per_s(self) -> float:
        """This rank's rate in 1e9 bytes per second."""
        return self.num_bytes / self.seconds / 1e9


class Publisher:
    """Sends the weights of ``chunks``, this training rank's model chunks, to all rollout ranks.

    table, rollout: of one model.  dtype: of vLLM's weights.  bucket_bytes: half of the memory that an update may take
    in any process; see ``message_bytes``.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        table: Table,
        rollout: RolloutTable,
        rank: int,
        transport: Transport,
        *,
        dtype: torch.dtype,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self.table, self.rollout, self.rank = table, rollout, rank
        self.transport, self.dtype, self.bucket_bytes = transport, dtype, bucket_bytes
        self.plan = plan_reshard(table, rollout, dtype.itemsize, transport.sites)
        self.sent, self.rounds = list[Message](), list[Round]()
        if transport.sites is None:
            self.sent = messages_from(self.plan, rank, self.message_bytes)
            self._id = plan_id(self.plan, self.message_bytes)
        else:
            rounds = Rounds(self.plan, self.message_bytes)
            self.rounds, self._id = rounds.of(rank), rounds_id(rounds)
        self.tensors = {(each.local.chunk, each.local.name): each.tensor for each in bind(chunks, table, rank)}
        self._published = PublishedTensors(self.tensors)
        self._outgoing: Outgoing | RoundOutgoing | None = None

    @property
    def message_bytes(self) -> int:
        """The largest size of a message, or of what a rank sends or receives in a round."""
        return message_bytes(self.table, self.bucket_bytes, self.transport.sites)

    def opening(self, first_rank: int = 0, attempt: int = 1) -> bytes:
        """The argument of ``sync_open`` for an engine whose first rank is rollout rank ``first_rank``."""
        transport = at_attempt(self.transport, attempt)
        return opening_of(self.plan, transport, self.dtype, self.bucket_bytes, self._id, first_rank).packed()

    def open(self, attempt: int = 1) -> None:
        """Join the channel.  Call it on every training rank, while every engine gets ``sync_open``.

        attempt: a new number each time, because after a failure the channel must be opened again.
        """
        self.close()
        with phase("open the weight channel"):
            device = next(iter(self.tensors.values())).device
            self._outgoing = at_attempt(self.transport, attempt).outgoing(self.rank, device)

    def close(self) -> None:
        """Leave the channel, if it is open."""
        outgoing, self._outgoing = self._outgoing, None
        if outgoing is not None:
            outgoing.close()

    def publish(self, version: int) -> Published:
        """Send all weights as ``version``; returns when every rollout rank has applied them.

        Call it on every training rank, while every engine gets ``sync_receive(version)``.  Raises SyncError with the
        first cause, on whichever member it was; the channel is then closed.
        """
        assert self._outgoing is not None, "open the channel first"
        begun = time.perf_counter()
        clock = _Clock()
        with phase("publish", version=version):
            outgoing = self._outgoing
            try:
                outgoing.members.meet(f"update {version}")
                self._send(outgoing, clock)
                outgoing.members.meet("applied")
                outgoing.release()
            except BaseException as error:  # report any error to the other members
                self.close()
                raise outgoing.members.failed(error, f"publishing version {version}") from error
            finally:
                self._published.forget()
        stored = int(self.rollout.bytes_stored(self.dtype.itemsize).sum())
        return Published(
            version=version,
            num_bytes=int(self.plan.bytes_sent[self.rank]),
            seconds=time.perf_counter() - begun,
            pack_s=clock.pack_s,
            wait_s=clock.wait_s,
            bytes_over_bound=int(self.plan.bytes_sent.sum()) / stored,
        )

    @torch.no_grad()
    def _send(self, outgoing: Outgoing | RoundOutgoing, clock: _Clock) -> None:
        if self.transport.sites is not None:
            with clock.waiting():
                cast(RoundOutgoing, outgoing).send(self.rounds, self)
            return
        slots = cast(Outgoing, outgoing)
        for message in self.sent:
            with clock.waiting():
                buffer = slots.buffer(message.num_bytes)
            with clock.packing():
                for part in message.parts:
                    space = buffer[part.begin : part.begin + part.num_bytes].view(self.dtype_of(part))
                    space.view(part.target_slice.shape).copy_(self.live(part))
            slots.send(buffer, message.target_rank)
        with clock.waiting():
            slots.flush()

    def live(self, part: MessagePart) -> Tensor:
        """The current elements of ``part``, as a view; merged with their adapters, if they have any."""
        return view_of(self._published[part.chunk, part.source], part.source_slice)

    def dtype_of(self, part: MessagePart) -> torch.dtype:
        """The dtype in which ``part`` is sent."""
        return self.dtype if part.dtype is None else getattr(torch, part.dtype)

    @torch.no_grad()
    def fingerprints(self) -> dict[tuple[int, str, int], int]:
        """(rollout rank, tensor, slot or -1) -> this rank's summand of the tensor's fingerprint."""
        sums: dict[tuple[int, str, int], int] = {}
        dtypes = {tensor.name: tensor.rule.dtype for tensor in self.rollout.tensors(0)}
        for copy in (copy for _, copies in self.plan.copies_from(self.rank) for copy in copies):
            live = view_of(self._published[copy.chunk, copy.source], copy.source_slice)
            name = dtypes[copy.target]
            sent = live.to(self.dtype if name is None else getattr(torch, name))
            key = (copy.target_rank, copy.target, -1 if copy.slot is None else copy.slot)
            sums[key] = sums.get(key, 0) + fingerprint(sent, copy.target_slice.start)
        self._published.forget()
        return sums


class _Clock:
    """Seconds spent packing and waiting."""

    def __init__(self) -> None:
        self.pack_s = self.wait_s = 0.0

    @contextmanager
    def packing(self) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        self.pack_s += time.perf_counter() - begun

    @contextmanager
    def waiting(self) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        self.wait_s += time.perf_counter() - begun


def message_bytes(table: Table, bucket_bytes: int, sites: Sites | None) -> int:
    """The largest size of a message such that no process needs more than two buckets.

    Of messages in shared memory, half a bucket: two messages at a sender, or the messages under way to a receiver.
    Half a bucket: modules that wait to be packed (``rollout/receiver/worker_extension.py``).  Half a bucket: tensors
    under construction; their parts come from up to tp ranks in turn, so a worker writes to as many messages' worth at
    once, and maps two messages of each of these ranks (``sync/slots.py``).  The rest: vLLM's packing of one module.

    Of rounds half a bucket each: one that is packed, and two that are received or handed over.
    """
    return bucket_bytes // (2 if sites is not None else 4 * max(2, table.layout.tp))


def opening_of(
    plan: ReshardPlan, transport: Transport, dtype: torch.dtype, bucket_bytes: int, made: str, first_rank: int = 0
) -> Opening:
    """The opening for the workers of an engine.

    made: the hash of the plan's messages or rounds.  first_rank: the first rollout rank of that engine.
    """
    address, table, rollout = transport.address, plan.table, plan.rollout
    if (address.num_trainers, address.num_rollout) != (table.layout.world_size, rollout.layout.world_size):
        raise SyncError(
            f"The channel is for {address.num_trainers} training and {address.num_rollout} rollout ranks, the plan for "
            f"{table.layout.world_size} and {rollout.layout.world_size}. Make the Address from the layouts"
        )
    return Opening(
        family=table.family.name,
        model=table.model,
        parallel=table.parallel,
        world_size=table.layout.world_size,
        rollout=rollout.layout,
        first_rank=first_rank,
        dtype=str(dtype).removeprefix("torch."),
        message_bytes=message_bytes(table, bucket_bytes, transport.sites),
        sites=transport.sites,
        bucket_bytes=bucket_bytes,
        plan=made,
        transport=transport.name,
        fields=msgspec.Raw(msgspec.json.encode(transport)),
    )
