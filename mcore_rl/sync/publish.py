"""The trainer's end of a weight update: one ``Publisher`` on every training rank.

``PlannedSend`` is what a rank sends of one table: the weights themselves, or the adapters beside them.  Its plan is
made once, in messages that are packed into shared memory, or in rounds with all other members; ``publish`` sends this
rank's live parameters along it.  ``update`` pauses the engines and calls their workers; ``check`` verifies their
weights afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import cast

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from mcore_rl.checkpoints.export import BUCKET_BYTES
from mcore_rl.config.rollout import Quantization
from mcore_rl.ground.errors import SyncError
from mcore_rl.parallel.phase import phase
from mcore_rl.rollout.weight_channel import Opening, SentAdapters
from mcore_rl.sync.transport import Outgoing, RoundOutgoing, Transport, at_attempt
from mcore_rl.weights.adapter_table import AdapterTable
from mcore_rl.weights.binding import bind
from mcore_rl.weights.fingerprint import fingerprint
from mcore_rl.weights.messages import Message, MessagePart, messages_from, plan_id
from mcore_rl.weights.published import PublishedTensors, PublishedView, ScaledAdapters, StoredKey, StoredTensors
from mcore_rl.weights.quantised import SCALES, QuantisedMatrix
from mcore_rl.weights.quantised_shards import is_quantised
from mcore_rl.weights.reshard import Copy, plan_reshard
from mcore_rl.weights.rollout_adapters import RolloutAdapterTable
from mcore_rl.weights.rollout_table import RolloutTable, RolloutTensor
from mcore_rl.weights.rounds import Round, Rounds, rounds_id
from mcore_rl.weights.sites import Sites
from mcore_rl.weights.table import Table
from mcore_rl.weights.views import view_of


class PlannedSend:
    """The tensors of ``table`` that training rank ``rank`` sends to the ranks of ``rollout``.

    tensors: its live ones.  published: what is sent of them.  sites: of the transport.  dtype: of vLLM's tensors.
    quantization: in which the rollout ranks hold what they are sent.
    message_bytes: the largest size of a message, or of what a rank sends or receives in a round.
    """

    def __init__(
        self,
        table: Table,
        rollout: RolloutTable,
        rank: int,
        tensors: dict[StoredKey, Tensor],
        published: PublishedView,
        sites: Sites | None,
        *,
        dtype: torch.dtype,
        message_bytes: int,
        quantization: Quantization = Quantization.none,
    ) -> None:
        self.quantization = quantization
        self.table = table
        self.rollout = rollout
        self.rank = rank
        self.dtype = dtype
        self.tensors = tensors
        self._published = published
        self.message_bytes = message_bytes
        self.plan = plan_reshard(table, rollout, dtype.itemsize, sites)
        self.sent = list[Message]()
        self.rounds = list[Round]()
        if sites is None:
            self.sent = messages_from(self.plan, rank, message_bytes)
            self.id = plan_id(self.plan, message_bytes)
        else:
            rounds = Rounds(self.plan, message_bytes)
            self.rounds = rounds.of(rank)
            self.id = rounds_id(rounds)

    @torch.no_grad()
    def send(self, outgoing: Outgoing | RoundOutgoing, clock: SendClock) -> None:
        """Send everything; returns when it has left this process."""
        if self.plan.sites is not None:
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

    def forget(self) -> None:
        """Free what was made of the tensors; call it when the weights may change."""
        self._published.forget()

    @torch.no_grad()
    def fingerprints(self) -> dict[tuple[int, str, int], int]:
        """(rollout rank, tensor, slot or -1) -> this rank's summand of the tensor's fingerprint.

        Collective over the training ranks where the rollout ranks quantise: a scale may be of elements of several.
        """
        sums: dict[tuple[int, str, int], int] = {}
        tensors = {tensor.name: tensor for tensor in self.rollout.tensors(0)}
        quantised: dict[str, list[Copy]] = {name: [] for name, tensor in tensors.items() if self.quantises(tensor)}
        try:
            for copy in (copy for _, copies in self.plan.copies_from(self.rank) for copy in copies):
                if copy.target in quantised:
                    quantised[copy.target].append(copy)
                    continue
                name = tensors[copy.target].rule.dtype
                sent = self._sent(copy, self.dtype if name is None else getattr(torch, name))
                key = (copy.target_rank, copy.target, -1 if copy.slot is None else copy.slot)
                sums[key] = sums.get(key, 0) + fingerprint(sent, copy.target_slice.start)
            for target, copies in quantised.items():
                for key, value in self._quantised_sums(tensors[target], copies):
                    sums[key] = sums.get(key, 0) + value
        finally:  # the weights may change before the next use
            self._published.forget()
        return sums

    def _sent(self, copy: Copy, dtype: torch.dtype) -> Tensor:
        return view_of(self._published[copy.chunk, copy.source], copy.source_slice).to(dtype)

    def quantises(self, tensor: RolloutTensor) -> bool:
        """Whether the rollout ranks quantise ``tensor``."""
        return self.quantization is not Quantization.none and is_quantised(tensor.rule)

    def _quantised_sums(
        self, tensor: RolloutTensor, copies: Sequence[Copy]
    ) -> Iterator[tuple[tuple[int, str, int], int]]:
        """(key, summand) of the bytes and the scales of ``tensor``; ``copies``: what this rank sends of it."""
        *slots, rows, columns = self.rollout.shape(tensor)
        matrix = QuantisedMatrix(self.quantization, (rows, columns))
        each = matrix.magnitudes(next(iter(self.tensors.values())).device)
        ranks = self.rollout.layout.world_size
        count = prod(slots)
        magnitudes = each.expand(ranks, count, *each.shape).clone()
        for copy in copies:
            matrix.widen(
                magnitudes[copy.target_rank, copy.slot or 0], self._sent(copy, self.dtype), copy.target_slice.start
            )
        if dist.is_initialized():
            dist.all_reduce(magnitudes, dist.ReduceOp.MAX)
        scales = matrix.scales(magnitudes)
        for copy in copies:
            start = copy.target_slice.start
            slot = -1 if copy.slot is None else copy.slot
            held = matrix.quantise(self._sent(copy, self.dtype), start, scales[copy.target_rank, copy.slot or 0])
            yield (copy.target_rank, tensor.name, slot), fingerprint(held.view(torch.uint8), start)
        if self.rank == 0:  # they are sums over the training ranks
            for rank, slot in product(range(ranks), range(count)):
                key = (rank, tensor.name + SCALES, slot if slots else -1)
                yield key, fingerprint(scales[rank, slot], (0, 0))


class SendClock:
    """Seconds spent packing and waiting."""

    def __init__(self) -> None:
        self.pack_s = self.wait_s = 0.0

    @contextmanager
    def packing(self) -> Iterator[None]:
        """Within: it packs."""
        begun = time.perf_counter()
        yield
        self.pack_s += time.perf_counter() - begun

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Within: it waits."""
        begun = time.perf_counter()
        yield
        self.wait_s += time.perf_counter() - begun


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


