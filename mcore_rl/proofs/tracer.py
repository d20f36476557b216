"""The index tracer: distinct integers in place of weights, followed through the tables and the copy plan.

The tracer cuts a Hugging Face checkpoint, whose elements are all different integers, into the tensors of every training
rank by the Megatron table, and executes every copy of the plan into the tensors of a rollout rank.  The result must
equal a direct load of the checkpoint.  Sizes are reduced and layouts are not, so every axis, stage, shard and replica
takes part.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from math import gcd, lcm, prod
from typing import Any

import numpy as np

from mcore_rl.config.model import ModelConfig
from mcore_rl.config.parallel import ParallelConfig
from mcore_rl.config.rollout import RolloutLayout
from mcore_rl.families.family import Family
from mcore_rl.families.registry import model_of
from mcore_rl.families.stacks import StackedPart, stacked_parts, stored_shapes
from mcore_rl.families.text_part import TextPart, own_text, text_config, text_part_of
from mcore_rl.ground.arrays import Int64Array
from mcore_rl.weights.reshard import Copy, ReshardPlan, plan_reshard
from mcore_rl.weights.rollout_table import RolloutTable
from mcore_rl.weights.table import LocalTensor, Table
from mcore_rl.weights.tensor_slice import TensorSlice

Tensors = Mapping[str, Int64Array]

# What a Hugging Face configuration calls its number of experts, and the sizes of one.
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
EXPERT_WIDTHS = ("moe_intermediate_size", "shared_expert_intermediate_size", "intermediate_size")
# vLLM's experts on a CPU pad their width to so much, but not with gpt_oss's gate (experts/cpu_moe.py, 0.32), and refuse
# others; nor does its attention know narrower heads, so that a ``head_dim`` from here on is for it.
WHOLE_EXPERTS = 32
# Widths of latent attention, in quarters of ``head_dim``.
LATENTS = {"q_lora_rank": 6, "kv_lora_rank": 10, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 4}


def reduced_config(
    config: Mapping[str, Any], parallel: ParallelConfig, rollout: RolloutLayout, head_dim: int = 4
) -> dict[str, Any]:
    """A Hugging Face ``config`` of the same family, as small as the layouts let it be; every axis still divides.

    What decides how tensors are cut stays: how many query heads a key/value head has, whether there are fewer key/value
    heads than ranks on either side, whether a rank has several of them, dense layers before those with experts.
    """
    part = text_part_of(config)
    if part is not None:
        return _reduced_whole(config, part, parallel, rollout, head_dim)
    both = lcm(parallel.tp, rollout.tp)
    given = config["num_key_value_heads"] if "num_key_value_heads" in config else config["num_attention_heads"]
    # Several ranks share one key/value head where there are more of them.
    groups = lcm(*(tp for tp in (parallel.tp, rollout.tp) if tp <= given))
    if 2 * groups <= given:  # several on each rank: their order differs between layouts
        groups *= 2
    sharing = config["num_attention_heads"] // given
    if sharing > 1 and groups * sharing % both:
        groups = given
    heads = groups * sharing if sharing == 1 else lcm(groups * sharing, both)
    wide = config.get("head_dim") is not None  # the hidden size is no product then
    widths = groups if sharing == 1 else (2 * lcm(groups, both) if wide else heads)
    # The rows of one key/value head are shared by as many ranks, evenly.
    head_dim = lcm(head_dim, parallel.tp // gcd(parallel.tp, 2 * groups))
    small = dict(config)
    num_layers = sum(parallel.pipeline_layers or [2] * (parallel.pp * parallel.vpp))
    changes: dict[str, Any] = {
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "hidden_size": widths * head_dim,
        "head_dim": head_dim,
        "vocab_size": 64 * both - 3,  # padded for both, by Megatron to the ranks and by vLLM to 64
        "num_nextn_predict_layers": 0,
        "max_window_layers": num_layers,
        "layer_types": _both_kinds(config.get("layer_types") or (), num_layers),
        "sliding_window_pattern": 2,  # of few layers one in two sees all tokens, whatever it was
        "full_attention_interval": 2,
        "no_rope_layers": [layer % 2 for layer in range(num_layers)],
        "rotary_dim": head_dim // 2,
    }
    if config.get("partial_rotary_factor") != 1:
        changes["partial_rotary_factor"] = 0.5
    rope = config.get("rope_parameters") or {}
    if "partial_rotary_factor" in rope:
        changes["rope_parameters"] = rope | {"partial_rotary_factor": 0.5}
    narrowest = 2 if head_dim < WHOLE_EXPERTS or "swiglu_limit" not in config else WHOLE_EXPERTS
    changes |= dict.fromkeys(EXPERT_WIDTHS, narrowest * both * parallel.etp)
    changes |= {name: parts * head_dim // 4 for name, parts in LATENTS.items()}
    if any(name in config for name in EXPERTS):
        num_experts = 2 * lcm(2, parallel.ep, rollout.ep)  # two groups of two, or more
        changes |= dict.fromkeys(EXPERTS, num_experts)
        grouped = (config.get("n_group") or 1) > 1
        changes |= {"num_experts_per_tok": 2, "n_group": 2 if grouped else 1, "topk_group": 1}
        dense = min(config.get("first_k_dense_replace", 0), num_layers // 2)
        changes["first_k_dense_replace"] = dense
        changes["mlp_layer_types"] = ["dense"] * dense + ["sparse"] * (num_layers - dense)
        changes["mlp_only_layers"] = [layer for layer in config.get("mlp_only_layers", ()) if layer < num_layers]
    if "linear_num_key_heads" in config:  # several on each rank, and no width is another
        sharing = config["linear_num_value_heads"] // config["linear_num_key_heads"]
        changes |= {"linear_num_key_heads": 2 * both, "linear_num_value_heads": 2 * both * sharing}
        changes |= {"linear_key_head_dim": 3, "linear_value_head_dim": 5}
    small |= {name: value for name, value in changes.items() if config.get(name) is not None}
    small.pop("quantization_config", None)
    if "short_factor" in (config.get("rope_scaling") or {}):  # a number for each frequency of the whole width
        small.pop("rope_scaling")
    return small


def _reduced_whole(
    config: Mapping[str, Any], part: TextPart, parallel: ParallelConfig, rollout: RolloutLayout, head_dim: int
) -> dict[str, Any]:
    """``reduced_config`` of a model with a vision tower: of its text part, and of the tower."""
    small = whole_with(config, part, reduced_config(text_config(config), parallel, rollout, head_dim))
    both = lcm(parallel.tp, rollout.tp)
    changes = {
        "depth": 5,  # more than layers, so that a block is no layer
        "hidden_size": 2 * both * 8,
        "num_heads": 2 * both,
        "intermediate_size": 6 * both,
        "window_size": 8,
        "num_position_embeddings": 9,
        "deepstack_visual_indexes": [0, 3],
        "fullatt_block_indexes": [1],
    }
    vision = small["vision_config"] | {"patch_size": 2}
    return small | {"vision_config": vision | {name: value for name, value in changes.items() if name in vision}}


def whole_with(config: Mapping[str, Any], part: TextPart, text: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` with another ``text`` in its part, which the axes of its rotation and the tower's output fit."""
    own = own_text(config, part) or config
    rope = next(dict(own[name]) for name in ("rope_scaling", "rope_parameters") if own.get(name))
    head_dim = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    pairs = head_dim // 2
    rope |= {"rope_type": "default", "mrope_section": [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]}
    rope.setdefault("rope_theta", text.get("rope_theta"))
    left_out = ("architectures", "rope_scaling", "rope_theta", "type")
    inner = {name: value for name, value in text.items() if name not in left_out}
    inner |= {"model_type": part.text_types[0], "rope_parameters": {k: v for k, v in rope.items() if k != "type"}}
    outside = {name: value for name, value in config.items() if name not in inner or name in _OF_WHOLE}
    vision = dict(config["vision_config"]) | {"out_hidden_size": text["hidden_size"]}
    return outside | {part.text: inner, "vision_config": vision}


