"""Compares the rollout ranks' weights with the trainer's: every tensor, and every expert of a stacked one.

Training ranks fingerprint the parts that they send, and sum the fingerprints; workers fingerprint the weights that they
execute with (``rollout.vllm.receiver.live_weights``).  Where these quantise, the training ranks quantise what they hold
by the reference quantiser (``weights.quantised``), and both sides fingerprint bytes and scales.  No weight is sent, so
the check costs reading them once (about 3 s per GB and core).  It covers the elements, not the kernels that use them;
where several training ranks hold a copy, it covers the copy that is sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import torch
import torch.distributed as dist

from mcore_rl.sync.publish import Publisher
from mcore_rl.weights.fingerprint import added
from mcore_rl.weights.quantised import SCALES

Key = tuple[int, str, int]  # rollout rank, tensor, slot of a stacked one or -1
LOW = (1 << 32) - 1


@dataclass(frozen=True, kw_only=True)
class Expected:
    """The fingerprints that the rollout ranks must have at ``version``.  experts: the expert in each slot."""

    version: int
    values: Mapping[Key, int]
    experts: Mapping[Key, int]


@dataclass(frozen=True, kw_only=True)
class HeldFingerprints:
    """The fingerprints of the workers of some rollout ranks.

    copies: (rank, name) of a copy that is executed and not stored (a tied output projection) -> the stored tensor.
    """

    values: Mapping[Key, int]
    copies: Mapping[tuple[int, str], str]

    @classmethod
    def of(
        cls,
        first_rank: int,
        fingerprints: Sequence[Sequence[tuple[str, int, int]]],
        copies: Sequence[Mapping[str, str]],
    ) -> HeldFingerprints:
        """The fingerprints of one engine, from its workers' answers to ``sync_fingerprints`` and ``sync_copies``."""
        values = {
            (first_rank + rank, name, slot): value
            for rank, entries in enumerate(fingerprints)
            for name, slot, value in entries
        }
        copies_by_rank = {
            (first_rank + rank, name): stored
            for rank, rank_copies in enumerate(copies)
            for name, stored in rank_copies.items()
        }
        return cls(values=values, copies=copies_by_rank)

    def beside(self, other: HeldFingerprints) -> HeldFingerprints:
        """The fingerprints of both together."""
        return HeldFingerprints(values={**self.values, **other.values}, copies={**self.copies, **other.copies})


def expected_weights(publisher: Publisher, version: int) -> Expected:
    """Fingerprints of the weights that ``publish`` would send now as ``version`` on a new channel.

    Collective over the training ranks; each gets all of them.
    """
    tables = [publisher.rollout, *([] if publisher.adapters is None else [publisher.adapters.rollout])]
    keys: list[Key] = []
    experts: dict[Key, int] = {}
    for rollout, rank in product(tables, range(publisher.rollout.layout.world_size)):
        for tensor in rollout.tensors(rank):
            for name in (tensor.name, *([tensor.name + SCALES] if publisher.quantises(tensor) else [])):
                keys += [(rank, name, slot) for slot in range(len(tensor.experts))] or [(rank, name, -1)]
                experts |= {(rank, name, slot): expert for slot, expert in enumerate(tensor.experts)}
    mine = publisher.fingerprints() | ({} if publisher.adapters is None else publisher.adapters.fingerprints())
    # Sum 32-bit halves: the result must not depend on how a backend overflows 64-bit integers.
    halves = torch.tensor([[mine.get(key, 0) & LOW, mine.get(key, 0) >> 32 & LOW] for key in keys])
    halves = halves.to(next(iter(publisher.tensors.values())).device)
    if dist.is_initialized():
        dist.all_reduce(halves)
    values = {key: added(low + (high << 32)) for key, (low, high) in zip(keys, halves.tolist(), strict=True)}
    return Expected(version=version, values=values, experts=experts)


def differences(expected: Expected, held: HeldFingerprints, previous: Expected | None = None) -> list[str]:
    """A sentence for each tensor that differs from ``expected``; it is stale if it equals ``previous``."""
    return [*_of_stored(expected, held, previous), *_of_copies(expected, held, previous)]


def _of_stored(expected: Expected, held: HeldFingerprints, previous: Expected | None) -> Iterator[str]:
    for key, value in expected.values.items():
        held_value = held.values.get(key)
        if held_value is None:
            yield f"{_named(key, expected)} is missing: the worker has no such tensor"
        elif held_value != value:
            yield f"{_named(key, expected)} {_why(key, held_value, expected, previous)}"
    stored = {(rank, name) for rank, name, _ in expected.values}
    for rank, name, slot in held.values:
        if (rank, name) not in stored and (rank, name) not in held.copies:
            yield f"rollout rank {rank}: {name} (slot {slot}) is in the worker and not in the plan"


def _of_copies(expected: Expected, held: HeldFingerprints, previous: Expected | None) -> Iterator[str]:
    for (rank, name), stored in held.copies.items():
        key = (rank, stored, -1)
        held_value = held.values[rank, name, -1]
        if held_value != expected.values[key]:
            why = _why(key, held_value, expected, previous)
            yield f"rollout rank {rank}: {name}, the packed copy of {stored}, {why}"


def _why(key: Key, held_value: int, expected: Expected, previous: Expected | None) -> str:
    if previous is not None and previous.values.get(key) == held_value:
        return f"is stale: version {previous.version}'s, not version {expected.version}'s"
    _, name, slot = key
    for other, expert in expected.experts.items() if slot >= 0 else ():
        if other[1] == name and expected.values[other] == held_value:
            return f"is wrong: it holds expert {expert}"
    return f"is wrong: neither version {expected.version}'s" + (
        "" if previous is None else f" nor version {previous.version}'s"
    )


def _named(key: Key, expected: Expected) -> str:
    rank, name, _ = key
    expert = f" expert {expected.experts[key]}" if key in expected.experts else ""
    return f"rollout rank {rank}: {name}{expert}"
