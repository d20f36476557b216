"""Proves a reshard plan from its rows: it moves everything, once, from the right place, and evenly.

The proof asks the tables what each rank holds and takes nothing else from the planner.  It checks every row; the plan
of a model of hundreds of billions of parameters takes seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from math import prod

import numpy as np
from numpy.typing import NDArray

from mcore_rl.families.rules import Rule
from mcore_rl.ground.arrays import Int32Array, Int64Array
from mcore_rl.weights.reshard import Geometry, ReshardPlan
from mcore_rl.weights.senders import grouped
from mcore_rl.weights.tensor_slice import TensorSlice

MAX_NAMED = 5  # failures of one kind that are named


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes of a plan.

    total: sent by all ranks.  bound: stored by all rollout ranks, without padding; no plan can send less.  sent_*: by
    one training rank.  received_*: by one rollout rank.  uneven: the largest difference between two ranks that hold the
    same tensors in what they send of them.
    """

    total: int
    bound: int
    sent_mean: float
    sent_max: int
    received_mean: float
    received_max: int
    uneven: int

    @property
    def over_bound(self) -> float:
        """``total / bound``; 1 is the least."""
        return self.total / self.bound


def traffic(plan: ReshardPlan) -> Traffic:
    """The bytes of ``plan``."""
    sent = plan.bytes_sent
    received = plan.bytes_received
    return Traffic(
        total=int(sent.sum()),
        bound=int(plan.rollout.bytes_stored(plan.itemsize).sum()),
        sent_mean=float(sent.mean()),
        sent_max=int(sent.max()),
        received_mean=float(received.mean()),
        received_max=int(received.max()),
        uneven=max((most - least for least, most, _ in _by_replicas(plan)), default=0),
    )


def reshard_failures(plan: ReshardPlan) -> list[str]:
    """Everything that is wrong with ``plan``, by name; an empty list proves it.

    Checked: both ends of a row hold what its geometry says; a geometry joins equal elements; each element that a
    rollout rank stores is written once, and no padding is; nothing else is sent; no source sends more than its share.
    """
    failures = [*_geometry_failures(plan)]
    failures += _row_failures(plan)
    if failures:
        return failures  # the checks below rely on correct rows
    failures += _cover_failures(plan)
    stored = plan.rollout.bytes_stored(plan.itemsize)
    for rank in np.flatnonzero(plan.bytes_received != stored)[:MAX_NAMED]:
        failures.append(f"rollout rank {rank} stores {stored[rank]} bytes and is sent {plan.bytes_received[rank]}")
    for least, most, largest in _by_replicas(plan):
        if most - least > largest:
            problem = f"one sends {most} bytes and another {least}, and their largest copy has {largest}"
            failures.append(f"of training ranks that hold the same tensors {problem}")
    return failures


def _geometry_failures(plan: ReshardPlan) -> Iterator[str]:
    """Parts outside their tensors, of unequal shape, or of other elements."""
    names = sorted({tensor.name for rule in (*plan.table.rules, *plan.rollout.rules) for tensor in rule.hf})
    number_of = {name: number for number, name in enumerate(names)}

    def labels(rule: Rule, num_shards: int, index: int) -> list[Int64Array]:
        """For each dimension of a local tensor, the index into its Hugging Face tensor; -1 in padding.

        Along the split dimension the tensor's number is in the bits from 40 on.
        """
        labels_by_dim = [np.arange(size, dtype=np.int64) for size in rule.local_shape(plan.table.model, num_shards)]
        shard = rule.shard(plan.table.model, num_shards, index)
        held = [np.arange(r.begin, r.end) + (number_of[rule.hf[r.source].name] << 40) for r in shard.ranges]
        padding = np.full(shard.size - shard.held, -1)
        labels_by_dim[rule.dim] = np.concatenate([*held, padding])
        return labels_by_dim

    for geometry in plan.geometries:
        ours = plan.table.rules[geometry.source_rule]
        theirs = plan.rollout.rules[geometry.target_rule]
        held = labels(ours, plan.table.num_shards(ours), geometry.source_shard)
        wanted = labels(theirs, plan.rollout.num_shards(theirs), geometry.target_shard)
        for source, target in geometry.parts:
            if not _same_elements(held, source, wanted, target):
                yield f"{ours.name} {source} is not what {theirs.name} {target} should hold"