class Publisher(PlannedSend):
    """Sends the weights of ``chunks``, this training rank's model chunks, to all rollout ranks.

    table, rollout: of one model.  dtype: of vLLM's weights.  bucket_bytes: half of the memory that an update may take
    in any process; see ``message_bytes``.
    adapters: the engines apply these themselves, so the first update of a channel sends the weights without them, and
    each update the adapters; None: adapters are merged into the weights.
    quantization: in which the engines hold their matrices.
    frozen_tower: the vision tower is not trained, so only the first update of a channel sends it.
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
        adapters: AdapterTable | None = None,
        quantization: Quantization = Quantization.none,
        frozen_tower: bool = False,
    ) -> None:
        self.transport = transport
        self.bucket_bytes = bucket_bytes
        size = message_bytes(table, bucket_bytes, transport.sites)
        tensors = _bound(chunks, table, rank)
        shown = PublishedTensors(tensors) if adapters is None else StoredTensors(tensors)
        super().__init__(
            table,
            rollout,
            rank,
            tensors,
            shown,
            transport.sites,
            dtype=dtype,
            message_bytes=size,
            quantization=quantization,
        )
        self.language: PlannedSend | None = None
        if frozen_tower and adapters is None:
            self.language = PlannedSend(
                table,
                _without_tower(rollout),
                rank,
                tensors,
                shown,
                transport.sites,
                dtype=dtype,
                message_bytes=size,
                quantization=quantization,
            )
        self.adapters: PlannedSend | None = None
        if adapters is not None:
            tensors = _bound(chunks, adapters, rank)
            self.adapters = PlannedSend(
                adapters,
                RolloutAdapterTable(rollout, adapters),
                rank,
                tensors,
                ScaledAdapters(tensors, adapters.lora.scale),
                transport.sites,
                dtype=dtype,
                message_bytes=size,
            )
        self._outgoing: Outgoing | RoundOutgoing | None = None
        self._has_base = False  # whether all engines of the channel do

    def opening(self, first_rank: int = 0, attempt: int = 1) -> bytes:
        """The argument of ``sync_open`` for an engine whose first rank is rollout rank ``first_rank``.

        Raises SyncError if the transport's address counts other ranks than the plan.
        """
        transport = at_attempt(self.transport, attempt)
        table = self.table
        rollout = self.rollout
        address = transport.address
        if (address.num_trainers, address.num_rollout) != (table.layout.world_size, rollout.layout.world_size):
            raise SyncError(
                f"The channel is for {address.num_trainers} training and {address.num_rollout} rollout ranks, the plan "
                f"for {table.layout.world_size} and {rollout.layout.world_size}. Make the Address from the layouts"
            )
        adapters = None
        if self.adapters is not None:
            held = self.adapters.rollout
            assert isinstance(held, RolloutAdapterTable)
            adapters = SentAdapters(lora=held.lora, adapter=held.adapter, plan=self.adapters.id)
        return Opening(
            family=table.family.name,
            model=table.model,
            parallel=table.parallel,
            world_size=table.layout.world_size,
            rollout=rollout.layout,
            first_rank=first_rank,
            dtype=str(self.dtype).removeprefix("torch."),
            message_bytes=self.message_bytes,
            sites=transport.sites,
            bucket_bytes=self.bucket_bytes,
            plan=self.id,
            language_plan=None if self.language is None else self.language.id,
            adapters=adapters,
            quantization=self.quantization,
            transport=transport.name,
            fields=msgspec.Raw(msgspec.json.encode(transport)),
        ).packed()

    def open(self, attempt: int = 1) -> None:
        """Join the channel.  Call it on every training rank, while every engine gets ``sync_open``.

        attempt: a new number each time, because after a failure the channel must be opened again.
        """
        self.close()
        with phase("open the weight channel"):
            device = next(iter(self.tensors.values())).device
            self._outgoing = at_attempt(self.transport, attempt).outgoing(self.rank, device)
        self._has_base = False

    def close(self) -> None:
        """Leave the channel, if it is open."""
        outgoing = self._outgoing
        self._outgoing = None
        if outgoing is not None:
            outgoing.close()

    def publish(self, version: int) -> Published:
        """Send all weights as ``version``; returns when every rollout rank has applied them.

        Call it on every training rank, while every engine gets ``sync_receive(version)``.  Raises SyncError with the
        first cause, on whichever member it was; the channel is then closed.
        """
        assert self._outgoing is not None, "open the channel first"
        begun = time.perf_counter()
        clock = SendClock()
        due = self._due()
        with phase("publish", version=version):
            outgoing = self._outgoing
            try:
                outgoing.members.meet(f"update {version}")
                for each in due:
                    each.send(outgoing, clock)
                outgoing.members.meet("applied")
                outgoing.release()
            except BaseException as error:  # report any error to the other members
                self.close()
                raise outgoing.members.failed(error, f"publishing version {version}") from error
            finally:
                for each in due:
                    each.forget()
        self._has_base = True
        stored = sum(int(each.rollout.bytes_stored(self.dtype.itemsize).sum()) for each in due)
        return Published(
            version=version,
            num_bytes=sum(int(each.plan.bytes_sent[self.rank]) for each in due),
            seconds=time.perf_counter() - begun,
            pack_s=clock.pack_s,
            wait_s=clock.wait_s,
            bytes_over_bound=sum(int(each.plan.bytes_sent.sum()) for each in due) / stored,
        )

    def _due(self) -> list[PlannedSend]:
        """What the next update of the channel sends."""
        if not self._has_base:
            return [self] if self.adapters is None else [self, self.adapters]
        return [self.adapters or self.language or self]


def _without_tower(rollout: RolloutTable) -> RolloutTable:
    latent = rollout.latent_attention
    return RolloutTable(rollout.family, rollout.model, rollout.layout, latent_attention=latent, tower=False)


def _bound(chunks: Sequence[torch.nn.Module], table: Table, rank: int) -> dict[StoredKey, Tensor]:
    return {(each.local.chunk, each.local.name): each.tensor for each in bind(chunks, table, rank)}


def message_bytes(table: Table, bucket_bytes: int, sites: Sites | None) -> int:
    """The largest size of a message such that no process needs more than two buckets.

    Of messages in shared memory, half a bucket: two messages at a sender, or the messages under way to a receiver.
    Half a bucket: modules that wait to be packed (``receiver/worker_extension.py``).  Half a bucket: tensors
    under construction; their parts come from up to tp ranks in turn, so a worker writes to as many messages' worth at
    once, and maps two messages of each of these ranks (``sync/slots.py``).  The rest: vLLM's packing of one module.

    Of rounds half a bucket each: one that is packed, and two that are received or handed over.
    """
    return bucket_bytes // (2 if sites is not None else 4 * max(2, table.layout.tp))
