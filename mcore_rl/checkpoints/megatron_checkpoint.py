"""Megatron checkpoints on disk, read and written by the table: which stored tensor holds which Hugging Face tensors.

The tensor under a checkpoint's key is the table's tensor at tp=pp=ep=1: gate and up one after the other, the experts of
a layer stacked, the vocabulary with or without padding.  A checkpoint saved in any layout and any dialect reads as
Hugging Face tensors, region by region; any layout can load what is written here.

Megatron-core writes a layer's tensors under ``decoder.layers.{l}.`` or, where all layers are alike, those of all layers
under ``decoder.layers.`` with the layer as the first dimension ("homogeneous"; transformer/transformer_block.py,
``sharded_state_dict``).  Experts are stacked under ``mlp.experts.experts.``, or stand one by one below it.  Norms that
Transformer Engine fuses are named after the projection behind them, by local layers too.  Some tools put ``model.`` or
``module.`` before all of it.  A key is parsed into a stem, which is the name of a ``Rule``, and the layer and expert in
it; a layer or expert that is not in the key is an index into the tensor's first dimensions.

Nothing here imports Megatron; tests/training/test_checkpoint.py compares it with Megatron's own modules.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from mcore_rl.checkpoints.distcp import DistcpWriter, DistributedCheckpoint
from mcore_rl.checkpoints.safetensors import TensorSpec
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.parallel import ParallelConfig
from mcore_rl.config.role import Head
from mcore_rl.families.blocks import LAYER
from mcore_rl.families.family import Family
from mcore_rl.families.rules import Axis, megatron_vocab, num_experts, split
from mcore_rl.ground.errors import CheckpointError
from mcore_rl.weights.names import canonical
from mcore_rl.weights.table import LocalTensor, Piece, Table
from mcore_rl.weights.tensor_slice import TensorSlice, row_major_strides, windows
from mcore_rl.weights.views import view_of

_PREFIX = re.compile(r"^(?:model\.|module\.)+")
_LAYER = re.compile(r"^decoder\.layers\.(?:(\d+)\.)?(.+)$")
_EXPERT = re.compile(r"^mlp\.experts\.experts\.(?:(\d+)\.)?(linear_fc[12]\.(?:weight|bias))$")
_NAMED_EXPERT = re.compile(r"^mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12]\.(?:weight|bias))$")
# What a training run saves beside the model.
_NOT_THE_MODEL = re.compile(
    r"^(?:chained_\d+\.)?optimizer\.|^opt_param_scheduler|^rng_state|^rerun_state|^mtp\.|_extra_state(?:/|$)"
)
_ADAPTER = re.compile(r"\.adapters?\.|\.lora_[AB]\.")


@dataclass(frozen=True)
class Name:
    """A parsed key.  stem: name of a rule.  layer, expert: None if the key names none (it has none, or holds all)."""

    stem: str
    layer: int | None
    expert: int | None


@dataclass(frozen=True)
class TensorLocation:
    """Where a tensor is stored: under ``key``, at index ``lead`` of the first dimensions."""

    key: str
    lead: tuple[int, ...]


def parse(key: str) -> Name | None:
    """The parsed ``key``; None if it holds no weight of the model."""
    key = _PREFIX.sub("", key)
    if _NOT_THE_MODEL.search(key):
        return None
    match = _LAYER.match(key)
    if match is None:
        stem = canonical(key)
        return None if stem is None else Name(stem, None, None)
    layer, rest = match.groups()
    named = canonical(LAYER + rest)
    if named is None:
        return None
    rest = named.removeprefix(LAYER)
    expert = _EXPERT.match(rest) or _NAMED_EXPERT.match(rest)
    if expert is not None:
        rest = f"mlp.experts.local_experts.{{e}}.{expert.group(2)}"
    number = expert.group(1) if expert is not None else None
    return Name(LAYER + rest, None if layer is None else int(layer), None if number is None else int(number))


def is_adapter(key: str) -> bool:
    """Whether ``key`` holds a part of an adapter (LoRA), which is trained beside frozen weights."""
    return _ADAPTER.search(key) is not None


class StoredKeys:
    """The parsed keys of one checkpoint."""

    def __init__(self, keys: Iterable[str]) -> None:
        self.names = {key: name for key in keys if (name := parse(key)) is not None}
        self._keys = {name: key for key, name in self.names.items()}

    @property
    def stacked(self) -> bool:
        """Whether layers are the first dimension of tensors, not parts of keys."""
        return any(name.stem.startswith(LAYER) and name.layer is None for name in self._keys)

    @property
    def num_layers_named(self) -> int:
        """Number of layers named in keys; 0 if layers are stacked."""
        return 1 + max((name.layer for name in self._keys if name.layer is not None), default=-1)

    def find(self, stem: str, layer: int | None, expert: int | None) -> TensorLocation | None:
        """The location of rule ``stem``'s tensor for ``layer`` and ``expert`` (None: it has none); None if absent."""
        for by_layer in (layer, None) if layer is not None else (None,):
            for by_expert in (expert, None) if expert is not None else (None,):
                key = self._keys.get(Name(stem, by_layer, by_expert))
                if key is not None:
                    lead = (layer if by_layer is None else None, expert if by_expert is None else None)
                    return TensorLocation(key, tuple(index for index in lead if index is not None))
        return None


