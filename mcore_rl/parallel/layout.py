"""The coordinates of every process in a parallel layout, and which layouts fit a model and a number of processes.

Integers only: no torch, no Megatron, no communication, so that a layout of 1,024 processes can be checked and printed
anywhere.  The order of ranks is Megatron-core's default, ``tp-cp-ep-dp-pp`` (``RankGenerator`` in
megatron/core/parallel_state.py, 0.16.1), read twice over the same ranks: as dense coordinates (tp fastest, then cp, dp,
pp) and as expert coordinates (etp fastest, then ep, edp, pp).  The invariant, tested in tests/parallel/test_layout.py:
``Layout.group`` names exactly the groups that ``initialize_model_parallel`` creates.

Microbatches are not checked here; the interleaved schedule needs at least pp of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import product
from math import gcd, isqrt, log2
from typing import Literal

from mcore_rl.config.model import ModelConfig
from mcore_rl.config.parallel import AXES, ParallelConfig
from mcore_rl.ground.errors import Violation, refuse_if_any

GroupAxis = Literal["tp", "cp", "dp", "pp", "ep", "etp", "edp", "dp_cp"]
LayerPlacement = tuple[tuple[int, ...], ...]

DENSE_ORDER = ("tp", "cp", "dp", "pp")
EXPERT_ORDER = ("etp", "ep", "edp", "pp")


@dataclass(frozen=True, kw_only=True)
class Coords:
    """The coordinates of one rank; each is 0 to the size of its axis, exclusive."""

    dp: int
    pp: int
    tp: int
    cp: int
    ep: int
    etp: int
    edp: int

    def __str__(self) -> str:
        return f"dp{self.dp} pp{self.pp} tp{self.tp} cp{self.cp} ep{self.ep}"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes of all axes of a world.

    dp: data parallel, world_size / (tp * pp * cp).  edp: data parallel of the experts, world_size / (etp * ep * pp).
    """

    tp: int
    pp: int
    vpp: int
    cp: int
    ep: int
    etp: int
    dp: int
    edp: int
    world_size: int

    @classmethod
    def of(cls, parallel: ParallelConfig, world_size: int) -> Layout:
        """The layout of ``parallel`` over ``world_size`` processes.

        Raises ConfigError if an axis is not positive or the axes do not divide the world.
        """
        refuse_if_any(_size_violations(parallel, world_size) or _world_violations(parallel, world_size))
        sizes = {axis: getattr(parallel, axis) for axis in AXES}
        dp = world_size // (parallel.tp * parallel.pp * parallel.cp)
        edp = world_size // (parallel.etp * parallel.ep * parallel.pp)
        return cls(dp=dp, edp=edp, world_size=world_size, **sizes)

    def coords(self, rank: int) -> Coords:
        """Coordinates of ``rank``."""
        assert 0 <= rank < self.world_size, f"rank {rank} of a world of {self.world_size}"
        at = {axis: rank // stride % size for order in self._grids() for axis, size, stride in order}
        return Coords(**at)

    def rank_of(self, *, tp: int, cp: int, dp: int, pp: int) -> int:
        """The rank at dense coordinates; ``coords`` is its inverse."""
        at = {"tp": tp, "cp": cp, "dp": dp, "pp": pp}
        dense, _ = self._grids()
        assert all(0 <= at[axis] < size for axis, size, _ in dense), f"{at} is outside {self}"
        return sum(at[axis] * stride for axis, _, stride in dense)

    def group(self, axis: GroupAxis, rank: int) -> tuple[int, ...]:
        """Ranks of ``rank``'s group along ``axis``, ascending; ``dp_cp`` varies both dp and cp."""
        assert 0 <= rank < self.world_size, f"rank {rank} of a world of {self.world_size}"
        varied = axis.split("_")
        grid = next(grid for grid in self._grids() if varied[0] in {name for name, _, _ in grid})
        ranks = [rank]
        for name, size, stride in grid:
            if name in varied:
                ranks = [other + (i - other // stride % size) * stride for other in ranks for i in range(size)]
        return tuple(sorted(ranks))

    def _grids(self) -> tuple[list[tuple[str, int, int]], list[tuple[str, int, int]]]:
        """(axis, size, stride) of the dense and of the expert coordinates, fastest axis first."""
        return self._grid(DENSE_ORDER), self._grid(EXPERT_ORDER)

    def _grid(self, order: Iterable[str]) -> list[tuple[str, int, int]]:
        grid = []
        stride = 1
        for axis in order:
            grid.append((axis, getattr(self, axis), stride))
            stride *= getattr(self, axis)
        return grid


def balanced_layers(num_layers: int, num_chunks: int) -> list[int]:
    """``num_layers`` over ``num_chunks`` as evenly as possible, the longer chunks first: 13 over 4 is [4, 3, 3, 3].

    The last chunk, which also holds the output projection, is never longer than another.
    """
    shortest, longer = divmod(num_layers, num_chunks)
    return [shortest + (chunk < longer) for chunk in range(num_chunks)]


def place_layers(num_layers: int, parallel: ParallelConfig) -> LayerPlacement:
    """Global layer numbers (from 0) of each model chunk, in the order of the forward pass.

    Chunk ``c`` is model chunk ``c // pp`` of pipeline stage ``c % pp`` and has ``parallel.pipeline_layers[c]`` layers;
    None: all chunks have equally many, if the layers divide.  Every layer is in exactly one chunk.
    Raises ConfigError if the placement is missing or does not add up.
    """
    refuse_if_any(_placement_violations(num_layers, parallel))
    counts = parallel.pipeline_layers or balanced_layers(num_layers, parallel.pp * parallel.vpp)
    starts = [sum(counts[:chunk]) for chunk in range(len(counts))]
    return tuple(tuple(range(start, start + count)) for start, count in zip(starts, counts, strict=True))


def describe_placement(num_layers: int, parallel: ParallelConfig) -> str:
    """A table to print: which pipeline stage holds which chunks of the model.

    Raises ConfigError as ``place_layers`` does.
    """
    placement = place_layers(num_layers, parallel)
    lines = [f"{num_layers} layers over pp={parallel.pp}, vpp={parallel.vpp}", "stage  chunk  layers"]
    for stage in range(parallel.pp):
        for chunk in range(stage, len(placement), parallel.pp):
            layers = placement[chunk]
            span = f"{layers[0]}" if len(layers) == 1 else f"{layers[0]}-{layers[-1]}"
            first = "embedding, " if chunk == 0 else ""
            last = ", output" if chunk == len(placement) - 1 else ""
            lines.append(f"{stage:>5}  {chunk // parallel.pp:>5}  {first}{span}{last}  ({len(layers)})")
    return "\n".join(lines)


def layout_violations(model: ModelConfig, parallel: ParallelConfig, world_size: int) -> list[Violation]:
    """Every reason why ``model`` cannot run as ``parallel`` on ``world_size`` processes.

    The remedy of the last violation names the nearest layouts that fit.
    """
    violations = _size_violations(parallel, world_size)
    if violations:
        return violations  # the rules below divide by these sizes
    violations = _world_violations(parallel, world_size)
    violations += _model_violations(model, parallel)
    placement = _placement_violations(model.num_layers, parallel)
    violations += placement or _deepstack_violations(model, parallel)
    nearest = nearest_layouts(model, parallel, world_size) if violations else []
    if nearest:
        texts = "; ".join(layout_text(layout) for layout in nearest)
        hint = f"{violations[-1].remedy}. Nearest layouts that fit {_processes(world_size)}: {texts}"
        violations[-1] = replace(violations[-1], remedy=hint)
    return violations


def nearest_layouts(
    model: ModelConfig, parallel: ParallelConfig, world_size: int, count: int = 3
) -> list[ParallelConfig]:
    """At most ``count`` layouts that fit, the nearest to ``parallel`` first.

    The distance is the sum over the axes of |log2(size / wanted size)|, plus 1 if layers do not divide evenly.  For a
    given pp the choices of (tp, cp), (ep, etp) and vpp do not constrain each other, so the nearest layouts are among
    the products of the nearest few of each; the search takes milliseconds for thousands of processes.
    """
    limits = {axis: gcd(*by_key.values()) for axis, by_key in divisor_limits(model).items()}
    ranked = []
    for pp in (size for size in divisors(world_size) if size <= model.num_layers):
        stage = world_size // pp
        tp_cp = [(tp, cp) for tp in tensor_sizes(model, stage) for cp in divisors(stage // tp)]
        ep_etp = [(ep, etp) for ep in divisors(gcd(stage, limits["ep"])) for etp in divisors(stage // ep)]
        dense = [(_far(tp, parallel.tp) + _far(cp, parallel.cp), tp, cp) for tp, cp in tp_cp if cp <= _max_cp(model)]
        expert = [
            (_far(ep, parallel.ep) + _far(etp, parallel.etp), ep, etp) for ep, etp in ep_etp if limits["etp"] % etp == 0
        ]
        chunks = [
            (_far(vpp, parallel.vpp) + (model.num_layers % (pp * vpp) > 0), vpp)
            for vpp in range(1, model.num_layers // pp + 1 if pp > 1 else 2)
            if model.num_layers // (pp * vpp) >= _num_deepstack(model)
        ]
        shortlists = product(sorted(dense)[:count], sorted(expert)[:count], sorted(chunks)[:count])
        for (far_dense, tp, cp), (far_expert, ep, etp), (far_chunks, vpp) in shortlists:
            layout = ParallelConfig(tp=tp, pp=pp, vpp=vpp, cp=cp, ep=ep, etp=etp)
            ranked.append((_far(pp, parallel.pp) + far_dense + far_expert + far_chunks, layout))
    ranked.sort(key=lambda entry: (entry[0], [getattr(entry[1], axis) for axis in AXES]))
    return [_with_placement(model.num_layers, layout, parallel.pipeline_layers) for _, layout in ranked[:count]]


def layout_text(parallel: ParallelConfig) -> str:
    """``parallel`` as a user writes it, with its ``pipeline_layers`` if it has some."""
    if parallel.pipeline_layers is None:
        return str(parallel)
    return f"{parallel} with pipeline_layers={_list(parallel.pipeline_layers)}"


def _far(size: int, wanted: int) -> float:
    return abs(log2(size / max(wanted, 1)))


def _with_placement(num_layers: int, layout: ParallelConfig, wanted: list[int] | None) -> ParallelConfig:
    """``layout`` with the ``wanted`` placement if it fits, else the balanced one if one is needed."""
    if wanted is not None and not _placement_violations(num_layers, replace(layout, pipeline_layers=wanted)):
        return replace(layout, pipeline_layers=wanted)
    num_chunks = layout.pp * layout.vpp
    return replace(layout, pipeline_layers=balanced_layers(num_layers, num_chunks) if num_layers % num_chunks else None)


def _size_violations(parallel: ParallelConfig, world_size: int) -> list[Violation]:
    sizes = {f"parallel.{axis}": getattr(parallel, axis) for axis in AXES} | {"world_size": world_size}
    return [Violation(key, n, "must be positive", "Write 1 or more") for key, n in sizes.items() if n < 1]


def _world_violations(parallel: ParallelConfig, world_size: int) -> list[Violation]:
    """The world must be a whole number of model replicas, and of expert replicas."""
    violations = []
    for axes in (("tp", "pp", "cp"), ("etp", "ep", "pp")):
        sizes = [getattr(parallel, axis) for axis in axes]
        replica = sizes[0] * sizes[1] * sizes[2]
        if world_size % replica:
            written = " * ".join(f"{axis}={size}" for axis, size in zip(axes, sizes, strict=True))
            problem = f"is not divisible by {written} = {replica}"
            remedy = f"Start a multiple of {replica} processes, or let these axes multiply to a divisor of {world_size}"
            violations.append(Violation("world_size", world_size, problem, remedy))
    return violations


def divisor_limits(model: ModelConfig) -> dict[str, dict[str, int]]:
    """axis -> {key: number that the axis must divide}; of tp, ``tensor_sizes`` asks for more."""
    tp = {"model.num_attention_heads": model.num_attention_heads}
    if not all(model.has_experts(layer) for layer in range(model.num_layers)):
        tp["model.ffn_hidden_size"] = model.ffn_hidden_size
    if model.linear_attention is not None:
        tp["model.linear_attention.num_key_heads"] = model.linear_attention.num_key_heads
    if model.moe is None:
        return {"tp": tp, "ep": {"experts": 1}, "etp": {"experts": 1}}
    if model.moe.shared_ffn_hidden_size:
        tp["model.moe.shared_ffn_hidden_size"] = model.moe.shared_ffn_hidden_size
    ep = {"model.moe.num_experts": model.moe.num_experts}
    if model.linear_bias:  # each rank would add the expert's bias to the sum; Megatron refuses it too
        return {"tp": tp, "ep": ep, "etp": {"experts with biases": 1}}
    return {"tp": tp, "ep": ep, "etp": {"model.moe.ffn_hidden_size": model.moe.ffn_hidden_size}}


def tensor_sizes(model: ModelConfig, ranks: int) -> list[int]:
    """The sizes of tp that ``model`` allows and that divide ``ranks``, ascending."""
    fit = divisors(gcd(ranks, *divisor_limits(model)["tp"].values()))
    return [tp for tp in fit if _key_heads_problem(model, tp) is None]


def _key_heads_problem(model: ModelConfig, tp: int) -> str | None:
    """Why ``tp`` ranks cannot share the key/value heads, or None.

    With more ranks than key/value heads, Megatron cuts the rows of the fused projection evenly, gathers its outputs,
    and each rank takes its query heads and the key/value head that they share (transformer/attention.py:1398, 0.16.1).
    """
    groups = model.num_query_groups
    heads = model.num_attention_heads
    if groups % tp and tp % groups:
        return f"neither divides model.num_query_groups={groups} nor is a multiple of it"
    if groups % tp and model.joint_qk_norm:
        return f"does not divide model.num_query_groups={groups}, over all of which one norm of the keys goes"
    rows = ((2 if model.attention_output_gate else 1) * heads + 2 * groups) * model.head_dim
    if groups % tp and rows % tp:
        return f"does not divide the {rows} rows of the query, key and value projections"
    return None


def _max_cp(model: ModelConfig) -> int:
    """The largest useful cp: the zig-zag split cuts a sequence into 2 * cp pieces, each of at least one token."""
    return max(1, model.max_position_embeddings // 2)


def _model_violations(model: ModelConfig, parallel: ParallelConfig) -> list[Violation]:
    """Violations of heads, widths, experts and sequence by the axes that split them."""
    violations = []
    for axis, by_key in divisor_limits(model).items():
        size = getattr(parallel, axis)
        limit = gcd(*by_key.values())
        allowed = _nearest(tensor_sizes(model, limit) if axis == "tp" else divisors(limit), size)
        for key, number in by_key.items():
            if number % size == 0:
                continue
            if model.moe is None and axis != "tp":
                problem = "the model has no experts"
                remedy = f"Write parallel.{axis}=1"
            elif axis == "etp" and model.linear_bias:
                problem = "an expert with biases cannot be cut over ranks"
                remedy = "Write parallel.etp=1"
            else:
                problem = f"does not divide {key}={number}"
                remedy = f"Write parallel.{axis}={allowed}"
            violations.append(Violation(f"parallel.{axis}", size, problem, remedy))
        problem_of_keys = _key_heads_problem(model, size) if axis == "tp" else None
        if problem_of_keys is not None:
            violations.append(Violation("parallel.tp", size, problem_of_keys, f"Write parallel.tp={allowed}"))
    if parallel.cp > _max_cp(model):
        longest = f"model.max_position_embeddings={model.max_position_embeddings}"
        problem = f"cuts a sequence into {2 * parallel.cp} pieces, more than {longest} has tokens"
        violations.append(Violation("parallel.cp", parallel.cp, problem, f"Write parallel.cp={_max_cp(model)} or less"))
    return violations


def _placement_violations(num_layers: int, parallel: ParallelConfig) -> list[Violation]:
    """Violations in spreading the layers over the pp * vpp chunks."""
    num_chunks = parallel.pp * parallel.vpp
    counts = parallel.pipeline_layers
    written = f"pp={parallel.pp} * vpp={parallel.vpp}"
    violations = []
    if parallel.vpp > 1 and parallel.pp == 1:
        problem = "model chunks are interleaved over pipeline stages, and parallel.pp=1 is one stage"
        violations.append(
            Violation("parallel.vpp", parallel.vpp, problem, "Write parallel.vpp=1, or parallel.pp=2 or more")
        )
    if num_chunks > num_layers:
        problem = f"{written} is {num_chunks} chunks for {num_layers} layers, and a chunk needs at least one"
        violations.append(Violation("parallel.pp", parallel.pp, problem, f"Make pp * vpp at most {num_layers}"))
        return violations
    balanced = f"Write parallel.pipeline_layers={_list(balanced_layers(num_layers, num_chunks))}"
    if counts is None:
        if num_layers % num_chunks:
            problem = f"{num_layers} layers do not divide over {written} = {num_chunks} chunks, and none is dropped"
            violations.append(Violation("parallel.pp", parallel.pp, problem, balanced))
        return violations
    problems = []
    if len(counts) != num_chunks:
        problems.append(f"has {len(counts)} entries for {written} = {num_chunks} chunks")
    if any(count < 1 for count in counts):
        problems.append("has a chunk without a layer")
    if sum(counts) != num_layers:
        problems.append(f"adds up to {sum(counts)} of {num_layers} layers")
    if problems:
        violations.append(Violation("parallel.pipeline_layers", _list(counts), " and ".join(problems), balanced))
    return violations


def _num_deepstack(model: ModelConfig) -> int:
    """Layers, from the first on, behind which features of pictures are added."""
    return 0 if model.vision is None else len(model.vision.deepstack)


def _deepstack_violations(model: ModelConfig, parallel: ParallelConfig) -> list[Violation]:
    """The features of pictures are made on the first stage, and its first chunk needs all layers that they go to."""
    wanted = _num_deepstack(model)
    first = len(place_layers(model.num_layers, parallel)[0])
    if first >= wanted:
        return []
    num_chunks = parallel.pp * parallel.vpp
    problem = f"gives the first chunk {first} layers, and features of pictures are added behind the first {wanted}"
    remedy = f"Make pp * vpp at most {model.num_layers // wanted}"
    if num_chunks > 1 and model.num_layers - wanted >= num_chunks - 1:
        layers = [wanted, *balanced_layers(model.num_layers - wanted, num_chunks - 1)]
        remedy = f"Write parallel.pipeline_layers={_list(layers)}"
    if parallel.pipeline_layers is not None:
        return [Violation("parallel.pipeline_layers", _list(parallel.pipeline_layers), problem, remedy)]
    return [Violation("parallel.pp", parallel.pp, problem, remedy)]


def divisors(number: int) -> list[int]:
    """All divisors of ``number``, ascending."""
    small = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]


def _nearest(sizes: list[int], wanted: int, count: int = 3) -> str:
    """The ``count`` of ``sizes`` nearest to ``wanted``, in words: ``1, 2 or 4``."""
    *most, last = (str(size) for size in sorted(sorted(sizes, key=lambda size: _far(size, wanted))[:count]))
    return f"{', '.join(most)} or {last}" if most else last


def _list(counts: Iterable[int]) -> str:
    """``[4,3,3,3]``: without spaces, as one argument of a command line."""
    return f"[{','.join(str(count) for count in counts)}]"


def _processes(world_size: int) -> str:
    return "1 process" if world_size == 1 else f"{world_size} processes"
