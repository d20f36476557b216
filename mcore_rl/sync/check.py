"""What the rollout ranks hold, against what the trainer holds: every tensor, and every expert of a stacked one.

Training ranks fingerprint the parts that they send, and add them up; workers fingerprint what they execute with
(``rollout.receiver.live_weights``).  No weight is sent, so it costs reading them once (about 3 s per GB and core).  It
answers for the elements, not for the kernels that use them, and where several training ranks hold a copy, for the one
that sends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from mcore_rl.sync.publish import Publisher
from mcore_rl.weights.fingerprint import added

Key = tuple[int, str, int]  # rollout rank, tensor, slot of a stacked one or -1
LOW = (1 << 32) - 1


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What the rollout ranks must hold as ``version``.  experts: which one stands in a slot, where there are slots."""

    version: int
    values: Mapping[Key, int]
    experts: Mapping[Key, int]


@dataclass(frozen=True, kw_only=True)
class HeldFingerprints:
    """What the workers of some rollout ranks hold.

    copies: (rank, entry) of what is not stored but computed with (a tied output projection) -> the stored tensor.
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
        """From the answers of one engine's workers to ``sync_fingerprints`` and ``sync_copies``."""
        values = {
            (first_rank + rank, name, slot): value
            for rank, entries in enumerate(fingerprints)
            for name, slot, value in entries
        }
        found = {(first_rank + rank, name): stored for rank, mine in enumerate(copies) for name, stored in mine.items()}
        return cls(values=values, copies=found)

    def beside(self, other: HeldFingerprints) -> HeldFingerprints:
        """Both."""
        return HeldFingerprints(values={**self.values, **other.values}, copies={**self.copies, **other.copies})


def expected_weights(publisher: Publisher, version: int) -> Expected:
    """What ``publish`` would send now, as ``version``.  Collective over the training ranks; all get all of it."""
    rollout = publisher.rollout
    keys: list[Key] = []
    experts: dict[Key, int] = {}
    for rank in range(rollout.layout.world_size):
        for tensor in rollout.tensors(rank):
            keys += [(rank, tensor.name, slot) for slot in range(len(tensor.experts))] or [(rank, tensor.name, -1)]
            experts |= {(rank, tensor.name, slot): expert for slot, expert in enumerate(tensor.experts)}
    mine = publisher.fingerprints()
    # In halves: sums of signed 64-bit integers must not depend on how a backend overflows.
    halves = torch.tensor([[mine.get(key, 0) & LOW, mine.get(key, 0) >> 32 & LOW] for key in keys])
    halves = halves.to(next(iter(publisher.tensors.values())).device)
    if dist.is_initialized():
        dist.all_reduce(halves)
    values = {key: added(low + (high << 32)) for key, (low, high) in zip(keys, halves.tolist(), strict=True)}
    return Expected(version=version, values=values, experts=experts)


def differences(expected: Expected, held: HeldFingerprints, previous: Expected | None = None) -> list[str]:
    """A sentence for each tensor that is not as ``expected``; stale where it is as ``previous`` had it."""
    return [*_of_stored(expected, held, previous), *_of_copies(expected, held, previous)]


def _of_stored(expected: Expected, held: HeldFingerprints, previous: Expected | None) -> Iterator[str]:
    for key, value in expected.values.items():
        found = held.values.get(key)
        if found is None:
            yield f"{_named(key, expected)} is missing: the worker has no such tensor"
        elif found != value:
            yield f"{_named(key, expected)} {_why(key, found, expected, previous)}"
    stored = {(rank, name) for rank, name, _ in expected.values}
    for rank, name, slot in held.values:
        if (rank, name) not in stored and (rank, name) not in held.copies:
            yield f"rollout rank {rank}: {name} (slot {slot}) is in the worker and not in the plan"


def _of_copies(expected: Expected, held: HeldFingerprints, previous: Expected | None) -> Iterator[str]:
    for (rank, name), stored in held.copies.items():
        key, found = (rank, stored, -1), held.values[rank, name, -1]
        if found != expected.values[key]:
            why = _why(key, found, expected, previous)
            yield f"rollout rank {rank}: {name}, the packed copy of {stored}, {why}"


def _why(key: Key, found: int, expected: Expected, previous: Expected | None) -> str:
    if previous is not None and previous.values.get(key) == found:
        return f"is stale: version {previous.version}'s, not version {expected.version}'s"
    _, name, slot = key
    for other, expert in expected.experts.items() if slot >= 0 else ():
        if other[1] == name and expected.values[other] == found:
            return f"is wrong: it holds expert {expert}"
    return f"is wrong: neither version {expected.version}'s" + (
        "" if previous is None else f" nor version {previous.version}'s"
    )


def _named(key: Key, expected: Expected) -> str:
    rank, name, _ = key
    expert = f" expert {expected.experts[key]}" if key in expected.experts else ""
    return f"rollout rank {rank}: {name}{expert}"