_OF_WHOLE = ("architectures", "model_type", "tie_word_embeddings")


def subject_of(config: Mapping[str, Any]) -> tuple[Family, ModelConfig]:
    """The family and the model of a ``config`` that is proven: of a multimodal one the whole, with its tower."""
    return model_of(config, pictures=text_part_of(config) is not None)


def _both_kinds(types: Sequence[str], num_layers: int) -> list[str]:
    """``num_layers`` layers in which the kinds of ``types`` take turns."""
    kinds = list(dict.fromkeys(types))
    return [kinds[layer % len(kinds)] for layer in range(num_layers)] if kinds else []


def numbered(shapes: Mapping[str, tuple[int, ...]], family: Family, model: ModelConfig) -> NumberedCheckpoint:
    """The numbered checkpoint of ``model`` with the stored tensors ``shapes``."""
    return NumberedCheckpoint(shapes, stacked_parts(family.stacks, model))


class NumberedCheckpoint:
    """A Hugging Face checkpoint of tensors of ``shapes`` whose elements are distinct integers, computed on request.

    parts: the tables' tensors that are within stored ones, by name; they are read as if they were there.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], parts: Mapping[str, StackedPart] | None = None) -> None:
        self.shapes = dict(shapes)
        self.parts = parts or {}
        sizes = [prod(shape) for shape in self.shapes.values()]
        self.num_elements = sum(sizes)
        self._starts = dict(zip(self.shapes, np.cumsum([1, *sizes[:-1]]).tolist(), strict=True))  # 0 is padding

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def start_of(self, name: str) -> int:
        """The number of the first element of ``name``; those behind it follow in row-major order."""
        return int(self._starts[name])

    def name_of(self, number: int) -> str:
        """The tensor and the index of the element ``number``, in words."""
        if number <= 0:
            return "padding" if number == 0 else "nothing"
        place = bisect(list(self._starts.values()), number) - 1
        name = list(self._starts)[place]
        at = np.unravel_index(number - self._starts[name], self.shapes[name])
        return f"{name}[{', '.join(map(str, at))}]"

    def read(self, name: str, region: TensorSlice | None = None) -> Int64Array:
        """The tensor ``name``, or a region of it."""
        if name in self.parts and name not in self.shapes:
            part = self.parts[name]
            slab = self.shapes[part.stored][1:]
            of_expert = self.read(part.stored, TensorSlice((part.expert, *(0,) * len(slab)), (1, *slab)))[0]
            whole: Int64Array = part.within(of_expert)
            return whole if region is None else whole[index(region)]
        shape = self.shapes[name]
        start = self._starts[name]
        strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
        region = TensorSlice.whole(shape) if region is None else region
        numbers = np.asarray(start, dtype=np.int64)
        for (begin, length), stride in zip(region.spans, strides, strict=True):
            numbers = numbers[..., None] + np.arange(begin, begin + length) * stride
        return numbers


def training_tensor(table: Table, local: LocalTensor, checkpoint: NumberedCheckpoint) -> Int64Array:
    """The values of a training rank's tensor ``local``, cut from ``checkpoint``; padding is 0."""
    out = np.zeros(table.shape(local), dtype=np.int64)
    for piece in table.pieces(local):
        out[index(piece.local_region)] = checkpoint.read(piece.hf, piece.hf_region)
    return out


