"""The trainer's end of a weight update: one ``Publisher`` on every training rank.

The plan is made once.  ``publish`` sends this rank's live parameters along it: in messages that are packed into shared
memory, or in rounds with all other members.  ``update`` pauses the engines and calls their workers; ``check`` verifies
their weights afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from mcore_rl.checkpoints.export import BUCKET_BYTES
from mcore_rl.config.rollout import Quantization
from mcore_rl.errors import SyncError
from mcore_rl.parallel.phase import phase
from mcore_rl.rollout.weight_channel import Opening, SentAdapters
from mcore_rl.sync.planned_send import PlannedSend, SendClock
from mcore_rl.sync.transport import Outgoing, RoundOutgoing, Transport, at_attempt
from mcore_rl.weights.adapter_table import AdapterTable
from mcore_rl.weights.binding import bind
from mcore_rl.weights.published import PublishedTensors, ScaledAdapters, StoredKey, StoredTensors
from mcore_rl.weights.reshard import ReshardPlan
from mcore_rl.weights.rollout_adapters import RolloutAdapterTable
from mcore_rl.weights.rollout_table import RolloutTable
from mcore_rl.weights.sites import Sites
from mcore_rl.weights.table import Table


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
        self.transport, self.bucket_bytes = transport, bucket_bytes
        size = message_bytes(table, bucket_bytes, transport.sites)
        tensors = _bound(chunks, table, rank)
        shown = PublishedTensors(tensors) if adapters is None else StoredTensors(tensors)
        super().__init__(
            table, rollout, rank, tensors, shown, transport.sites, dtype=dtype, message_bytes=size,
            quantization=quantization,
        )  # fmt: skip
        self.language: PlannedSend | None = None
        if frozen_tower and adapters is None:
            self.language = PlannedSend(
                table, _without_tower(rollout), rank, tensors, shown, transport.sites, dtype=dtype, message_bytes=size,
                quantization=quantization,
            )  # fmt: skip
        self.adapters: PlannedSend | None = None
        if adapters is not None:
            tensors = _bound(chunks, adapters, rank)
            self.adapters = PlannedSend(
                adapters, RolloutAdapterTable(rollout, adapters), rank, tensors,
                ScaledAdapters(tensors, adapters.lora.scale), transport.sites, dtype=dtype, message_bytes=size,
            )  # fmt: skip
        self._outgoing: Outgoing | RoundOutgoing | None = None
        self._has_base = False  # whether all engines of the channel do

    def opening(self, first_rank: int = 0, attempt: int = 1) -> bytes:
        """The argument of ``sync_open`` for an engine whose first rank is rollout rank ``first_rank``."""
        transport = at_attempt(self.transport, attempt)
        return opening_of(
            self.plan, transport, self.dtype, self.bucket_bytes, self.id, first_rank,
            adapters=self.adapters, language=self.language, quantization=self.quantization,
        ).packed()  # fmt: skip

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
        outgoing, self._outgoing = self._outgoing, None
        if outgoing is not None:
            outgoing.close()

    def publish(self, version: int) -> Published:
        """Send all weights as ``version``; returns when every rollout rank has applied them.

        Call it on every training rank, while every engine gets ``sync_receive(version)``.  Raises SyncError with the
        first cause, on whichever member it was; the channel is then closed.
        """
        assert self._outgoing is not None, "open the channel first"
        begun, clock, due = time.perf_counter(), SendClock(), self._due()
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


def opening_of(
    plan: ReshardPlan,
    transport: Transport,
    dtype: torch.dtype,
    bucket_bytes: int,
    made: str,
    first_rank: int = 0,
    adapters: PlannedSend | None = None,
    language: PlannedSend | None = None,
    quantization: Quantization = Quantization.none,
) -> Opening:
    """The opening for the workers of an engine.

    made: the hash of the plan's messages or rounds.  first_rank: the first rollout rank of that engine.  adapters: that
    the engine applies.  language: what updates after the first send, if not everything.
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
        language_plan=None if language is None else language.id,
        adapters=None if adapters is None else sent_adapters(adapters),
        quantization=quantization,
        transport=transport.name,
        fields=msgspec.Raw(msgspec.json.encode(transport)),
    )


def sent_adapters(adapters: PlannedSend) -> SentAdapters:
    """What a worker must know of the adapters that it is sent."""
    table = adapters.rollout
    assert isinstance(table, RolloutAdapterTable)
    return SentAdapters(lora=table.lora, adapter=table.adapter, plan=adapters.id)
