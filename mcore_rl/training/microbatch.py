"""From ragged sequences to the tensors that one rank feeds to its model, and back.

A microbatch is either packed (``thd``: sequences end to end, with only the few tokens of padding that context and
sequence parallelism need to split evenly) or unpacked (``sbhd``: one row a sequence, padded to the longest).  All
tensors are in *predictor* order: a row holds the position whose output predicts a token, and that token's own label,
mask and log-probs.  ``targets_N`` maps each row to its token's place in the batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from mcore_rl.data.packing import budget_violations, chunk_fixed, pack, pack_into, padded_length
from mcore_rl.data.pairs import MEMBERS, units_of
from mcore_rl.data.shared_prompts import Stem, parted, stems_of, within_budget
from mcore_rl.ground.errors import Violation, refuse_if_any
from mcore_rl.ground.types import Picture, TrainBatch
from mcore_rl.parallel.context import padded_lengths, rows_multiple, split_indices
from mcore_rl.parallel.groups import ProcessGroups
from mcore_rl.training.sequences import PackedSequences

NOWHERE = -1


@dataclass(frozen=True, kw_only=True)
class SharedRows:
    """What the rows of a microbatch stand for in which trunks are shared (``data/shared_prompts.py``).

    A run is a trunk, a branch or a whole sequence.  R: runs.
    counts_N: float32, the sequences that a row is of; 0 for padding.  run_N: a row's run; ``NOWHERE`` for padding.
    parts_SR: float32, 1 where a run is a part of a sequence.
    from_C, to_C: tokens of the batch that a trunk computes for others, and theirs.  saved: how many there are.
    """

    counts_N: Tensor
    run_N: Tensor
    parts_SR: Tensor
    from_C: Tensor
    to_C: Tensor

    @property
    def saved(self) -> int:
        """The tokens that are not computed again."""
        return self.to_C.numel()


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """One rank's tensors for one forward pass.  N: local rows, the padded tokens of the microbatch / cp.

    tokens, position_ids: [B, N/B]; B is 1 when packed.  width: padded tokens of a row over all context ranks.
    labels_N: the token that each row predicts, 0 if none.
    sources_N: index in the batch of the token that a row reads; ``NOWHERE`` for padding.
    targets_N: index in the batch of the token that a row predicts; ``NOWHERE`` for padding and a sequence's last token.
    sequence_N: index in this microbatch of the row's sequence, ``NOWHERE`` for padding and for rows of a trunk.
    router_rows_M: rows that this tensor rank's routers see (sequence parallelism), in their order.
    members, lengths: index in the batch and tokens of each sequence.  packed: None when unpacked.
    shared: None where no sequences share rows.
    pictures: of all sequences, each once, whose features lie one behind another.  feature_N: the feature that takes the
    place of a row's embedding; ``NOWHERE`` for text; None in a batch without pictures.  patches: see ``TrainBatch``.
    """

    index: int
    width: int
    tokens: Tensor
    position_ids: Tensor
    labels_N: Tensor
    sources_N: Tensor
    targets_N: Tensor
    sequence_N: Tensor
    router_rows_M: Tensor
    members: tuple[int, ...]
    lengths: tuple[int, ...]
    packed: PackedSequences | None
    shared: SharedRows | None = None
    pictures: tuple[Picture, ...] = ()
    feature_N: Tensor | None = None
    patches: Mapping[str, NDArray[np.uint8]] = field(default_factory=dict)

    def at_targets(self, field_T: Tensor | None) -> Tensor | None:
        """A per-token field of the batch in predictor order; zero (False) for rows without a target."""
        if field_T is None:
            return None
        picked = field_T[self.targets_N.clamp(min=0)]
        return picked.masked_fill(self.targets_N == NOWHERE, 0)

    def extra_at_targets(self, extra_T: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """``at_targets`` of fields by name, ``NAME_T``, as ``NAME_N``."""
        picked = {name: self.at_targets(field_T) for name, field_T in extra_T.items()}
        return {f"{name.removesuffix('_T')}_N": x_N for name, x_N in picked.items() if x_N is not None}

    def extra_of_sequences(self, extra_S: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The batch's numbers of this microbatch's sequences, [num_sequences] each."""
        return {name: x_S[list(self.members)].to(self.tokens.device) for name, x_S in extra_S.items()}

    def pairs(self, pairs_S: Sequence[int | None] | None) -> Tensor | None:
        """``LossInputs.pairs_P2``.  pairs_S: of the batch."""
        if pairs_S is None:
            return None
        pairs = [unit for unit in units_of([pairs_S[member] for member in self.members]) if len(unit) == MEMBERS]
        return torch.tensor(pairs, dtype=torch.int64, device=self.tokens.device).view(-1, MEMBERS)

    def scatter_to_targets(self, values_N: Tensor, out_T: Tensor) -> None:
        """Write per-row results to the predicted tokens' places in the batch.

        out_T has one place more than the batch has tokens: the last one takes what rows without a target say.  (To
        leave these out, the host would have to wait until it knows how many there are.)
        """
        assert NOWHERE == -1, "an index from the end"
        out_T[self.targets_N] = values_N.to(out_T.dtype)
        if self.shared is not None:  # rows of a trunk are of tokens 0 to k - 1, and predict tokens 1 to k
            out_T[self.shared.to_C + 1] = out_T[self.shared.from_C + 1]