def direct_tensors(rollout: RolloutTable, rank: int, checkpoint: NumberedCheckpoint) -> dict[str, Int64Array]:
    """The parameters of rollout rank ``rank``, loaded from ``checkpoint`` by the rollout table alone; padding is 0."""
    parameters, views = _empty(rollout, rank)
    for tensor in rollout.tensors(rank):
        for slot, piece in rollout.pieces(tensor):
            views[tensor.name][index(piece.local_region, slot)] = checkpoint.read(piece.hf, piece.hf_region)
    return parameters


def _empty(rollout: RolloutTable, rank: int) -> tuple[dict[str, Int64Array], dict[str, Int64Array]]:
    """(the parameters of ``rank``, zero; views of them by the names of the table's tensors, which may take turns)."""
    parameters: dict[str, Int64Array] = {}
    views = {}
    for tensor in rollout.tensors(rank):
        shape = rollout.parameter_shape(tensor)
        whole = parameters.setdefault(tensor.parameter, np.zeros(shape, dtype=np.int64))
        views[tensor.name] = whole[(*(slice(None),) * tensor.rule.stacked, *tensor.turns)]
    return parameters, views


def index(region: TensorSlice, slot: int | None = None) -> tuple[slice | int, ...]:
    """``region`` as an index, within ``slot`` of a stacked tensor."""
    within: tuple[slice | int, ...] = tuple(slice(start, start + length) for start, length in region.spans)
    return within if slot is None else (slot, *within)


