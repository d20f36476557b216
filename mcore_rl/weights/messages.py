"""The reshard plan as messages: sender and receiver compute the same messages, without negotiation.

A message goes from one training rank to one rollout rank and holds parts of copies, one after another, in at most a
given number of bytes (a larger copy is cut).  Each side computes its messages from its own rows of the plan.  They are
for ranks that all share one memory; for others see ``rounds.py``.

Invariant: both sides order their messages by (place in the model, tensor, source, target, number).  The embedding,
which stands before the layers, comes last: it arrives while the receiver prepares the rest.  The earliest message under
way is always the next one for its sender and its receiver, so sending and receiving in turn never deadlocks, even with
memory for one message only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from mcore_rl.weights.reshard import Copy, ReshardPlan
from mcore_rl.weights.rollout_table import itemsize_of
from mcore_rl.weights.tensor_slice import TensorSlice, row_major_strides, windows

Turn = tuple[bool, int]  # sort key of a place in the model: (before the layers, place)


@dataclass(frozen=True, slots=True)
class MessagePart:
    """One region in a message.

    chunk, source: the training rank's tensor.  target, slot: the rollout rank's tensor, as in ``reshard.Copy``.
    source_slice, target_slice: the region in each, of one shape.  begin, num_bytes: its bytes in the message.  dtype:
    torch's name; None: the model's dtype.
    """

    chunk: int
    source: str
    source_slice: TensorSlice
    target: str
    slot: int | None
    target_slice: TensorSlice
    begin: int
    num_bytes: int
    dtype: str | None


@dataclass(frozen=True, slots=True)
class Message:
    """Parts from ``source_rank`` to ``target_rank``, ``num_bytes`` in all."""

    source_rank: int
    target_rank: int
    parts: tuple[MessagePart, ...]
    num_bytes: int


def messages_from(plan: ReshardPlan, rank: int, max_bytes: int) -> list[Message]:
    """The messages that training rank ``rank`` sends, in order.  max_bytes: of one message, at least one element."""
    return _messages(plan, plan.copies_from(rank), max_bytes)


def messages_to(plan: ReshardPlan, rank: int, max_bytes: int) -> list[Message]:
    """The messages that rollout rank ``rank`` receives, in order."""
    return _messages(plan, plan.copies_to(rank), max_bytes)


def plan_id(plan: ReshardPlan, max_bytes: int) -> str:
    """A hash of everything that decides the messages: two processes with equal hashes compute equal messages."""
    digest = hashlib.sha256(repr((plan.itemsize, max_bytes, plan.geometries)).encode())
    digest.update(repr([(rule.label, rule.dtype) for rule in plan.rollout.rules]).encode())
    for column in (plan.source_rank, plan.source, plan.target_rank, plan.target, plan.geometry):
        digest.update(column.tobytes())
    return digest.hexdigest()


def _messages(plan: ReshardPlan, copies: Iterable[tuple[int, list[Copy]]], max_bytes: int) -> list[Message]:
    rules = plan.rollout.rules
    numbers = {rule.label.format(l=layer): n for n, rule in enumerate(rules) for layer in plan.rollout.layers(rule)}
    streams: dict[tuple[int, int], list[tuple[Turn, int, Copy]]] = {}
    for place, here in copies:
        turn = (place < 0, place)
        for copy in here:
            pair = (copy.source_rank, copy.target_rank)
            streams.setdefault(pair, []).append((turn, numbers[copy.target], copy))
    messages = []
    for (source_rank, target_rank), stream in streams.items():
        stream.sort(key=lambda entry: entry[:2])  # stable: within a tensor as the plan has them
        cut = _cut(plan, stream, max_bytes)
        for index, (first, parts) in enumerate(cut):
            message = Message(source_rank, target_rank, tuple(parts), parts[-1].begin + parts[-1].num_bytes)
            messages.append(((*first, source_rank, target_rank, index), message))
    return [message for _, message in sorted(messages, key=lambda entry: entry[0])]


def _cut(
    plan: ReshardPlan, stream: list[tuple[Turn, int, Copy]], max_bytes: int
) -> list[tuple[tuple[Turn, int], list[MessagePart]]]:
    """The messages of one pair of ranks, each as ((turn, tensor) of its first part, parts)."""
    messages: list[tuple[tuple[Turn, int], list[MessagePart]]] = []
    used = max_bytes
    for turn, number, copy in stream:
        rule = plan.rollout.rules[number]
        itemsize = itemsize_of(rule, plan.itemsize)
        for region in windows(copy.target_slice, row_major_strides(copy.target_slice.shape), max_bytes // itemsize):
            num_bytes = region.num_elements * itemsize
            begin = -(-used // itemsize) * itemsize  # where a tensor of its dtype may begin
            if begin + num_bytes > max_bytes or turn[0] != messages[-1][0][0][0]:  # the embedding is apart
                messages.append(((turn, number), []))
                begin = 0
            parts = messages[-1][1]
            source_slice = region.moved(copy.target_slice.start, copy.source_slice.start)
            parts.append(
                MessagePart(
                    copy.chunk, copy.source, source_slice, copy.target, copy.slot, region, begin, num_bytes, rule.dtype
                )
            )
            used = begin + num_bytes
    return messages