def split_multiple(groups: ProcessGroups) -> int:
    """``rows_multiple`` of a layout."""
    return rows_multiple(groups.layout.cp, groups.layout.tp)


def rows_per_context_rank(tokens: int | None, groups: ProcessGroups) -> int:
    """The rows that a context rank has of a full microbatch of at most ``tokens``."""
    assert tokens is not None, "unpacked microbatches are as wide as their sequences"
    return tokens // split_multiple(groups) * split_multiple(groups) // groups.layout.cp


def build_microbatches(
    batch: TrainBatch,
    groups: ProcessGroups,
    *,
    tokens: int | None,
    sequences: int | None,
    equal_over_experts: bool,
    fill: bool = False,
    patches: int | None = None,
    share_prompts: bool = False,
) -> list[Microbatch]:
    """Cut this data-parallel rank's batch into microbatches; both sequences of a pair go into one.

    Give either ``tokens``: pack up to so many tokens into each; or ``sequences``: put so many unpacked sequences into
    each, fewer into the last one and before a pair that does not fit.
    equal_over_experts: give all ranks that share experts equally many rows (the all-gather dispatcher needs that).
    fill: pad each to ``tokens``, which must be given (``tp_comm_overlap`` needs that).
    share_prompts: compute a prompt once for those of its samples that are in one microbatch; needs ``tokens``, cp=1 and
    no pairs.
    patches: the most of a packed microbatch's pictures.
    Raises ConfigError when a sequence or a pair has more than ``tokens``, ``sequences`` or ``patches``.  Collective
    over the data-parallel ranks.
    """
    budget = None
    units = units_of(batch.pairs_S or [None] * len(batch.lengths_S))
    refuse_if_any(
        [*_unit_violations(batch, units, groups, tokens, sequences), *_patch_violations(batch, units, patches)]
    )
    assert tokens is not None or batch.positions_T3 is None, "an engine of a model that sees pictures packs"
    if tokens is not None:
        budget = tokens // split_multiple(groups) * split_multiple(groups)
    if share_prompts:
        assert budget is not None and groups.layout.cp == 1, "a trunk is packed whole before its branches"
        assert batch.pairs_S is None, "a pair stays together, whatever its prompts"
        of_units = _shared_units(batch, budget)
    else:
        of_units = [[Stem((index,)) for index in unit] for unit in units]
    plan = _plan(batch, of_units, groups, budget, sequences, patches)
    shapes = [_padded_shape(_run_lengths(stems, batch.lengths_S), groups, packed=tokens is not None) for stems in plan]
    if groups.layout.pp > 1:
        # With one shape for all, stages never ask each other what is coming, which would make the host wait at each
        # transfer (pipeline_parallel/p2p_communication.py, _communicate_shapes) and mixes up two directions at pp=2.
        shapes = [(max(rows for rows, _ in shapes), max(width for _, width in shapes))] * len(shapes)
    if fill:
        assert budget is not None, "unpacked microbatches are as wide as their sequences"
        shapes = [(1, budget)] * len(shapes)
    if equal_over_experts:
        agreed = torch.tensor(shapes, device=groups.device)
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=groups.experts)
        shapes = [(rows, width) for rows, width in agreed.tolist()]
    return [
        _build(index, batch, stems, groups, shape, packed=tokens is not None)
        for index, (stems, shape) in enumerate(zip(plan, shapes, strict=True))
    ]