CHUNK_BYTES = 64 << 20  # Megatron reads whole chunks, whatever it needs of them
# Megatron-LM pads the vocabulary to a multiple of 128 (make_vocab_size_divisible_by) times tp; more is another one.
MAX_PADDING = 128 * 64
MISMATCH = "The HF config does not match the checkpoint: give the config.json of the model that was saved"


class Readable(Protocol):
    """Something that holds Hugging Face tensors and reads regions of them."""

    def read_into(self, name: str, region: TensorSlice, out: Tensor) -> None:
        """Copy ``region`` of tensor ``name`` into ``out``, cast to its dtype."""


def _shared(
    region: TensorSlice, at: tuple[int, ...], other_at: tuple[int, ...], shape: tuple[int, ...]
) -> tuple[TensorSlice, TensorSlice] | None:
    """The elements of ``region`` that also stand in another tensor.

    Both tensors hold a common part of ``shape``: at ``at`` in the tensor of ``region``, at ``other_at`` in the other.
    Returns (region of the other tensor, region within ``region``); None if the part does not reach into ``region``.
    """
    both = TensorSlice(at, shape).shared(region)
    return None if both is None else (both.moved(at, other_at), both.within(region))


class MegatronCheckpoint:
    """The Hugging Face tensors that a Megatron checkpoint holds, and reading regions of them.

    tensors: in the order of the layers, in their stored dtype.  head: what the model ends in.
    """

    def __init__(self, stored: DistributedCheckpoint, family: Family, model: ModelConfig) -> None:
        """The weights of ``model`` in ``stored``.

        Raises CheckpointError with every violation: another number of layers; tensors that are missing, unexpected, of
        another shape, not of a floating-point dtype, or part of an adapter.
        """
        self.stored = stored
        self.keys = StoredKeys(stored.tensors)
        head = self.keys.find("output_layer.weight", None, None)
        is_value = head is not None and stored.tensors[head.key].shape[0] == 1 != model.vocab_size
        self.head = Head.value if is_value else Head.lm
        self.table = Table(family, model, head=self.head)
        self._held: dict[str, list[tuple[TensorLocation, Piece]]] = defaultdict(list)
        used = set[str]()
        problems = list(self._layer_problems())
        for local in saved_tensors(self.table):
            place = self.keys.find(local.rule.name, local.layer, local.expert)
            if place is not None:
                used.add(place.key)
                problems += self._shape_problems(local, place)
                for piece in self.table.pieces(local):
                    self._held[piece.hf].append((place, piece))
            elif not local.rule.absent_ok:
                key, _ = stored_key(local)
                problems.append(f"tensor {key} is missing. {MISMATCH}")
        problems += self._unused(used)
        if problems:
            raise CheckpointError(str(stored.directory), list(dict.fromkeys(problems)))
        self.tensors: Mapping[str, TensorSpec] = MappingProxyType(
            {
                name: TensorSpec(name, stored.tensors[self._held[name][0][0].key].dtype, info.shape)
                for name, info in self.table.hf_tensors.items()
                if name in self._held
            }
        )

    @property
    def used_keys(self) -> tuple[str, ...]:
        """The keys that hold weights of the model."""
        return tuple({place.key: None for held in self._held.values() for place, _ in held})

    def read_into(self, name: str, region: TensorSlice, out: Tensor) -> None:
        """Copy ``region`` of Hugging Face tensor ``name`` into ``out``, of the region's shape; cast.

        Reads only the bytes of the region.  CheckpointError: a file is damaged or cannot be read.
        """
        for place, piece in self._held[name]:
            shared = _shared(region, piece.hf_start, piece.local_start, piece.shape)
            if shared is not None:
                (start, shape), into = shared
                stored = TensorSlice((*place.lead, *start), (1,) * len(place.lead) + shape)
                self.stored.read_into(place.key, stored, view_of(out, into)[(None,) * len(place.lead)])

    def damage(self, progress: Callable[[int, int], None]) -> list[str]:
        """Compare every chunk with its stored CRC-32.  progress: called with (bytes just read, bytes in all)."""
        total = sum(self.stored.tensors[key].num_bytes for key in self.used_keys)
        problems = list[str]()
        for key in self.used_keys:
            problems += self.stored.damage(key)
            progress(self.stored.tensors[key].num_bytes, total)
        return problems

    def close(self) -> None:
        """Close the files."""
        self.stored.close()

    def _layer_problems(self) -> Iterator[str]:
        num_layers = self.keys.num_layers_named
        expected = self.table.model.num_layers
        if num_layers not in (0, expected):
            yield f"expected {expected} layers by config.json and found {num_layers}. {MISMATCH}"

    def _shape_problems(self, local: LocalTensor, place: TensorLocation) -> Iterator[str]:
        tensor = self.stored.tensors[place.key]
        expected = self.table.shape(local)
        lead = list[int]()
        if local.layer is not None and self.keys.names[place.key].layer is None:
            lead.append(self.table.model.num_layers)
        if local.expert is not None and self.keys.names[place.key].expert is None:
            lead.append(num_experts(self.table.model))
        wanted = (*lead, *expected)
        padded = local.rule.layout is megatron_vocab and tensor.shape[1:] == wanted[1:]
        if tensor.shape != wanted and not (padded and 0 <= tensor.shape[0] - wanted[0] < MAX_PADDING):
            yield f"tensor {place.key}: expected shape {wanted} by config.json and found {tensor.shape}. {MISMATCH}"
        if not tensor.dtype.is_floating_point:
            yield f"tensor {place.key}: expected floating-point numbers and found {tensor.dtype}. Save it unquantised"

    def _unused(self, used: set[str]) -> Iterator[str]:
        for key, tensor in self.stored.tensors.items():
            if is_adapter(key):
                yield f"tensor {key} is part of an adapter. Merge it into the weights before it is saved"
            elif key in self.keys.names and key not in used:
                family = self.table.family.name
                yield f"tensor {key} of shape {tensor.shape} has no place in this {family} model. {MISMATCH}"


