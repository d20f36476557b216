"""The proof of a family's tables for one model, one training layout and one rollout layout, without a GPU.

It builds nothing: the caller's ``modules_of`` says what a rank's modules are (``training/meta.py`` builds the real
ones).  Each check names every tensor that fails it.  Where single elements are is proven at reduced size
(``proofs/prove.py``).
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations, pairwise
from math import prod
from typing import Any

import torch

from mcore_rl.checkpoints.hf_directory import HfCheckpoint
from mcore_rl.checkpoints.load import check_checkpoint
from mcore_rl.families.rules import Rule, Stage, megatron_vocab
from mcore_rl.ground.errors import CheckpointError, WeightMapError
from mcore_rl.proofs.placement import MegatronRank, first_ranks, module_failures
from mcore_rl.proofs.reshard_proof import Traffic, reshard_failures, traffic
from mcore_rl.weights.binding import bind_states
from mcore_rl.weights.reshard import plan_reshard
from mcore_rl.weights.rollout_table import RolloutTable
from mcore_rl.weights.table import Table
from mcore_rl.weights.tensor_slice import TensorSlice

ModulesOf = Callable[[int], MegatronRank]  # rank -> what Megatron's modules of it say


@dataclass(frozen=True, kw_only=True)
class Check:
    """The outcome of one check.

    proves: the claim.  found: what was counted, in words.  failures: one message each; empty: the claim is proven.
    """

    proves: str
    found: str
    failures: tuple[str, ...]
    seconds: float


@dataclass(frozen=True, kw_only=True)
class ProofReport:
    """All checks of one layout.  checks: in order.  traffic: bytes of the reshard plan; None without a rollout."""

    family: str
    layout: str
    world_size: int
    rollout: str | None
    checks: tuple[Check, ...]
    traffic: Traffic | None

    @property
    def proven(self) -> bool:
        """Whether no check failed."""
        return not any(check.failures for check in self.checks)

    @property
    def seconds(self) -> float:
        """Seconds of all checks."""
        return sum(check.seconds for check in self.checks)

    def as_json(self) -> dict[str, Any]:
        """The report as a dictionary that ``json.dump`` can write."""
        bytes_ = {"traffic": asdict(self.traffic) | {"over_bound": self.traffic.over_bound}} if self.traffic else {}
        return asdict(self) | {"proven": self.proven, "seconds": self.seconds} | bytes_


def check(proves: str, make: Callable[[], tuple[str, Iterable[str]]]) -> Check:
    """Run and time ``make``, which returns (counts in words, failures).  An error of it is a failure too."""
    begin = time.perf_counter()
    try:
        counts, made = make()
        failures = tuple(dict.fromkeys(made))
    except Exception as error:  # noqa: BLE001  a wrong table may raise anything
        counts = ""
        failures = (f"{proves}: it cannot be checked: {type(error).__name__}: {error}",)
    return Check(proves=proves, found=counts, failures=failures, seconds=time.perf_counter() - begin)


Claims = dict[str, Callable[[], tuple[str, Iterable[str]]]]  # what is proven -> see ``check``


def checked(claims: Claims, notice: Callable[[str], None]) -> tuple[Check, ...]:
    """Check ``claims`` in their order.  notice: called with each before it is checked."""
    checks = []
    for proves, make in claims.items():
        notice(proves)
        checks.append(check(proves, make))
    return tuple(checks)


def verify(
    table: Table,
    rollout: RolloutTable | None,
    modules_of: ModulesOf,
    *,
    checkpoint: HfCheckpoint | None = None,
    notice: Callable[[str], None] = lambda proves: None,
) -> ProofReport:
    """Prove ``table``, and the plan from it to ``rollout`` if one is given.

    modules_of: what the real modules say, for every rank of ``table``.  checkpoint: also
    compare its names and shapes with the table.  notice: called with each claim before it is checked.
    """
    wanted: Claims = {
        "every parameter of every rank: one rule, its shape, layer and expert": lambda: _parameters(table, modules_of),
        "every Hugging Face name: consumed once": lambda: _names(table),
        "every Hugging Face tensor: held exactly": lambda: _cover(table),
    }
    if checkpoint is not None:
        wanted["the checkpoint: these tensors and no others"] = lambda: _checkpoint(table, checkpoint)
    sent: list[Traffic] = []
    if rollout is not None:
        wanted["every rollout element: written once, evenly"] = lambda: _reshard(table, rollout, sent)
    return ProofReport(
        family=table.family.name,
        layout=str(table.parallel),
        world_size=table.layout.world_size,
        rollout=None if rollout is None else str(rollout.layout),
        checks=checked(wanted, notice),
        traffic=sent[0] if sent else None,
    )


def _parameters(table: Table, modules_of: ModulesOf) -> tuple[str, list[str]]:
    failures = []
    count = 0
    for rank in range(table.layout.world_size):
        modules = modules_of(rank)
        states = [{key: torch.empty(shape, device="meta") for key, shape in chunk.items()} for chunk in modules.shapes]
        count += sum(map(len, states))
        rules = Counter((local.chunk, local.name) for local in table.tensors(rank))
        failures += [f"rank {rank}: {name} has {n} rules" for (_, name), n in rules.items() if n > 1]
        try:
            bind_states(states, table, rank)
        except WeightMapError as error:
            failures += [f"rank {rank}: {problem}" for problem in error.problems]
        failures += module_failures(table, rank, modules)
    return f"{count:,} tensors on {table.layout.world_size} ranks", failures


def _places(table: Table) -> Iterator[tuple[Rule, int | None, int | None]]:
    """(rule, layer, expert) of every tensor that is not a copy, from the rules alone, independent of the table."""
    for rule in table.rules:
        if rule.stage is Stage.last_copy:
            continue
        layers = rule.layers_of(table.model)
        num_experts = table.model.moe.num_experts if table.model.moe else 0
        experts: list[int | None] = [*range(num_experts)] if rule.per_expert else [None]
        yield from ((rule, layer, expert) for layer in layers for expert in experts)


def _names(table: Table) -> tuple[str, list[str]]:
    """The rules read every name of the model, each once; a copy of a tied tensor reads a name that is already read."""
    read = Counter(
        tensor.name.format(l=layer, e=expert) for rule, layer, expert in _places(table) for tensor in rule.hf
    )
    expected = table.hf_tensors.keys()
    copied = {tensor.name for rule in table.rules if rule.stage is Stage.last_copy for tensor in rule.hf}
    failures = [f"{name} is consumed {count} times" for name, count in read.items() if count > 1]
    failures += [f"{name} is consumed and not in the list of names" for name in read.keys() - expected]
    failures += [f"{name} is not consumed" for name in expected - read.keys()]
    failures += [f"{name} is copied and not consumed" for name in copied - read.keys()]
    return f"{len(read):,} names", failures


def _cover(table: Table) -> tuple[str, list[str]]:
    """Over the ranks of each replica, the distinct pieces of a tensor are disjoint and cover it."""
    held: dict[str, set[TensorSlice]] = defaultdict(set)
    failures = []
    for rank in first_ranks(table.layout):
        for local in table.tensors(rank):
            pieces = table.pieces(local)
            for piece in pieces:
                held[piece.hf].add(piece.hf_region)
            problem = cover_problem([piece.local_region for piece in pieces], table.shape(local))
            if problem and local.rule.layout is not megatron_vocab:
                failures.append(f"rank {rank}: {local.name}: {problem}")
    total = 0
    for name, info in table.hf_tensors.items():
        problem = cover_problem(sorted(held.get(name, ())), info.shape)
        total += prod(info.shape)
        if problem:
            failures.append(f"{name}: {problem}")
    failures += [f"{name} is held and not in the list of names" for name in held.keys() - table.hf_tensors.keys()]
    return f"{total:,} elements of {len(table.hf_tensors):,} tensors", failures


def cover_problem(regions: Sequence[TensorSlice], shape: tuple[int, ...]) -> str | None:
    """Why ``regions`` do not hold every element of a tensor of ``shape`` exactly once; None if they do."""
    if not all(region.fits(shape) for region in regions):
        return f"a part reaches beyond its shape {shape}"
    cut = [
        dim
        for dim, size in enumerate(shape)
        if any((region.start[dim], region.shape[dim]) != (0, size) for region in regions)
    ]
    # With a cut along one dimension only, overlapping parts are neighbours in this order.
    ordered = sorted(regions)
    pairs = pairwise(ordered) if len(cut) <= 1 else combinations(ordered, 2)
    if any(a.overlaps(b) for a, b in pairs):
        return "some of its elements are held twice"
    held = sum(region.num_elements for region in regions)
    wanted = prod(shape)
    return None if held == wanted else f"{held} of its {wanted} elements are held"


def _checkpoint(table: Table, checkpoint: HfCheckpoint) -> tuple[str, list[str]]:
    counts = f"{len(checkpoint.tensors):,} tensors"
    try:
        check_checkpoint(checkpoint, table)
    except CheckpointError as error:
        return counts, list(error.problems)
    return counts, []


def _reshard(table: Table, rollout: RolloutTable, sent: list[Traffic]) -> tuple[str, list[str]]:
    plan = plan_reshard(table, rollout)
    failures = reshard_failures(plan)
    bytes_ = traffic(plan)
    if bytes_.total != bytes_.bound:
        failures.append(f"{bytes_.total} bytes are sent and {bytes_.bound} are needed")
    sent.append(bytes_)
    ranks = f"{table.layout.world_size} to {rollout.layout.world_size} ranks"
    return f"{len(plan):,} copies, {ranks}", failures
