"""Megatron to Hugging Face: a stream of whole tensors on one rank, or a checkpoint directory that all ranks write.

Both follow one plan of which rank gives which part (``owned_parts``), so each Hugging Face tensor is complete exactly
once: the vocabulary's padding is left out, and so is a tied output projection.  A tensor keeps its dtype or is cast on
request, except where the table fixes its dtype (``Rule.dtype``).

``export_stream`` sends parts point to point to one rank.  ``save_hf`` sends nothing: every rank writes its own parts
into files that all ranks plan alike, on a shared file system.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_rl.checkpoints.hf_sidecar_files import copy_sidecar_files
from mcore_rl.checkpoints.rest import Rest, open_files, rest_beside, writer_of
from mcore_rl.checkpoints.safetensors import WINDOW_BYTES, TensorSpec, in_groups
from mcore_rl.checkpoints.sharded_writer import SHARD_BYTES, ShardedWriter
from mcore_rl.checkpoints.stacked import unstacked
from mcore_rl.families.rules import Stage
from mcore_rl.ground.errors import CheckpointError, WeightMapError
from mcore_rl.parallel.agreement import together
from mcore_rl.weights.binding import bind
from mcore_rl.weights.published import PublishedTensors
from mcore_rl.weights.table import LocalTensor, Piece, Table
from mcore_rl.weights.tensor_slice import TensorSlice, row_major_strides, windows
from mcore_rl.weights.views import view_of

BUCKET_BYTES = 512 << 20
ALIGNMENT = 256  # bytes: accelerators copy aligned memory faster


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


Parts = dict[str, list[OwnedPart]]


def owned_parts(table: Table, prefer: int | None = None) -> Parts:
    """The parts of every Hugging Face tensor, in the order of ``table.hf_tensors`` and of the tensor.

    Data, context and expert-data parallel ranks hold copies, and tensor ranks hold copies of what is not split; each
    part gets one owner, so that all ranks give about equally many elements.  Integers only: every rank computes the
    same plan.  The parts of a Hugging Face tensor cover it exactly.

    prefer: the owner of every part that it holds (it is the gather destination, so it need not send them).  A tied
    output projection is a copy of the embedding and owns nothing.
    Raises WeightMapError with every tensor whose parts overlap or leave a gap.
    """
    given = [0] * table.layout.world_size  # elements
    parts: Parts = {name: [] for name in table.hf_tensors}
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
    dim = parts[0].dim
    end = 0
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


class _Source:
    """This rank's live tensors, merged with their adapters, as parts of Hugging Face tensors."""

    def __init__(self, chunks: Sequence[torch.nn.Module], table: Table, rank: int, dtype: torch.dtype | None) -> None:
        bound = bind(chunks, table, rank)
        kept = {each.tensor.dtype for each in bound if each.local.rule.dtype is None}
        assert len(kept) == 1, f"the weights have several dtypes: {kept}"
        (live,) = kept
        self.device = bound[0].tensor.device
        stored = {(each.local.chunk, each.local.name): each.tensor for each in bound}
        self._tensors = PublishedTensors(stored)
        self.specs = {
            name: TensorSpec(name, getattr(torch, info.dtype) if info.dtype else dtype or live, info.shape)
            for name, info in table.hf_tensors.items()
        }
        self.dtype = dtype or live

    def pieces(self, part: OwnedPart) -> Iterator[tuple[TensorSlice, Tensor]]:
        """(region within ``part.region``, the live elements in their own dtype)."""
        local = self._tensors[part.local.chunk, part.local.name]
        for piece in part.pieces:
            yield piece.hf_region.within(part.region), view_of(local, piece.local_region)

    def fill(self, part: OwnedPart, out: Tensor) -> None:
        """Copy ``part`` to ``out``, a tensor of its shape, and cast."""
        for region, live in self.pieces(part):
            view_of(out, region).copy_(live)

    def packed(self, part: OwnedPart) -> Tensor:
        """``part`` as one contiguous tensor in the export's dtype; the live memory itself if it is already that."""
        dtype = self.specs[part.hf].dtype
        pieces = list(self.pieces(part))
        if len(pieces) == 1 and pieces[0][1].is_contiguous() and pieces[0][1].dtype == dtype:
            return pieces[0][1]
        out = torch.empty(part.region.shape, dtype=dtype, device=self.device)
        self.fill(part, out)
        return out


