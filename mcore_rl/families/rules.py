"""The vocabulary of weight tables: which ranges of which Hugging Face tensors a local tensor holds.

One ``Rule`` describes one kind of local tensor.  Along one dimension a local tensor is ranges of Hugging Face tensors,
one after another; every other dimension is whole.  This covers fused projections, gated linears, tensor parallelism,
replicated key/value heads and vocabulary padding.  So a table is data that holds for any size of any axis, and loading,
exporting and resharding read the same table.  The same vocabulary describes Megatron's tensors and vLLM's.  Integers
only: no torch, no communication, and no guessing from pieces of names.

Invariant: over the shards of one rule, every element of its Hugging Face tensors is held, by one shard or by copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import cached_property
from typing import TypeVar

from mcore_rl.config.model import ModelConfig

T = TypeVar("T")


def _of(part: T | None) -> T:
    """``part`` of a model, whose size is asked for."""
    assert part is not None, "a size of a part that the model does not have"
    return part


def num_experts(model: ModelConfig) -> int:
    """Experts of a layer of ``model``, which has some."""
    return _of(model.moe).num_experts


# Name of a Hugging Face tensor's dimension in the tables -> its size.
SIZES: dict[str, Callable[[ModelConfig], int]] = {
    "one": lambda model: 1,
    "vocab": lambda model: model.vocab_size,
    "hidden": lambda model: model.hidden_size,
    "head": lambda model: model.head_dim,
    "query_heads": lambda model: model.num_attention_heads,
    "query": lambda model: model.num_attention_heads * model.head_dim,
    "query_and_gate": lambda model: 2 * model.num_attention_heads * model.head_dim,
    "key": lambda model: model.num_query_groups * model.head_dim,
    "query_key_value": lambda model: (model.num_attention_heads + 2 * model.num_query_groups) * model.head_dim,
    "ffn": lambda model: model.ffn_hidden_size,
    "gate_and_up": lambda model: 2 * model.ffn_hidden_size,
    "experts": num_experts,
    "expert_ffn": lambda model: _of(model.moe).ffn_hidden_size,
    "shared_ffn": lambda model: _of(model.moe).shared_ffn_hidden_size,
    "query_latent": lambda model: _of(model.mla).q_lora_rank or 0,
    "latent": lambda model: _of(model.mla).kv_lora_rank,
    "latent_and_rope": lambda model: _of(model.mla).kv_lora_rank + _of(model.mla).qk_rope_head_dim,
    "key_and_value": lambda model: (
        model.num_attention_heads * (_of(model.mla).qk_nope_head_dim + _of(model.mla).v_head_dim)
    ),
    "value": lambda model: model.num_attention_heads * _of(model.mla).v_head_dim,
    "delta_key": lambda model: _of(model.linear_attention).key_dim,
    "delta_value": lambda model: _of(model.linear_attention).value_dim,
    "delta_qkv": lambda model: 2 * _of(model.linear_attention).key_dim + _of(model.linear_attention).value_dim,
    "delta_qkvz": lambda model: 2 * (_of(model.linear_attention).key_dim + _of(model.linear_attention).value_dim),
    "delta_ba": lambda model: 2 * _of(model.linear_attention).num_value_heads,
    "delta_heads": lambda model: _of(model.linear_attention).num_value_heads,
    "delta_value_head": lambda model: _of(model.linear_attention).value_head_dim,
    "delta_conv": lambda model: _of(model.linear_attention).conv_kernel_dim,
    "colours": lambda model: 3,
    "vision_frames": lambda model: _of(model.vision).temporal_patch_size,
    "vision_patch": lambda model: _of(model.vision).patch_size,
    "vision_hidden": lambda model: _of(model.vision).hidden_size,
    "vision_qkv": lambda model: 3 * _of(model.vision).hidden_size,
    "vision_ffn": lambda model: _of(model.vision).ffn_hidden_size,
    "vision_merged": lambda model: _of(model.vision).hidden_size * _of(model.vision).merge_size ** 2,
    "vision_positions": lambda model: _of(model.vision).num_positions,
}


@dataclass(frozen=True)
class HfTensor:
    """A tensor of a Hugging Face checkpoint.  name: with ``{l}`` layer and ``{e}`` expert.  dims: keys of ``SIZES``."""

    name: str
    dims: tuple[str, ...]

    def shape(self, model: ModelConfig) -> tuple[int, ...]:
        """The tensor's shape in a checkpoint of ``model``."""
        return tuple(SIZES[dim](model) for dim in self.dims)


