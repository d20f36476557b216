"""What a rehearsal counted: blocks of device memory with their lives, collectives, operations, reads by the host.

The ledger keeps events and computes every table from them afterwards, so that a block may learn late what it was for.
Integers only; nothing here knows torch.

The invariant: a block counts from the event that made its storage to the event that freed it, whatever else happens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum


class MemoryKind(Enum):
    """What a block of device memory is for.

    activations: kept for backward, or for the next pipeline stage.  temporary: all else that is not state.
    """

    parameters = "parameters"
    gradients = "gradients"
    optimizer = "optimizer"
    activations = "activations"
    temporary = "temporary"


@dataclass(slots=True)
class MemoryBlock:
    """A storage on the device.  birth, death: numbers of events; a block that still lives has no death.

    operation: what made it.  place: the line of this project or of Megatron that asked for it.
    """

    num_bytes: int
    birth: int
    operation: str
    place: str
    kind: MemoryKind = MemoryKind.temporary
    death: int | None = None


@dataclass(frozen=True)
class RehearsalPhase:
    """A part of a rehearsal.  begin, end: numbers of its first event and of the first event after it."""

    name: str
    begin: int
    end: int


@dataclass(frozen=True)
class Collective:
    """A kind of communication.  group: its axis.  per_step: True if it runs once a pass, however many microbatches."""

    phase: str
    group: str
    size: int
    operation: str
    per_step: bool


@dataclass
class TrafficTotal:
    """The total of one kind of communication.

    payload: bytes of the whole tensor.  wire: bytes that this rank sends, by a ring's count.
    """

    calls: int = 0
    payload: int = 0
    wire: int = 0


@dataclass(frozen=True)
class Read:
    """A place where the host waits for the device.  path: below the package's parent; function: that has the line."""

    phase: str
    path: str
    line: int
    function: str
    operation: str
    per_step: bool


@dataclass(frozen=True)
class MemorySample:
    """Memory at one event.  by_kind: bytes; their sum is ``num_bytes``."""

    at: int
    phase: str
    by_kind: dict[MemoryKind, int]

    @property
    def num_bytes(self) -> int:
        """The bytes of all kinds."""
        return sum(self.by_kind.values())