class Tracer:
    """Executes a plan on the integers of ``checkpoint``."""

    def __init__(self, plan: ReshardPlan) -> None:
        self.plan = plan
        table = plan.table
        shapes = {name: info.shape for name, info in plan.table.hf_tensors.items()}
        parts = stacked_parts(table.family.stacks, table.model)
        self.checkpoint = NumberedCheckpoint(stored_shapes(shapes, parts, table.model), parts)
        self.locals = lru_cache(maxsize=None)(self._locals)
        self.source = lru_cache(maxsize=4096)(self._source)

    def _locals(self, rank: int) -> dict[tuple[int, str], LocalTensor]:
        return {(local.chunk, local.name): local for local in self.plan.table.tensors(rank)}

    def _source(self, rank: int, chunk: int, name: str) -> Int64Array:
        return training_tensor(self.plan.table, self.locals(rank)[chunk, name], self.checkpoint)

    def received(self, rank: int) -> dict[str, Int64Array]:
        """The parameters of rollout rank ``rank`` after every copy to it; elements that no copy writes are 0."""
        parameters, views = _empty(self.plan.rollout, rank)
        for _, copies in self.plan.copies_to(rank):
            for copy in copies:
                self._make(copy, views)
        return parameters

    def _make(self, copy: Copy, into: dict[str, Int64Array]) -> None:
        source = self.source(copy.source_rank, copy.chunk, copy.source)
        into[copy.target][index(copy.target_slice, copy.slot)] = source[index(copy.source_slice)]

    def failures(self, ranks: range, direct: Callable[[int], Tensors] | None = None) -> Iterator[str]:
        """A message for each tensor of ``ranks`` that differs from ``direct`` (None: the rollout table's load)."""
        for rank in ranks:
            received = self.received(rank)
            wanted = direct_tensors(self.plan.rollout, rank, self.checkpoint) if direct is None else direct(rank)
            for name in sorted(received.keys() | wanted.keys()):
                if name not in received or name not in wanted:
                    where = "only the plan" if name in received else "nothing in the plan"
                    yield f"rollout rank {rank} {name}: {where} writes it"
                elif received[name].shape != wanted[name].shape:
                    shapes = f"expected shape {wanted[name].shape}, found {received[name].shape}"
                    yield f"rollout rank {rank} {name}: {shapes}"
                elif not np.array_equal(received[name], wanted[name]):
                    wrong = np.argwhere(received[name] != wanted[name])
                    first = tuple(wrong[0].tolist())
                    yield (
                        f"rollout rank {rank} {name}: {len(wrong)} of {received[name].size} elements are not those of "
                        f"a direct load, the first at {first}"
                    )


def trace(
    config: Mapping[str, Any],
    parallel: ParallelConfig,
    world_size: int,
    rollout: RolloutLayout,
    family: Family | None = None,
) -> tuple[str, list[str]]:
    """(size of the trace in words, failures) over every rollout rank, for the model of ``config`` at reduced size.

    family: with the tables that are traced; None: that of ``config``.
    """
    of_config, model = subject_of(reduced_config(config, parallel, rollout))
    family = family or of_config
    table = Table(family, model, parallel, world_size)
    tracer = Tracer(plan_reshard(table, RolloutTable(family, model, rollout)))
    failures = list(tracer.failures(range(rollout.world_size)))
    return f"{tracer.checkpoint.num_elements:,} elements, {rollout.world_size} ranks", failures