def hf(name: str, *dims: str) -> HfTensor:
    """``HfTensor`` under a name short enough for a table."""
    assert all(dim in SIZES for dim in dims), f"{name}: unknown size among {dims}"
    return HfTensor(name, dims)


class Axis(Enum):
    """The parallel axis that splits a tensor; none: every rank of the tensor's stage (and expert) holds it whole.

    shared_expert: for some shared experts of vLLM: ``tensor``, but ``none`` if the experts of one layer are spread over
    several data-parallel replicas (``ParallelConfig.use_sequence_parallel_moe`` in vllm/config/parallel.py, 0.32).
    """

    none = auto()
    tensor = auto()
    expert_tensor = auto()
    shared_expert = auto()


class Stage(Enum):
    """Where in the pipeline a tensor lives: with its layer, or in the first or last stage.

    last_copy: a copy of the first stage's tensor in the last stage, unless both are one stage.  tower: in the first
    stage, once for each block of the vision tower; ``{l}`` in its names is the block.
    """

    layer = auto()
    first = auto()
    last = auto()
    last_copy = auto()
    tower = auto()


class Layers(Enum):
    """Which layers have a tensor: all, dense ones, those with experts, those that attend, or with linear attention.

    deepstack: of a tower's, as many as it makes features for.
    """

    all = auto()
    dense = auto()
    experts = auto()
    attention = auto()
    linear = auto()
    deepstack = auto()

    def include(self, model: ModelConfig, layer: int) -> bool:
        """Whether ``layer`` of ``model`` is one of them."""
        return {
            Layers.all: True,
            Layers.dense: not model.has_experts(layer),
            Layers.experts: model.has_experts(layer),
            Layers.attention: not model.is_linear(layer),
            Layers.linear: model.is_linear(layer),
            Layers.deepstack: model.vision is not None and layer < len(model.vision.deepstack),
        }[self]


@dataclass(frozen=True)
class Range:
    """Elements ``begin`` to ``end`` (exclusive) of Hugging Face tensor ``source`` (place in ``Rule.hf``)."""

    source: int
    begin: int
    end: int


@dataclass(frozen=True)
class ShardRanges:
    """The split dimension of one shard: ``ranges`` one after another, then zeros up to ``size``."""

    ranges: tuple[Range, ...]
    size: int

    @classmethod
    def of(cls, ranges: Sequence[Range], size: int | None = None) -> ShardRanges:
        """The shard of ``ranges``, without empty ones.  size: with padding; None: no padding."""
        held = tuple(range_ for range_ in ranges if range_.end > range_.begin)
        shard = cls(held, 0)
        return cls(held, shard.held if size is None else size)

    @property
    def held(self) -> int:
        """``size`` without the padding."""
        return sum(range_.end - range_.begin for range_ in self.ranges)


Sizes = Sequence[int]  # of the Hugging Face tensors of a rule along its split dimension
ShardLayout = Callable[
    [ModelConfig, Sizes, int, int], ShardRanges
]  # (model, sizes, number of shards, which) -> ShardRanges


def whole(model: ModelConfig, sizes: Sizes, num_shards: int, index: int) -> ShardRanges:
    """Every shard holds all of every tensor, one after another."""
    return ShardRanges.of([Range(source, 0, size) for source, size in enumerate(sizes)])


