"""What a training rank sends of one table: the weights themselves, or the adapters beside them.

The plan is made once: in messages that are packed into shared memory, or in rounds with all other members.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from math import prod
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_rl.config.rollout import Quantization
from mcore_rl.sync.transport import Outgoing, RoundOutgoing
from mcore_rl.weights.fingerprint import fingerprint
from mcore_rl.weights.messages import Message, MessagePart, messages_from, plan_id
from mcore_rl.weights.published import PublishedView, StoredKey
from mcore_rl.weights.quantised import SCALES, QuantisedMatrix
from mcore_rl.weights.quantised_shards import is_quantised
from mcore_rl.weights.reshard import Copy, plan_reshard
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
        self.table, self.rollout, self.rank, self.dtype = table, rollout, rank, dtype
        self.tensors, self._published, self.message_bytes = tensors, published, message_bytes
        self.plan = plan_reshard(table, rollout, dtype.itemsize, sites)
        self.sent, self.rounds = list[Message](), list[Round]()
        if sites is None:
            self.sent = messages_from(self.plan, rank, message_bytes)
            self.id = plan_id(self.plan, message_bytes)
        else:
            rounds = Rounds(self.plan, message_bytes)
            self.rounds, self.id = rounds.of(rank), rounds_id(rounds)

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
        ranks, count = self.rollout.layout.world_size, prod(slots)
        magnitudes = each.expand(ranks, count, *each.shape).clone()
        for copy in copies:
            matrix.widen(
                magnitudes[copy.target_rank, copy.slot or 0], self._sent(copy, self.dtype), copy.target_slice.start
            )
        if dist.is_initialized():
            dist.all_reduce(magnitudes, dist.ReduceOp.MAX)
        scales = matrix.scales(magnitudes)
        for copy in copies:
            start, slot = copy.target_slice.start, -1 if copy.slot is None else copy.slot
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