def _unit_violations(
    batch: TrainBatch, units: Sequence[Sequence[int]], groups: ProcessGroups, tokens: int | None, sequences: int | None
) -> list[Violation]:
    """Violations of sequences and pairs that exceed a microbatch even alone."""
    if tokens is None:
        assert sequences is not None, "either a token budget or a number of sequences"
        if max(map(len, units)) <= sequences:
            return []
        return [Violation("microbatch_sequences", sequences, "parts the two sequences of a pair", "Write 2 or more")]
    multiple = split_multiple(groups)
    cp = groups.layout.cp
    costs = [sum(padded_lengths([batch.lengths_S[i] for i in members], cp)) for members in units]
    unit = "sequence" if batch.pairs_S is None else "pair"
    return budget_violations([padded_length(cost, multiple) for cost in costs], tokens, unit=unit)


def _shared_units(batch: TrainBatch, budget: int) -> list[list[Stem]]:
    """Stems within the budget.

    The host waits for the device twice at most: for the tokens, and for choices of experts to replay, which part
    sequences as tokens do.
    """
    stems = stems_of(batch.tokens_T.cpu().numpy(), batch.mask_T.cpu().numpy(), batch.lengths_S)
    if batch.routing_TLK is not None:
        stems = _routed_alike(batch, stems)
    return [[part] for stem in stems for part in within_budget(stem, batch.lengths_S, budget)]


def _routed_alike(batch: TrainBatch, stems: Sequence[Stem]) -> list[Stem]:
    """``stems`` with trunks that end where the choices of experts to replay differ."""
    assert batch.routing_TLK is not None
    starts = batch.offsets_S
    alike = []
    for stem in stems:
        first, *others = (slice(starts[index], starts[index] + stem.shared) for index in stem.members)
        for other in others:
            same_C = (batch.routing_TLK[first] == batch.routing_TLK[other]).flatten(1).all(1)
            if batch.unrouted_T is not None:
                free_C = batch.unrouted_T[first]
                other_free_C = batch.unrouted_T[other]
                same_C = (free_C & other_free_C) | (same_C & (free_C == other_free_C))
            alike.append(same_C.long().cumprod(0).sum())
    if not alike:
        return list(stems)
    shared = iter(torch.stack(alike).tolist())
    routed = [Stem(stem.members, min((next(shared) for _ in stem.members[1:]), default=0)) for stem in stems]
    return [part for stem in routed for part in parted(stem)]


def _patch_violations(batch: TrainBatch, units: Sequence[Sequence[int]], patches: int | None) -> list[Violation]:
    """Violations of sequences and pairs whose pictures exceed a microbatch even alone."""
    if patches is None:
        return []
    patches_S = batch.patches_S
    costs = [sum(patches_S[index] for index in members) for members in units]
    return budget_violations(costs, patches, "microbatch_patches", what="patches")