def export_stream(
    chunks: Sequence[torch.nn.Module],
    table: Table,
    rank: int,
    *,
    bucket_bytes: int = BUCKET_BYTES,
    dst: int = 0,
    dtype: torch.dtype | None = None,
) -> Iterator[list[tuple[str, Tensor]]]:
    """Every Hugging Face tensor, whole, in buckets of at most ``bucket_bytes`` (or one tensor), on rank ``dst``.

    Names are the tables': experts that the files stack come one by one (``families/stacks.py``).

    Collective over the ranks of the table, which are all: every rank must exhaust its iterator; only ``dst`` gets
    buckets.  Tensors are new, on the device of the weights, in the order of ``table.hf_tensors``, and the caller
    may keep them; the tensors of a bucket share one block of memory.  A receiver that drops each bucket before asking
    for the next holds one bucket, plus a second copy of parts that arrive as columns; a sender holds at most its share
    of a bucket.

    dtype: cast to it; None keeps the dtype of the weights.  Raises WeightMapError if modules and table disagree.
    """
    source = _Source(chunks, table, rank, dtype)
    parts = owned_parts(table, prefer=dst)
    if table.layout.world_size > 1:
        _assert_one_plan(parts, source, table)
    for specs in in_groups(source.specs.values(), bucket_bytes):
        bucket = _gather(specs, parts, source, rank, dst)
        if rank == dst:
            yield bucket
        del bucket


@torch.no_grad()  # not on the generator: torch's wrapper of one would keep each bucket until the next is made
def _gather(
    specs: Sequence[TensorSpec], parts: Parts, source: _Source, rank: int, dst: int
) -> list[tuple[str, Tensor]]:
    """One bucket on ``dst``; the other ranks send what they own of it, and get an empty list."""
    transfers = list[dist.P2POp]()
    landed: list[tuple[Tensor, Tensor]] = []
    bucket = _empty_bucket(specs, source.device) if rank == dst else {}
    for spec in specs:
        for part in parts[spec.name]:
            if part.owner == rank == dst:
                source.fill(part, view_of(bucket[spec.name], part.region))
            elif part.owner == rank:
                transfers.append(_transfer(dist.isend, source.packed(part), dst))
            elif rank == dst:
                place = arriving = view_of(bucket[spec.name], part.region)
                if not place.is_contiguous():  # rows arrive where they belong; columns have gaps between them
                    arriving = torch.empty(place.shape, dtype=place.dtype, device=place.device)
                    landed.append((place, arriving))
                transfers.append(_transfer(dist.irecv, arriving, part.owner))
    if transfers:
        for work in dist.batch_isend_irecv(transfers):
            work.wait()
    for place, arriving in landed:
        place.copy_(arriving)
    return list(bucket.items())