def saved_tensors(table: Table) -> Iterator[LocalTensor]:
    """The tensors of ``table``, of one replica on one rank, as megatron-core saves them."""
    return chain.from_iterable(map(saved_parts, table.tensors(0)))


def saved_parts(local: LocalTensor) -> Iterator[LocalTensor]:
    """The tensors as which megatron-core saves ``local``: itself, or its parts."""
    for rule in local.rule.stored:
        yield replace(local, name=local.name + rule.name.removeprefix(local.rule.name), rule=rule)


def stored_key(local: LocalTensor) -> tuple[str, tuple[int, ...]]:
    """(the key under which megatron-core saves ``local``, its indices into the first dimensions there)."""
    key = (local.rule.checkpoint or local.rule.name).format(l=local.layer, e=None)
    return key, () if local.expert is None else (local.expert,)


def plan_stored(table: Table, dtypes: Mapping[str, torch.dtype]) -> dict[str, tuple[TensorSpec, list[LocalTensor]]]:
    """Key -> (the tensor to write, the tensors of ``table`` that it joins).

    table: of one replica on one rank.  dtypes: of the Hugging Face tensors; a stored tensor has the promoted dtype of
    those that it joins.
    """
    groups: dict[str, list[LocalTensor]] = defaultdict(list)
    for local in saved_tensors(table):
        if all(name in dtypes for name in local.hf_names):
            groups[stored_key(local)[0]].append(local)
    planned = {}
    for key, locals_ in groups.items():
        parts = [dtypes[name] for local in locals_ for name in local.hf_names]
        dtype = parts[0]
        for other in set(parts):
            dtype = torch.promote_types(dtype, other)
        _, lead = stored_key(locals_[0])
        shape = (*((len(locals_),) if lead else ()), *table.shape(locals_[0]))
        planned[key] = TensorSpec(key, dtype, shape), locals_
    return planned