def split(model: ModelConfig, sizes: Sizes, num_shards: int, index: int) -> ShardRanges:
    """Every tensor is cut evenly; a shard holds its part of each, one after another (gate, then up)."""
    assert all(size % num_shards == 0 for size in sizes), f"{sizes} over {num_shards} shards"
    parts = [size // num_shards for size in sizes]
    return ShardRanges.of([Range(source, index * part, (index + 1) * part) for source, part in enumerate(parts)])


def first_shard(model: ModelConfig, sizes: Sizes, num_shards: int, index: int) -> ShardRanges:
    """The first shard holds all, the others zeros: what each rank adds to a sum over ranks, and is meant once."""
    (size,) = sizes
    return ShardRanges.of([Range(0, 0, size)] if index == 0 else [], size)


def grouped_qkv(model: ModelConfig, sizes: Sizes, num_shards: int, index: int) -> ShardRanges:
    """Megatron's ``linear_qkv``: for each key/value head its query heads, the key head, the value head; cut evenly.

    More shards than key/value heads cut through heads, and no row has a copy: Megatron gathers the outputs
    (``get_query_key_value_tensors`` in megatron/core/transformer/attention.py, 0.16.1).
    """
    groups = model.num_query_groups
    heads = [size // groups for size in sizes]
    by_head = [Range(n, group * head, (group + 1) * head) for group in range(groups) for n, head in enumerate(heads)]
    return _evenly(by_head, num_shards, index)


def gated_grouped_qkv(model: ModelConfig, sizes: Sizes, num_shards: int, index: int) -> ShardRanges:
    """``grouped_qkv`` with a gate on the output: for each key/value head its query heads, their gates, key and value.

    The first tensor has each query head with its gate behind it (``output_gate`` in
    ``get_query_key_value_tensors``, megatron/core/transformer/attention.py, 0.16.1).
    """
    groups = model.num_query_groups
    head = model.head_dim
    heads = model.num_attention_heads // groups
    by_head = []
    for group in range(groups):
        starts = [2 * head * each for each in range(group * heads, (group + 1) * heads)]
        by_head += [Range(0, start + part * head, start + (part + 1) * head) for part in (0, 1) for start in starts]
        by_head += [Range(source, group * head, (group + 1) * head) for source in (1, 2)]
    return _evenly(by_head, num_shards, index)


def _evenly(ranges: Sequence[Range], num_shards: int, index: int) -> ShardRanges:
    """Part ``index`` of ``ranges`` one after another, cut wherever equal parts end."""
    rows = sum(each.end - each.begin for each in ranges)
    assert rows % num_shards == 0, f"{rows} rows of queries, keys and values over {num_shards} shards"
    return _between(ranges, index * rows // num_shards, (index + 1) * rows // num_shards)


def _between(ranges: Sequence[Range], begin: int, end: int) -> ShardRanges:
    """Rows ``begin`` to ``end`` (exclusive) of ``ranges`` one after another."""
    row = 0
    held = []
    for each in ranges:
        first = max(begin, row)
        last = min(end, row + each.end - each.begin)
        start = each.begin - row
        held.append(Range(each.source, start + first, start + max(first, last)))
        row += each.end - each.begin
    return ShardRanges.of(held)


def delta_projections(model: ModelConfig, sizes: Sizes, num_shards: int, index: int) -> ShardRanges:
    """Megatron's ``in_proj`` of linear attention: a rank's queries, keys, values, gates, then betas and alphas.

    The first tensor has, for each key head, its query, key, values and gates; the second, its betas and alphas
    (``GatedDeltaNet`` in megatron/core/ssm/gated_delta_net.py, 0.16.1).
    """
    linear = _of(model.linear_attention)
    sharing = linear.num_value_heads // linear.num_key_heads
    heads = linear.num_key_heads
    key = linear.key_head_dim
    values = sharing * linear.value_head_dim
    mine = range(heads * index // num_shards, heads * (index + 1) // num_shards)
    ranges = []
    for source, widths in ((0, (key, key, values, values)), (1, (sharing, sharing))):
        for part, width in enumerate(widths):
            begins = [head * sum(widths) + sum(widths[:part]) for head in mine]
            ranges += [Range(source, begin, begin + width) for begin in begins]
    return ShardRanges.of(ranges)


def replicated_qkv(model: ModelConfig, sizes: Sizes, num_shards: int, index: int) -> ShardRanges:
    """vLLM's ``qkv_proj``: query heads, key heads, value heads; more shards than key/value heads share them.

    ``QKVParallelLinear`` in vllm/model_executor/layers/linear.py, 0.32.
    """
    groups = model.num_query_groups
    sharing = max(1, num_shards // groups)
    query = sizes[0] // num_shards
    ranges = [Range(0, index * query, (index + 1) * query)]
    for source in (1, 2):
        part = sizes[source] * sharing // num_shards
        ranges.append(Range(source, index // sharing * part, (index // sharing + 1) * part))
    return ShardRanges.of(ranges)


@dataclass(frozen=True)
class SectionPlace:
    """Where a section begins: at ``begin`` of tensor ``source`` (place in ``Rule.hf``)."""

    source: int
    begin: int

    def moved(self, within: Range) -> Range:
        """``within`` the section, as a range of its tensor."""
        return Range(self.source, self.begin + within.begin, self.begin + within.end)


@dataclass(frozen=True)
class Sections:
    """``layout`` of tensors that are several, one after another: a projection that is fused in the checkpoint.

    parts: their sizes, keys of ``SIZES``, in the order of the sources that ``layout`` knows; each tensor is one or more
    of them, and one is several.
    """

    layout: ShardLayout
    parts: tuple[str, ...]

    def __call__(self, model: ModelConfig, sizes: Sizes, num_shards: int, index: int) -> ShardRanges:
        """As a ``ShardLayout``."""
        inner = [SIZES[part](model) for part in self.parts]
        places = self.places(model, sizes)
        shard = self.layout(model, inner, num_shards, index)
        return ShardRanges.of([places[each.source].moved(each) for each in shard.ranges], shard.size)

    def places(self, model: ModelConfig, sizes: Sizes) -> list[SectionPlace]:
        """Where each part begins in the tensors of ``sizes``."""
        inner = [SIZES[part](model) for part in self.parts]
        assert len(inner) > len(sizes), f"{sizes} have no sections: their layout alone says how they are cut"
        places: list[SectionPlace] = []
        source = begin = 0
        for size in inner:
            if source < len(sizes) and begin == sizes[source]:
                source += 1
                begin = 0
            places.append(SectionPlace(source, begin))
            begin += size
            assert source < len(sizes) and begin <= sizes[source], f"{sizes} are not {inner} one after another"
        assert (source, begin) == (len(sizes) - 1, sizes[-1]), f"{sizes} are not {inner} one after another"
        return places


@dataclass(frozen=True)
class StoredPart:
    """Part ``number`` of the tensors of ``layout``, of the sizes ``parts`` (keys of ``SIZES``) over all shards."""

    layout: ShardLayout
    parts: tuple[str, ...]
    number: int

    def __call__(self, model: ModelConfig, sizes: Sizes, num_shards: int, index: int) -> ShardRanges:
        """As a ``ShardLayout``."""
        shard = self.layout(model, sizes, num_shards, index)
        widths = [SIZES[part](model) // num_shards for part in self.parts]
        assert sum(widths) == shard.size, f"parts of {widths} rows in a shard of {shard.size}"
        begin = sum(widths[: self.number])
        return _between(shard.ranges, begin, begin + widths[self.number])


def padded_vocab(multiple: int) -> ShardLayout:
    """Rows of the vocabulary, padded with zeros to a multiple of ``multiple`` and of the shards, cut evenly."""

    def layout(model: ModelConfig, sizes: Sizes, num_shards: int, index: int) -> ShardRanges:
        (rows,) = sizes
        padded = -(-rows // multiple) * multiple
        size = -(-padded // num_shards)
        begin = min(rows, index * size)
        return ShardRanges.of([Range(0, begin, min(rows, begin + size))], size)

    return layout


megatron_vocab = padded_vocab(1)


def always(model: ModelConfig) -> bool:
    """The rule holds for every model of its family."""
    return True


@dataclass(frozen=True)
class Rule:
    """One kind of local tensor.

    name: with ``{l}`` the layer and ``{e}`` the expert, counted from 0; each reader fills in its own counting.
    hf: the Hugging Face tensors that it holds, in order.
    layout: which ranges of these, along ``dim``, a shard of ``axis`` holds.
    layers, stage: where it is in the model.
    stacked: the experts of a rank are the first dimension of one local tensor, instead of separate tensors.
    turn: (which, of how many): rules of one name take turns along ``dim`` of one local tensor, element by element.
    only: the models of the family that have it.
    checkpoint: its key in a Megatron checkpoint; None: ``name``.
    stored_parts: (name, key of ``SIZES``) of the parts along dimension 0 that a Megatron checkpoint has as tensors of
    their own, under the key, a dot and the name; none: it is stored whole.
    dtype: torch's name of a fixed dtype; None: the model's.
    absent_ok: the checkpoint may lack it, and the local tensor then keeps its initial value.
    """

    name: str
    hf: tuple[HfTensor, ...]
    layout: ShardLayout = whole
    dim: int = 0
    axis: Axis = Axis.none
    layers: Layers = Layers.all
    stage: Stage = Stage.layer
    stacked: bool = False
    turn: tuple[int, int] = (0, 1)
    only: Callable[[ModelConfig], bool] = always
    checkpoint: str | None = None
    stored_parts: tuple[tuple[str, str], ...] = ()
    dtype: str | None = None
    absent_ok: bool = False
    per_expert: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "per_expert", any("{e}" in tensor.name for tensor in self.hf))
        numbered = self.stage in (Stage.layer, Stage.tower)
        assert not numbered or "{l}" in self.name, f"{self.name} lives in a layer and names none"
        of_tower = self.stage is Stage.tower
        assert self.layers in (Layers.all, Layers.deepstack) if of_tower else self.layers is not Layers.deepstack, (
            f"{self.name}: {self.layers} in {self.stage}"
        )
        assert 0 <= self.turn[0] < self.turn[1], f"{self.name}: turn {self.turn}"
        assert len({len(tensor.dims) for tensor in self.hf}) == 1, f"{self.name}: tensors of different ranks"
        assert not self.stored_parts or (self.dim == 0 and self.checkpoint is None), f"{self.name}: parts of its rows"

    @property
    def label(self) -> str:
        """``name``, and behind it the turn of a rule that shares it: no two rules of a table have the same."""
        which, count = self.turn
        return self.name if count == 1 else f"{self.name}[{which}::{count}]"

    @cached_property
    def stored(self) -> tuple[Rule, ...]:
        """The rules of the tensors that a Megatron checkpoint has for this one."""
        sizes = tuple(size for _, size in self.stored_parts)
        return tuple(
            replace(self, name=f"{self.name}.{name}", layout=StoredPart(self.layout, sizes, number), stored_parts=())
            for number, (name, _) in enumerate(self.stored_parts)
        ) or (self,)

    def applies_to(self, model: ModelConfig, layer: int | None) -> bool:
        """Whether ``layer`` of ``model`` (None: outside the layers) has this tensor."""
        if not self.only(model):
            return False
        return layer is None or self.layers.include(model, layer)

    def layers_of(self, model: ModelConfig) -> list[int | None]:
        """The layers of ``model``, or blocks of its tower, that have this tensor; [None]: it lives outside of both."""
        if self.stage not in (Stage.layer, Stage.tower):
            return [None]
        blocks = 0 if model.vision is None else model.vision.depth
        count = model.num_layers if self.stage is Stage.layer else blocks
        return [number for number in range(count) if self.applies_to(model, number)]

    def hf_shapes(self, model: ModelConfig) -> list[tuple[int, ...]]:
        """Shapes of ``hf`` in a checkpoint of ``model``."""
        return [tensor.shape(model) for tensor in self.hf]

    def shard(self, model: ModelConfig, num_shards: int, index: int) -> ShardRanges:
        """The ranges that shard ``index`` of ``num_shards`` holds along ``dim``."""
        assert 0 <= index < num_shards, f"shard {index} of {num_shards}"
        return self.layout(model, [shape[self.dim] for shape in self.hf_shapes(model)], num_shards, index)

    def local_shape(self, model: ModelConfig, num_shards: int) -> tuple[int, ...]:
        """Shape of one shard (of one expert, where ``stacked``)."""
        shape = list(self.hf_shapes(model)[0])
        shape[self.dim] = self.shard(model, num_shards, 0).size
        return tuple(shape)