def _costs(batch: TrainBatch, groups: ProcessGroups, budget: int | None, patches: int | None) -> list[int]:
    """What each sequence takes of a microbatch's ``budget`` of tokens.

    Of one with pictures as large a share as it has of the tokens or of the ``patches``, whichever is the larger: a
    microbatch within the budget then holds neither too many tokens nor too many patches.
    """
    costs = list(padded_lengths(batch.lengths_S, groups.layout.cp))
    if budget is None or patches is None:
        return costs
    shares = [-(-count * budget // patches) for count in batch.patches_S]
    return [max(pair) for pair in zip(costs, shares, strict=True)]


def _plan(
    batch: TrainBatch,
    units: Sequence[Sequence[Stem]],
    groups: ProcessGroups,
    budget: int | None,
    sequences: int | None,
    patches: int | None,
) -> list[list[Stem]]:
    """Which stems go into which microbatch, by their first members; some microbatches may be empty.

    All data-parallel ranks run equally many, because experts and gradient reduction are collective over them; with an
    interleaved pipeline, a multiple of pp.
    """

    def stems_in(placed: Sequence[Sequence[int]]) -> list[list[Stem]]:
        return [sorted((stem for unit in chosen for stem in units[unit]), key=_first) for chosen in placed]

    costs_S = _costs(batch, groups, budget, patches)
    costs = [sum(sum(costs_S[index] for index in stem.members) - stem.saved for stem in unit) for unit in units]
    if budget is not None:
        plan = pack(costs, budget)
    else:
        assert sequences is not None
        plan = chunk_fixed([len(unit) for unit in units], sequences)
    count = torch.tensor(len(plan), device=groups.device)
    dist.all_reduce(count, op=dist.ReduceOp.MAX, group=groups.dp)
    num_microbatches = int(count)
    if groups.layout.vpp > 1:
        num_microbatches = padded_length(num_microbatches, groups.layout.pp)
    if budget is not None:
        return stems_in(pack_into(costs, num_microbatches, budget))
    return stems_in(plan) + [[] for _ in range(num_microbatches - len(plan))]


def _first(stem: Stem) -> int:
    return stem.members[0]


def _run_lengths(stems: Sequence[Stem], lengths: Sequence[int]) -> list[int]:
    """The tokens of each run of ``stems``: a trunk if there is one, then each branch."""
    runs = list[int]()
    for stem in stems:
        runs += [stem.shared] * (stem.shared > 0)
        runs += [lengths[index] - stem.shared for index in stem.members]
    return runs


def _padded_shape(lengths: Sequence[int], groups: ProcessGroups, *, packed: bool) -> tuple[int, int]:
    """(rows, width) of the padded microbatch, over all context ranks."""
    if packed:
        total = sum(padded_lengths(lengths, groups.layout.cp))
        return 1, padded_length(max(total, 1), split_multiple(groups))
    return max(len(lengths), 1), padded_length(max(lengths, default=1), split_multiple(groups))


@dataclass(frozen=True)
class _Run:
    """Neighbouring rows: a trunk, a branch or a whole sequence.

    length: tokens.  start: of its first token in the batch.  predicting: rows that predict the token behind them.
    slot: number of its sequence in the microbatch, ``NOWHERE`` for a trunk.  first: position of its first token.
    trunk: number of the run that it continues.  count: sequences that it is a part of.
    """

    length: int
    start: int
    predicting: int
    slot: int
    first: int = 0
    trunk: int | None = None
    count: int = 1


def _runs(stems: Sequence[Stem], batch: TrainBatch) -> list[_Run]:
    starts = batch.offsets_S
    lengths = batch.lengths_S
    runs = list[_Run]()
    slot = 0
    for stem in stems:
        trunk = None
        if stem.shared:
            trunk = len(runs)
            runs.append(_Run(stem.shared, starts[_first(stem)], stem.shared, NOWHERE, count=len(stem.members)))
        for index in stem.members:
            length = lengths[index] - stem.shared
            runs.append(_Run(length, starts[index] + stem.shared, length - 1, slot, stem.shared, trunk))
            slot += 1
    return runs


def _build(
    index: int,
    batch: TrainBatch,
    stems: Sequence[Stem],
    groups: ProcessGroups,
    shape: tuple[int, int],
    *,
    packed: bool,
) -> Microbatch:
    """This rank's microbatch of ``stems``.  Without any it is padding, which trains nothing."""
    rows, width = shape
    runs = _runs(stems, batch)
    members = [member for stem in stems for member in stem.members]
    lengths = tuple(batch.lengths_S[i] for i in members)
    if packed:
        padded = list(padded_lengths([run.length for run in runs], groups.layout.cp)) or [0]
        # The last sequence takes the padding that makes the whole divide; causal attention never looks at it.
        padded[-1] += width - sum(padded)
    else:
        padded = [width] * rows

    sources = []
    targets = []
    slots = []
    positions = []
    nothing = _Run(0, 0, 0, NOWHERE)
    for number, padded_size in enumerate(padded):
        run = runs[number] if number < len(runs) else nothing
        position = torch.arange(padded_size)
        sources.append(torch.where(position < run.length, run.start + position, NOWHERE))
        targets.append(torch.where(position < run.predicting, run.start + position + 1, NOWHERE))
        slots.append(torch.where(position < run.length, run.slot, NOWHERE))
        positions.append(run.first + position)
    layout = groups.layout
    coords = groups.coords
    device = groups.device
    mine = split_indices(tuple(padded), layout.cp, coords.cp)
    sources_N, targets_N, sequence_N, positions_N = (
        torch.cat(parts)[mine].to(device) for parts in (sources, targets, slots, positions)
    )
    tokens_T = batch.tokens_T
    packing = None
    if packed:
        real = [run.length for run in runs] or [1]
        trunks = tuple(run.trunk for run in runs)
        packing = PackedSequences.of(
            real,
            tuple(padded),
            cp=layout.cp,
            cp_rank=coords.cp,
            device=device,
            trunks=trunks if any(trunk is not None for trunk in trunks) else (),
        )
        if batch.positions_T3 is not None:
            held_N3 = batch.positions_T3[sources_N.clamp(min=0)]
            packing.positions_3N = held_N3.masked_fill(sources_N[:, None] == NOWHERE, 0).T.contiguous()
    pictures, feature_N = _pictures(batch, members, sources_N, sequence_N)
    return Microbatch(
        index=index,
        width=width,
        tokens=torch.where(sources_N == NOWHERE, 0, tokens_T[sources_N.clamp(min=0)]).view(rows, -1),
        position_ids=positions_N.view(rows, -1),
        labels_N=torch.where(targets_N == NOWHERE, 0, tokens_T[targets_N.clamp(min=0)]),
        sources_N=sources_N,
        targets_N=targets_N,
        sequence_N=sequence_N,
        router_rows_M=_router_rows(rows, sources_N.numel() // rows, layout.tp, coords.tp).to(device),
        members=tuple(members),
        lengths=lengths,
        packed=packing,
        shared=_shared_rows(runs, stems, batch, padded, device) if packing is not None and packing.trunks else None,
        pictures=pictures,
        feature_N=feature_N,
        patches=batch.patches,
    )


def _shared_rows(
    runs: Sequence[_Run], stems: Sequence[Stem], batch: TrainBatch, padded: Sequence[int], device: torch.device
) -> SharedRows:
    run_N = torch.cat(
        [
            torch.where(torch.arange(padded_size) < run.length, number, NOWHERE)
            for number, (run, padded_size) in enumerate(zip(runs, padded, strict=True))
        ]
    )
    counts_R = torch.tensor([float(run.count) for run in runs])
    parts_SR = torch.zeros(sum(len(stem.members) for stem in stems), len(runs))
    for number, run in enumerate(runs):
        if run.slot != NOWHERE:
            parts_SR[run.slot, number] = 1.0
            if run.trunk is not None:
                parts_SR[run.slot, run.trunk] = 1.0
    starts = batch.offsets_S
    copies = [(starts[_first(stem)], starts[index], stem.shared) for stem in stems for index in stem.members[1:]]
    from_C, to_C = (torch.cat([torch.arange(copy[side], copy[side] + copy[2]) for copy in copies]) for side in (0, 1))
    return SharedRows(
        counts_N=torch.where(run_N == NOWHERE, 0.0, counts_R[run_N.clamp(min=0)]).to(device),
        run_N=run_N.to(device),
        parts_SR=parts_SR.to(device),
        from_C=from_C.to(device),
        to_C=to_C.to(device),
    )


def _pictures(
    batch: TrainBatch, members: Sequence[int], sources_N: Tensor, sequence_N: Tensor
) -> tuple[tuple[Picture, ...], Tensor | None]:
    """(the pictures of ``members``, each once; the feature of each row).  The device is not waited for."""
    if batch.images_S is None or batch.feature_T is None:
        return (), None
    pictures = {image.key: image for member in members for image in batch.images_S[member]}
    first = dict[str, int]()
    num_features = 0
    for key, image in pictures.items():
        first[key] = num_features
        num_features += image.tokens
    places, begins = [torch.zeros(0, dtype=torch.int64)], [0]  # of each sequence's features, one sequence after another
    for member in members:
        own = [torch.arange(image.tokens) + first[image.key] for image in batch.images_S[member]]
        places += own
        begins.append(begins[-1] + sum(map(len, own)))
    if not num_features:
        return (), torch.full_like(sources_N, NOWHERE)
    device = sources_N.device
    local_N = torch.where(sources_N == NOWHERE, NOWHERE, batch.feature_T[sources_N.clamp(min=0)].long())
    begin_N = torch.tensor(begins, device=device)[sequence_N.clamp(min=0)]
    place_N = torch.where(local_N == NOWHERE, 0, begin_N + local_N)
    return tuple(pictures.values()), torch.where(local_N == NOWHERE, NOWHERE, torch.cat(places).to(device)[place_N])


def _router_rows(rows: int, width: int, tp: int, tp_rank: int) -> Tensor:
    """Hidden states are [width / tp, rows, H] where a router sees them: position-major, and cut along positions."""
    order = torch.arange(rows * width).view(rows, width).t()
    return order.chunk(tp)[tp_rank].reshape(-1)