def _same_elements(ours: list[Int64Array], source: TensorSlice, theirs: list[Int64Array], target: TensorSlice) -> bool:
    for a, b, (a_start, a_length), (b_start, b_length) in zip(ours, theirs, source.spans, target.spans, strict=True):
        if a_length != b_length or a_start < 0 or b_start < 0 or a_length < 1:
            return False
        from_source = a[a_start : a_start + a_length]
        into_target = b[b_start : b_start + b_length]
        if len(from_source) != a_length or len(into_target) != a_length:
            return False
        if (from_source < 0).any() or not np.array_equal(from_source, into_target):
            return False
    return True


def _row_failures(plan: ReshardPlan) -> Iterator[str]:
    """Rows whose ranks do not hold what the row says, or whose ends are of different layers or experts."""
    numbers = {
        field.name: np.array([getattr(g, field.name) for g in plan.geometries])[plan.geometry]
        for field in fields(Geometry)
        if field.name != "parts"
    }
    source_rule, source_layer, source_expert = plan.source_ids.decode(plan.source)
    target_rule, target_layer, target_expert = plan.target_ids.decode(plan.target)
    num_experts = plan.table.experts_per_rank if plan.table.model.moe else 1
    replicas = plan.replicas
    rollout = plan.rollout
    held = [replicas.shard_index(rule) for rule in plan.table.rules]
    stored = [[rollout.shard_index(rule, rank) for rank in range(rollout.layout.world_size)] for rule in rollout.rules]
    of_expert = np.array([rule.per_expert for rule in plan.table.rules])[source_rule]
    checks = {
        "a rule that its geometry does not mean": (source_rule != numbers["source_rule"])
        | (target_rule != numbers["target_rule"]),
        "ends in different layers or experts": (source_layer != target_layer) | (source_expert != target_expert),
        "a source shard that its rank does not hold": np.array(held)[source_rule, plan.source_rank]
        != numbers["source_shard"],
        "a target shard that its rank does not store": np.array(stored)[target_rule, plan.target_rank]
        != numbers["target_shard"],
        "a source of another pipeline stage": ~_in_stage(plan, source_rule, source_layer),
        "an expert that the source does not hold": of_expert
        & (replicas.ep[plan.source_rank] != source_expert // num_experts),
    }
    for problem, wrong in checks.items():
        for row in np.flatnonzero(wrong)[:MAX_NAMED]:
            yield f"{_name_of_row(plan, int(row))}: {problem}"


def _in_stage(plan: ReshardPlan, rule: Int32Array, layer: Int32Array) -> NDArray[np.bool_]:
    """For each row, whether the stage of its source has the tensor."""
    layout = plan.table.layout
    replicas = plan.replicas
    model = plan.table.model
    numbers = max(model.num_layers, 0 if model.vision is None else model.vision.depth)
    has = np.zeros((len(plan.table.rules), numbers, layout.pp), dtype=bool)
    for rank in range(layout.world_size):
        stage = replicas.pp[rank]
        if not has[:, :, stage].any():
            for local in plan.table.tensors(rank):
                # Rows name the original of a tied copy.
                same = [i for i, other in enumerate(plan.table.rules) if other.hf == local.rule.hf]
                has[same, local.layer or 0, stage] = True
    held: NDArray[np.bool_] = has[rule, layer, replicas.pp[plan.source_rank]]
    return held


def _name_of_row(plan: ReshardPlan, row: int) -> str:
    source_rule, layer, expert = (int(part) for part in plan.source_ids.decode(plan.source[row]))
    target_rule, target_layer, target_expert = (int(part) for part in plan.target_ids.decode(plan.target[row]))
    source = plan.table.rules[source_rule].name.format(l=layer, e=expert)
    target = plan.rollout.rules[target_rule].label.format(l=target_layer)
    of_expert = f" (expert {target_expert})" if plan.rollout.rules[target_rule].stacked else ""
    return f"training rank {plan.source_rank[row]} {source} to rollout rank {plan.target_rank[row]} {target}{of_expert}"


def _cover_failures(plan: ReshardPlan) -> Iterator[str]:
    """Targets with elements that are written not at all or twice, and targets that their rank does not store."""
    num_ids = len(plan.target_ids)
    num_geometries = len(plan.geometries)
    assert plan.rollout.layout.world_size * num_ids * num_geometries < 2**63, "more than 64 bits number"
    keys = plan.target_rank.astype(np.int64) * num_ids + plan.target
    rows = np.sort(keys * num_geometries + plan.geometry)  # by rank, by target, by geometry
    keys, geometry = np.divmod(rows, num_geometries)
    del rows
    begins = np.flatnonzero(np.diff(keys, prepend=-1))
    written = keys[begins]
    counts = np.diff(begins, append=len(keys))
    stored = np.sort(np.concatenate(list(_stored_keys(plan))))
    for problem, wrong in (
        ("nothing is sent to it", np.setdiff1d(stored, written, assume_unique=True)),
        ("it is sent to a rank that does not store it", np.setdiff1d(written, stored, assume_unique=True)),
    ):
        for key in wrong[:MAX_NAMED]:
            yield f"{_name_of_key(plan, int(key))}: {problem} ({len(wrong)} like it)"
    # The pattern of a target is the list of geometries sent to it; one check covers all targets of a pattern.
    pattern = np.zeros(len(written), dtype=np.int64)
    for place in range(int(counts.max())):
        more = counts > place
        step = np.where(more, geometry[np.minimum(begins + place, len(geometry) - 1)] + 1, 0)
        _, pattern = np.unique(pattern * (num_geometries + 1) + step, return_inverse=True)
    for group in np.unique(pattern, return_index=True)[1]:
        parts = geometry[begins[group] : begins[group] + counts[group]]
        incomplete = _pattern_problem(plan, [plan.geometries[part] for part in parts])
        if incomplete:
            same = int((pattern == pattern[group]).sum())
            yield f"{_name_of_key(plan, int(written[group]))}: {incomplete} ({same} like it)"


def _stored_keys(plan: ReshardPlan) -> Iterator[Int64Array]:
    """``rank * targets + target`` for everything that rollout ranks store, except shards of padding alone."""
    for number, rule in enumerate(plan.rollout.rules):
        layers = np.array([layer or 0 for layer in plan.rollout.layers(rule)])
        for index in range(plan.rollout.num_shards(rule)):
            if not rule.shard(plan.table.model, plan.rollout.num_shards(rule), index).ranges:
                continue
            ranks = plan.rollout.holders(rule, index)
            ids = plan.target_ids.encode(number, layers[:, None], np.arange(len(ranks))[None, :])
            yield (ranks[None] * len(plan.target_ids) + ids[:, :, None]).ravel()


def _name_of_key(plan: ReshardPlan, key: int) -> str:
    rank, target = divmod(key, len(plan.target_ids))
    number, layer, expert = (int(part) for part in plan.target_ids.decode(np.array(target, dtype=np.int32)))
    rule = plan.rollout.rules[number]
    of_expert = f" (expert {expert})" if rule.stacked else ""
    return f"rollout rank {rank} {rule.label.format(l=layer)}{of_expert}"


def _pattern_problem(plan: ReshardPlan, geometries: list[Geometry]) -> str | None:
    """What is wrong with a tensor that gets exactly ``geometries``, each known to be right; None if nothing is."""
    rule = plan.rollout.rules[geometries[0].target_rule]
    shard = geometries[0].target_shard
    held = rule.shard(plan.table.model, plan.rollout.num_shards(rule), shard)
    shape = rule.local_shape(plan.table.model, plan.rollout.num_shards(rule))
    wanted = held.held * prod(shape[: rule.dim] + shape[rule.dim + 1 :])
    regions = [target for geometry in geometries for _, target in geometry.parts]
    if any(region.overlaps(other) for i, region in enumerate(regions) for other in regions[:i]):
        return "an element of it is written twice"
    written = sum(region.num_elements for region in regions)
    return None if written == wanted else f"{written} of its {wanted} elements are written"


def _by_replicas(plan: ReshardPlan) -> Iterator[tuple[int, int, int]]:
    """(least, most, largest copy) in bytes of each set of training ranks that hold the same tensors."""
    _, layer, expert = plan.source_ids.decode(plan.source)
    layers: list[int | None] = list(range(plan.table.model.num_layers))
    known = {
        (g.source_rule, g.source_shard): plan.replicas.sets(plan.table.rules[g.source_rule], g.source_shard, layers)
        for g in plan.geometries
    }
    sets_of = [known[geometry.source_rule, geometry.source_shard] for geometry in plan.geometries]
    starts = np.concatenate([[0], np.cumsum([sets.size for sets in sets_of])])
    widths = np.array([sets.shape[1] for sets in sets_of])
    flat = np.concatenate([sets.ravel() for sets in sets_of])
    sets = flat[starts[plan.geometry] + layer * widths[plan.geometry] + expert]
    order, bounds = grouped(sets, len(plan.replicas.members))
    for number, members in enumerate(plan.replicas.members):
        rows = order[bounds[number] : bounds[number + 1]]
        if len(rows):
            row_bytes = plan.geometry_bytes[plan.geometry[rows]]
            sent = np.zeros(plan.table.layout.world_size, dtype=np.int64)
            np.add.at(sent, plan.source_rank[rows], row_bytes)
            yield int(sent[members].min()), int(sent[members].max()), int(row_bytes.max())
