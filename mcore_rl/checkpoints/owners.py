"""Which rank gives which part of a Hugging Face tensor, where several ranks hold the same part.

Data, context and expert-data parallel ranks hold copies, and tensor ranks hold copies of what is not split; each part
gets one owner, so that all ranks give about equally many elements.  Integers only: every rank computes the same plan.

Invariant: the parts of a Hugging Face tensor cover it exactly.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from math import prod

from mcore_rl.errors import WeightMapError
from mcore_rl.families.rules import Stage
from mcore_rl.weights.table import LocalTensor, Piece, Table
from mcore_rl.weights.tensor_slice import TensorSlice


@dataclass(frozen=True, slots=True)
class OwnedPart:
    """A part that rank ``owner`` gives: ``region`` of Hugging Face tensor ``hf``.

    local: the owner's tensor that holds the region.  pieces: where in ``local``, in the order of the region along
    ``dim``.
    """

    hf: str
    owner: int
    local: LocalTensor
    region: TensorSlice
    pieces: tuple[Piece, ...]

    @property
    def dim(self) -> int:
        """The dimension along which pieces, and parts, follow one another."""
        return self.local.rule.dim


def owned_parts(table: Table, prefer: int | None = None) -> dict[str, list[OwnedPart]]:
    """The parts of every Hugging Face tensor, in the order of ``table.hf_tensors`` and of the tensor.

    prefer: the owner of every part that it holds (it is the gather destination, so it need not send them).  A tied
    output projection is a copy of the embedding and owns nothing.
    Raises WeightMapError with every tensor whose parts overlap or leave a gap.
    """
    given = [0] * table.layout.world_size  # elements
    parts: dict[str, list[OwnedPart]] = {name: [] for name in table.hf_tensors}
    for local, ranks in _holders(table):
        owner = prefer if prefer in ranks else min(ranks, key=given.__getitem__)
        assert owner is not None
        by_name = defaultdict(list)
        for piece in table.pieces(local):
            by_name[piece.hf].append(piece)
            given[owner] += prod(piece.shape)
        for name, pieces in by_name.items():
            parts[name] += [OwnedPart(name, owner, local, *run) for run in _runs(pieces, local.rule.dim)]
    for held in parts.values():
        held.sort(key=lambda part: part.region.start)
    problems = [problem for name, held in parts.items() if (problem := _cover_problem(table, name, held))]
    if problems:
        raise WeightMapError(table.family.name, problems)
    return parts


def _holders(table: Table) -> list[tuple[LocalTensor, list[int]]]:
    """(distinct local tensor, the ranks that hold it), in the order of the first of these ranks."""
    peers = defaultdict(list)
    for rank in range(table.layout.world_size):
        at = table.layout.coords(rank)
        peers[at.pp, at.tp, at.ep, at.etp].append(rank)
    # Rules are compared by identity: all come from this table, and hashing a rule hashes all its fields.
    holders: dict[tuple[int, int | None, int | None, int], tuple[LocalTensor, list[int]]] = {}
    for ranks in peers.values():
        for local in table.tensors(ranks[0]):
            if local.rule.stage is Stage.last_copy:
                continue
            key = (id(local.rule), local.layer, local.expert, local.index)
            holders.setdefault(key, (local, []))[1].extend(ranks)
    return list(holders.values())


def _runs(pieces: list[Piece], dim: int) -> list[tuple[TensorSlice, tuple[Piece, ...]]]:
    """(region, its pieces in order) for each run of ``pieces`` of one tensor that follow one another along ``dim``.

    A rank holds one run of a tensor, or several where projections are fused in the checkpoint.
    """
    runs: list[list[Piece]] = []
    for piece in sorted(pieces, key=lambda piece: piece.hf_start):
        last = runs[-1][-1] if runs else None
        if last is None or last.hf_start[dim] + last.shape[dim] != piece.hf_start[dim]:
            runs.append([])
        runs[-1].append(piece)
    joined = []
    for run in runs:
        shape = list(run[0].shape)
        shape[dim] = sum(piece.shape[dim] for piece in run)
        joined.append((TensorSlice(run[0].hf_start, tuple(shape)), tuple(run)))
    return joined


def _cover_problem(table: Table, name: str, parts: list[OwnedPart]) -> str | None:
    """Why ``parts``, in order, do not cover tensor ``name`` exactly once; None if they do."""
    shape = table.hf_tensors[name].shape
    remedy = f"Mend its rule in families/{table.family.name}.py"
    if not parts:
        return f"tensor {name}: no rank holds any of it. {remedy}"
    dim, end = parts[0].dim, 0
    for part in parts:
        rest_is_whole = all(
            part.region.start[axis] == 0 and part.region.shape[axis] == size
            for axis, size in enumerate(shape)
            if axis != dim
        )
        if part.dim != dim or part.region.start[dim] != end or not rest_is_whole:
            actual = f"rank {part.owner} holds {part.region.shape} from {part.region.start}"
            return (
                f"tensor {name} of shape {shape}: expected what begins at {end} of dimension {dim}, {actual}. {remedy}"
            )
        end += part.region.shape[dim]
    return None if end == shape[dim] else f"tensor {name} of shape {shape}: nothing holds more than {end}. {remedy}"