def _empty_bucket(specs: Sequence[TensorSpec], device: torch.device) -> dict[str, Tensor]:
    """Tensors side by side in one block of memory, which is freed as one."""
    starts = [0]
    for spec in specs:
        starts.append(starts[-1] + -(-spec.num_bytes // ALIGNMENT) * ALIGNMENT)
    block = torch.empty(starts[-1], dtype=torch.uint8, device=device)
    return {
        spec.name: block[start : start + spec.num_bytes].view(spec.dtype).view(spec.shape)
        for spec, start in zip(specs, starts, strict=False)
    }


def _transfer(kind: Callable[..., object], tensor: Tensor, peer: int) -> dist.P2POp:
    # As bytes: not every backend sends every dtype.
    return dist.P2POp(kind, tensor.reshape(-1).view(torch.uint8), peer)


def _assert_one_plan(parts: Parts, source: _Source, table: Table) -> None:
    """Assert that all ranks plan alike; otherwise they would wait for each other for ever.

    The collective also sets the default group up for the transfers.
    """
    assert dist.get_world_size() == table.layout.world_size, "the processes are of another world than the table"
    plan = [(source.specs[name], [(part.owner, part.region) for part in held]) for name, held in parts.items()]
    mine = zlib.crc32(repr(plan).encode())
    bounds = torch.tensor([mine, -mine], device=source.device)
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX)
    assert bounds.tolist() == [mine, -mine], "the ranks export different models, layouts or dtypes"


@torch.no_grad()
def save_hf(
    chunks: Sequence[torch.nn.Module],
    table: Table,
    rank: int,
    directory: Path | str,
    source: Path | str | None,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = SHARD_BYTES,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Write the model as a Hugging Face checkpoint into the new ``directory``, which all ranks see.

    Collective over all ranks.  Rank 0 creates the files, every rank writes its own parts, and rank 0 checks
    that all are there before the directory gets its name.

    source: a checkpoint directory; its config.json (with the dtype corrected), tokenizer and other files that are not
    weights are copied, and of a multimodal one what is not trained, too; None writes weights alone.  dtype: cast to it;
    None keeps the dtype of the weights.  progress: called with the number of bytes that this rank just wrote.

    Raises on every rank what went wrong on any: WeightMapError if modules and table disagree; CheckpointError as
    ``ShardedWriter`` does, and if ``source`` is no checkpoint directory.  After an error nothing has the name
    ``directory``.
    """

    def plan() -> tuple[_Source, Parts, Rest | None]:
        rest = rest_beside(table, Path(source)) if source is not None else None
        return _Source(chunks, table, rank, dtype), owned_parts(table), rest

    device = next(tensor for chunk in chunks for tensor in chunk.parameters()).device
    live, parts, rest = together(plan, None, device)
    specs = list(live.specs.values())

    def create() -> ShardedWriter | None:
        if rank != 0:
            return None
        writer = writer_of(directory, specs, table, rest, max_shard_bytes=max_shard_bytes)
        if source is not None:
            pictures = table.model.vision is not None
            copy_sidecar_files(Path(source), writer.incomplete, live.dtype, head=table.head, pictures=pictures)
        return writer

    created = together(create, None, device)

    def write() -> ShardedWriter:
        writer = created or writer_of(directory, specs, table, rest, max_shard_bytes=max_shard_bytes, joins=True)
        try:
            for held in parts.values():
                for part in held:
                    if part.owner == rank:
                        _write(writer, live, part, progress)
            if writer.joins:
                writer.leave()
        except BaseException:
            writer.abort()
            raise
        return writer

    try:
        writer = together(write, None, device)
    except BaseException:
        if created is not None:
            created.abort()
        raise

    def finish() -> None:
        if rank == 0:
            for name, held in parts.items():
                for part in held:
                    if part.owner != rank:
                        writer.note_written(name, part.region)
            if rest is not None:
                rest.write(writer)
            writer.finish(verify=lambda written: _verify(written, live.specs, table, rest))

    together(finish, None, device)


def _write(writer: ShardedWriter, live: _Source, part: OwnedPart, progress: Callable[[int], None] | None) -> None:
    dtype = live.specs[part.hf].dtype
    for region, tensor in live.pieces(part):
        # Cast window by window: a second copy of an embedding may not fit.
        limit = WINDOW_BYTES // max(dtype.itemsize, tensor.dtype.itemsize)
        whole = TensorSlice.whole(tensor.shape)
        same = tensor.dtype == dtype
        for window in [whole] if same else windows(whole, row_major_strides(tensor.shape), limit):
            origins = zip(part.region.start, region.start, window.start, strict=True)
            place = TensorSlice(tuple(map(sum, origins)), window.shape)
            writer.write_slice(part.hf, place, view_of(tensor, window).to(dtype))
            if progress is not None:
                progress(prod(window.shape) * dtype.itemsize)


def _verify(directory: Path, specs: Mapping[str, TensorSpec], table: Table, rest: Rest | None) -> None:
    """Read the headers back: every tensor is there, and every file is as long as it must be; and all of ``rest``."""
    pictures = table.model.vision is not None
    if rest is not None:
        rest.demand_same(directory)
    with unstacked(open_files(directory, pictures=pictures), table) as checkpoint:
        stored = {name: TensorSpec(info.name, info.dtype, info.shape) for name, info in checkpoint.tensors.items()}
    wrong = [name for name in {**specs, **stored} if specs.get(name) != stored.get(name)]
    if wrong:
        problems = [
            f"tensor {name}: expected {specs.get(name)} and found {stored.get(name)}. Export again" for name in wrong
        ]
        raise CheckpointError(str(directory), problems)
