"""The trainer's end of a weight update: one ``Publisher`` on every training rank.

The plan is made once.  ``publish`` sends this rank's live parameters along it: large parts from their own memory, if
the transport can, and the rest packed into messages, two at a time.  ``update`` pauses the engines and calls their
workers; ``check`` verifies their weights afterwards.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_rl.checkpoints.export import BUCKET_BYTES
from mcore_rl.errors import SyncError
from mcore_rl.parallel.phase import phase
from mcore_rl.rollout.weight_channel import Opening
from mcore_rl.sync.transport import Outgoing, Transport, at_attempt, connector
from mcore_rl.weights.binding import bind
from mcore_rl.weights.fingerprint import fingerprint
from mcore_rl.weights.messages import Message, MessagePart, messages_from, plan_id
from mcore_rl.weights.reshard import ReshardPlan, plan_reshard
from mcore_rl.weights.rollout_table import RolloutTable
from mcore_rl.weights.table import Table
from mcore_rl.weights.views import view_of


@dataclass(frozen=True, kw_only=True)
class Published:
    """One rank's statistics of one update.

    num_bytes: sent by this rank.  seconds: in all; pack_s of them copying into messages, wait_s waiting for the
    transport.  bytes_over_bound: bytes sent over bytes stored, of the whole plan; 1.0 is the minimum.
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
        self.plan = plan_reshard(table, rollout, dtype.itemsize)
        self.sent: list[Message] = messages_from(self.plan, rank, self.message_bytes, transport.in_place)
        self.tensors = {(each.local.chunk, each.local.name): each.tensor for each in bind(chunks, table, rank)}
        self._outgoing: Outgoing | None = None

    @property
    def message_bytes(self) -> int:
        """The largest size of a message."""
        return message_bytes(self.table, self.bucket_bytes, self.transport.in_place)

    def opening(self, first_rank: int = 0, attempt: int = 1) -> bytes:
        """The argument of ``sync_open`` for an engine whose first rank is rollout rank ``first_rank``."""
        transport = at_attempt(self.transport, attempt)
        return pickle.dumps(opening_of(self.plan, transport, self.dtype, self.bucket_bytes, first_rank))

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
                num_bytes = self._send(outgoing, clock)
                with clock.waiting():
                    outgoing.flush()
                outgoing.members.meet("applied")
                outgoing.release()
            except BaseException as error:  # report any error to the other members
                self.close()
                raise outgoing.members.failed(error, f"publishing version {version}") from error
        stored = int(self.rollout.bytes_stored(self.dtype.itemsize).sum())
        return Published(
            version=version,
            num_bytes=num_bytes,
            seconds=time.perf_counter() - begun,
            pack_s=clock.pack_s,
            wait_s=clock.wait_s,
            bytes_over_bound=int(self.plan.bytes_sent.sum()) / stored,
        )

    @torch.no_grad()
    def _send(self, outgoing: Outgoing, clock: _Clock) -> int:
        for message in self.sent:
            outgoing.send(self._filled(message, outgoing, clock), message.target_rank)
        return sum(message.num_bytes for message in self.sent)

    def _filled(self, message: Message, outgoing: Outgoing, clock: _Clock) -> Tensor:
        """The bytes of a message: the parameter's own memory, or packed into a buffer."""
        first, *others = message.parts
        if self.transport.in_place and not others:
            live = self.live(first)
            if live.is_contiguous() and live.dtype == self._dtype_of(first):
                return live.view(-1).view(torch.uint8)
        with clock.waiting():
            buffer = outgoing.buffer(message.num_bytes)
        with clock.packing():
            for part in message.parts:
                space = buffer[part.begin : part.begin + part.num_bytes].view(self._dtype_of(part))
                space.view(part.target_slice.shape).copy_(self.live(part))
        return buffer

    def live(self, part: MessagePart) -> Tensor:
        """The current elements of ``part``, as a view."""
        return view_of(self.tensors[part.chunk, part.source].detach(), part.source_slice)

    def _dtype_of(self, part: MessagePart) -> torch.dtype:
        dtype: torch.dtype = self.dtype if part.dtype is None else getattr(torch, part.dtype)
        return dtype

    @torch.no_grad()
    def fingerprints(self) -> dict[tuple[int, str, int], int]:
        """(rollout rank, tensor, slot or -1) -> this rank's summand of the tensor's fingerprint."""
        sums: dict[tuple[int, str, int], int] = {}
        for message in self.sent:
            for part in message.parts:
                key = (message.target_rank, part.target, -1 if part.slot is None else part.slot)
                value = fingerprint(self.live(part).to(self._dtype_of(part)), part.target_slice.start)
                sums[key] = sums.get(key, 0) + value
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


def message_bytes(table: Table, bucket_bytes: int, in_place: bool) -> int:
    """The largest size of a message such that no process needs more than two buckets.

    Half a bucket: two messages at a sender, or the messages under way to a receiver.  Half a bucket: modules that wait
    to be packed (``rollout/receiver/worker_extension.py``).  Half a bucket: tensors under construction; their parts
    come from up to tp ranks in turn, so a worker writes to as many messages' worth at once.  The rest: vLLM's packing
    of one module.  Without ``in_place`` a worker also maps two messages of each of these ranks (``sync/slots.py``), so
    messages are half as large.
    """
    return bucket_bytes // ((2 if in_place else 4) * max(2, table.layout.tp))


def opening_of(
    plan: ReshardPlan, transport: Transport, dtype: torch.dtype, bucket_bytes: int, first_rank: int = 0
) -> Opening:
    """The opening for the workers of an engine.  first_rank: the first rollout rank of that engine."""
    address, table, rollout = transport.address, plan.table, plan.rollout
    if (address.num_trainers, address.num_rollout) != (table.layout.world_size, rollout.layout.world_size):
        raise SyncError(
            f"The channel is for {address.num_trainers} training and {address.num_rollout} rollout ranks, the plan for "
            f"{table.layout.world_size} and {rollout.layout.world_size}. Make the Address from the layouts"
        )
    most = message_bytes(table, bucket_bytes, transport.in_place)
    return Opening(
        family=table.family.name,
        model=table.model,
        parallel=table.parallel,
        world_size=table.layout.world_size,
        rollout=rollout.layout,
        first_rank=first_rank,
        dtype=str(dtype).removeprefix("torch."),
        message_bytes=most,
        in_place=transport.in_place,
        bucket_bytes=bucket_bytes,
        plan=plan_id(plan, most, transport.in_place),
        connect=connector(transport, bucket_bytes),
    )