def chunks_of(
    local: LocalTensor, shape: tuple[int, ...], itemsize: int, parallel: ParallelConfig
) -> Iterator[TensorSlice]:
    """``local`` of ``shape`` in parts of at most ``CHUNK_BYTES``; each part belongs to one rank of ``parallel``."""
    rule = local.rule
    shards = {Axis.tensor: parallel.tp, Axis.expert_tensor: parallel.etp}.get(rule.axis, 1)
    # Gate and up are split separately; every other tensor is split as one.
    step = -(-shape[rule.dim] // (shards * (len(rule.hf) if rule.layout is split else 1)))
    for begin in range(0, shape[rule.dim], step):
        start = [0] * len(shape)
        size = list(shape)
        start[rule.dim] = begin
        size[rule.dim] = min(step, shape[rule.dim] - begin)
        for part in windows(TensorSlice.whole(size), row_major_strides(size), max(1, CHUNK_BYTES // itemsize)):
            yield TensorSlice(tuple(a + b for a, b in zip(start, part.start, strict=True)), part.shape)


def write_stored(
    source: Readable,
    table: Table,
    dtypes: Mapping[str, torch.dtype],
    writer: DistcpWriter,
    parallel: ParallelConfig,
    progress: Callable[[int], None],
) -> None:
    """Write the tensors of ``table`` (of one replica on one rank), read from ``source``, to ``writer``, chunk by chunk.

    dtypes: of the Hugging Face tensors to write; others are left out.  parallel: the layout that the chunks suit; any
    other can load them too.  progress: called with the bytes just written.
    """
    chunk = torch.empty(0)
    for key, (spec, locals_) in plan_stored(table, dtypes).items():
        writer.declare(key, spec.dtype, spec.shape)
        for local in locals_:
            _, lead = stored_key(local)
            pieces = table.pieces(local)
            for region in chunks_of(local, table.shape(local), spec.dtype.itemsize, parallel):
                if chunk.shape != region.shape or chunk.dtype != spec.dtype:  # new memory costs more than filling it
                    chunk = torch.empty(region.shape, dtype=spec.dtype)
                for piece in pieces:
                    shared = _shared(region, piece.local_start, piece.hf_start, piece.shape)
                    if shared is not None:
                        theirs, into = shared
                        source.read_into(piece.hf, theirs, view_of(chunk, into))
                writer.write(key, TensorSlice((*lead, *region.start), (1,) * len(lead) + region.shape), chunk)
                progress(chunk.numel() * chunk.itemsize)