@dataclass
class Ledger:
    """Everything that was counted, in the order of events.

    operations: floating-point operations by (phase, whether once a pass, name of the operation).
    """

    blocks: list[MemoryBlock] = field(default_factory=list)
    phases: list[RehearsalPhase] = field(default_factory=list)
    traffic: dict[Collective, TrafficTotal] = field(default_factory=dict)
    reads: Counter[Read] = field(default_factory=Counter)
    operations: Counter[tuple[str, bool, str]] = field(default_factory=Counter)
    now: int = 0

    def send(self, key: Collective, payload: int, wire: int) -> None:
        """Count one call."""
        total = self.traffic.setdefault(key, TrafficTotal())
        total.calls += 1
        total.payload += payload
        total.wire += wire

    def peak(self, phase: RehearsalPhase) -> MemorySample:
        """The first of the greatest moments of ``phase``."""
        level = 0
        best = -1
        at = phase.begin
        for event, change in self._changes():
            if event >= phase.end:
                break
            if event >= phase.begin and best < 0:  # what lived when the phase began
                best = level
                at = phase.begin
            level += change
            if event >= phase.begin and level > best:
                best = level
                at = event
        return MemorySample(at, phase.name, self.by_kind(at))

    def by_kind(self, at: int) -> dict[MemoryKind, int]:
        """The bytes that live right after event ``at``, by kind."""
        totals = dict.fromkeys(MemoryKind, 0)
        for block in self.living(at):
            totals[block.kind] += block.num_bytes
        return totals

    def living(self, at: int) -> list[MemoryBlock]:
        """The blocks that live right after event ``at``."""
        return [block for block in self.blocks if block.birth <= at and (block.death is None or block.death > at)]

    def largest(self, at: int, most: int) -> list[tuple[MemoryKind, str, str, int, int]]:
        """(kind, operation, place, blocks, bytes) of what lives right after event ``at``, the most bytes first."""
        counts: Counter[tuple[MemoryKind, str, str]] = Counter()
        sizes: Counter[tuple[MemoryKind, str, str]] = Counter()
        for block in self.living(at):
            key = (block.kind, block.operation, block.place)
            counts[key] += 1
            sizes[key] += block.num_bytes
        return [(*key, counts[key], num_bytes) for key, num_bytes in sizes.most_common(most)]

    def timeline(self, phases: Sequence[RehearsalPhase], most: int) -> list[MemorySample]:
        """At most ``most`` samples over ``phases``, each the greatest moment of its stretch of events."""
        if not phases:
            return []
        begin = phases[0].begin
        end = phases[-1].end
        width = max(1, -(-(end - begin) // most))
        current = dict.fromkeys(MemoryKind, 0)
        stretches: dict[int, tuple[int, int, dict[MemoryKind, int]]] = {}
        for event, kind, change in self._changes_by_kind():
            current[kind] += change
            if not begin <= event < end:
                continue
            total = sum(current.values())
            stretch = (event - begin) // width
            if stretch not in stretches or total > stretches[stretch][0]:
                stretches[stretch] = (total, event, dict(current))
        named = [(phase.name, phase.begin, phase.end) for phase in phases]
        return [
            MemorySample(at, next((name for name, first, last in named if first <= at < last), ""), by_kind)
            for _, (_, at, by_kind) in sorted(stretches.items())
        ]

    def flops(self, phase: str, microbatches: float = 1.0) -> float:
        """Operations of ``phase``; those of the microbatches times ``microbatches``."""
        return sum(
            count * (1.0 if per_step else microbatches)
            for (name, per_step, _), count in self.operations.items()
            if name == phase
        )

    def _changes(self) -> Iterable[tuple[int, int]]:
        return ((event, change) for event, _, change in self._changes_by_kind())

    def _changes_by_kind(self) -> list[tuple[int, MemoryKind, int]]:
        changes = [(block.birth, block.kind, block.num_bytes) for block in self.blocks]
        changes += [(block.death, block.kind, -block.num_bytes) for block in self.blocks if block.death is not None]
        return sorted(changes, key=lambda each: each[0])


# ---- collectives ----


class Collect(Enum):
    """A collective operation."""

    all_reduce = "all-reduce"
    all_gather = "all-gather"
    reduce_scatter = "reduce-scatter"
    all_to_all = "all-to-all"
    broadcast = "broadcast"
    send = "send"
    receive = "receive"
    barrier = "barrier"


# By what the names of torch's operations begin with (torch/csrc/distributed/c10d/Ops.cpp, 2.13).
NAMES = (
    ("allreduce", Collect.all_reduce),
    ("allgather", Collect.all_gather),
    ("_allgather", Collect.all_gather),
    ("reduce_scatter", Collect.reduce_scatter),
    ("_reduce_scatter", Collect.reduce_scatter),
    ("alltoall", Collect.all_to_all),
    ("broadcast", Collect.broadcast),
    ("send", Collect.send),
    ("recv", Collect.receive),
    ("barrier", Collect.barrier),
)

# By Megatron's descriptions (megatron/core/parallel_state.py, 0.16.1); the first that a description begins with.
GROUPS = (
    ("DATA_PARALLEL_GROUP", "dp"),
    ("INTRA_PARTIAL_DATA_PARALLEL_GROUP", "dp"),
    ("CONTEXT_PARALLEL_GROUP", "cp"),
    ("TENSOR_AND_CONTEXT_PARALLEL_GROUP", "tp and cp"),
    ("TENSOR_MODEL_PARALLEL_GROUP", "tp"),
    ("PIPELINE_MODEL_PARALLEL_GROUP", "pp"),
    ("EMBEDDING_GROUP", "embedding"),
    ("EXPERT_MODEL_PARALLEL_GROUP", "ep"),
    ("EXPERT_TENSOR_PARALLEL_GROUP", "etp"),
    ("EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP", "ep and etp"),
    ("EXPERT_DATA_PARALLEL_GROUP", "edp"),
)


def group_name(description: str) -> str:
    """The axis of a process group, from its description; "world" if it has none of its own."""
    return next((name for begin, name in GROUPS if description.startswith(begin)), "world")


def collective(name: str) -> Collect | None:
    """The collective that torch's operation ``name`` is; None if it is none that is counted."""
    return next((each for begin, each in NAMES if name.startswith(begin)), None)


def wire_bytes(kind: Collect, payload: int, size: int) -> int:
    """Bytes that one of ``size`` ranks sends, by the rings that NCCL's and RCCL's large messages take.

        all-reduce                  2 (n - 1) / n of the tensor
        all-gather, reduce-scatter  (n - 1) / n of the whole
        all-to-all                  what is not for itself: (n - 1) / n where the parts are equal
        broadcast, send             the tensor (a receiver sends nothing)

    Trees and in-network reductions send fewer; protocols add a few per cent.

    payload: of the whole tensor; of an all-to-all, what a rank gives.
    """
    if size <= 1 or kind in (Collect.receive, Collect.barrier):
        return 0
    if kind in (Collect.send, Collect.broadcast):
        return payload
    share = payload * (size - 1) // size
    return 2 * share if kind is Collect.all_reduce else share
