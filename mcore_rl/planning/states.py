"""Exact bytes of a rank's weights, gradients and optimizer state, from the families' tables, in integers.

What megatron-core 0.16.1 allocates, to the byte (tests/planning/test_states.py compares it with the real buffers):

- ``_ParamAndGradBuffer`` (distributed/param_and_grad_buffer.py): the trained tensors of a model chunk are packed end to
  end in reversed order, those of experts in a buffer of their own.  A tensor begins at a multiple of 64 elements; a
  bucket ends at a multiple of 128 and of its number of data-parallel ranks.  A buffer is one bucket, except that an
  embedding which two stages share (tied, pp > 1) is a bucket by itself, and that ``overlap_grad_reduce`` cuts those of
  the first model chunk.  Weights and float32 gradients have the length
  of the buffer.
- Of a LoRA run the weights are tensors by themselves, and buffers hold float32 adapters, their own main weights.
- A frozen vision tower is in no buffer; one that learns follows the output in the first chunk's.
- ``DistributedOptimizer``: each of those ranks (dp * cp of dense tensors, edp of experts) has an equal part of each
  bucket, without its padding: two float32 moments, and float32 main weights if the weights are not float32.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from math import lcm, prod

from mcore_rl.config.engine import Precision
from mcore_rl.config.lora import LoraConfig
from mcore_rl.config.model import LayerKind, ModelConfig, TowerKind
from mcore_rl.config.parallel import ParallelConfig
from mcore_rl.config.role import Head
from mcore_rl.config.rollout import BYTES
from mcore_rl.families.family import Family
from mcore_rl.families.flops import forward_flops
from mcore_rl.families.registry import FAMILIES
from mcore_rl.families.rules import Axis, Rule, Stage
from mcore_rl.families.towers import LOCAL, PICTURES
from mcore_rl.parallel.layout import Layout, place_layers
from mcore_rl.weights.adapter_table import AdapterTable
from mcore_rl.weights.table import Table

GRADIENT_BYTES = MOMENT_BYTES = MAIN_BYTES = 4  # per element: float32, whatever the dtype of the weights
TENSOR_MULTIPLE, BUCKET_MULTIPLE = 64, 128  # elements

# The order of the modules of a layer, which decides the places of padding between odd-sized tensors.
ORDER = (
    "embedding.",
    "input_layernorm.",
    ".dt_bias",
    ".A_log",
    "in_proj.weight",
    "conv1d.",
    "out_norm.",
    "out_proj.",
    "core_attention.",
    "linear_proj.weight",
    "linear_proj.bias",
    "linear_proj.post_layernorm.",
    "linear_qkv.weight",
    "linear_qkv.bias",
    "linear_q_proj.",
    "linear_q_down_proj.",
    "linear_q_up_proj.",
    ".q_layernorm.",
    ".k_layernorm.",
    "linear_kv_down_proj.",
    "linear_kv_up_proj.",
    ".kv_layernorm.",
    "pre_mlp_layernorm.",
    "router.",
    ".gate_weight",
    "linear_fc1.",
    "linear_fc2.weight",
    "linear_fc2.bias",
    "linear_fc2.post_layernorm.",
    "final_layernorm.",
    "output_layer.",
)


_ADAPTER = re.compile(r"\.lora_[AB]\.\d+$")


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """The lasting memory of one rank, bytes.  num_parameters: elements that it holds, each copy counted."""

    num_parameters: int
    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """The bytes of all three."""
        return self.weights + self.gradients + self.optimizer


def family_for(model: ModelConfig) -> Family:
    """A family whose tables have exactly the tensors of ``model``; chosen by the model's features, not by its name."""
    moe = model.moe
    if model.vision is not None:
        if model.vision.kind is TowerKind.qwen2_5_vl:
            return PICTURES["qwen2_5_vl"]
        return PICTURES["qwen3_vl" if moe is None else "qwen3_vl_moe"]
    if model.mla is not None:  # GLM-4.7-Flash's table is DeepSeek-V3's
        return FAMILIES["deepseek_v2" if moe is not None and not moe.expert_bias else "deepseek_v3"]
    if model.sandwich_norm:
        return FAMILIES["gemma3_text" if model.qk_norm else "gemma2"]
    if moe is not None and moe.expert_bias:
        return FAMILIES["minimax_m2" if model.joint_qk_norm else "glm4_moe"]
    if model.attention_sinks:
        return FAMILIES["gpt_oss"]
    if model.linear_attention is not None:
        return FAMILIES["qwen3_5_text" if moe is None else "qwen3_next"]
    if moe is not None:
        if model.joint_qk_norm:
            return FAMILIES["olmoe"]
        return FAMILIES["qwen2_moe" if moe.shared_gate else "qwen3_moe" if model.qk_norm else "mixtral"]
    return FAMILIES["qwen3" if model.qk_norm else "qwen2" if model.qkv_bias else "llama"]


class ModelSizes:
    """The numbers of elements of ``model``'s tensors under any layout.

    head: the output of the model.  lora: of what these adapters train, instead of all weights.
    """

    def __init__(self, model: ModelConfig, *, head: Head = Head.lm, lora: LoraConfig | None = None) -> None:
        table = Table(family_for(model), model, head=head)
        self.model = model
        self.head = head
        rules = (AdapterTable(table, lora) if lora else table).rules
        self._of_tower = [rule for rule in rules if rule.name.startswith(LOCAL)]
        self._rules = sorted((rule for rule in rules if not rule.name.startswith(LOCAL)), key=_module_place)
        self._elements: dict[tuple[Rule, int], int] = {}
        self._flops: dict[int, int] = {}
        self._layers: dict[tuple[LayerKind, int, int], tuple[tuple[int, ...], tuple[int, ...]]] = {}

    def _size(self, rule: Rule, tp: int, etp: int) -> int:
        num_shards = {Axis.none: 1, Axis.tensor: tp, Axis.expert_tensor: etp}[rule.axis]
        key = (rule, num_shards)
        if key not in self._elements:
            self._elements[key] = prod(rule.local_shape(self.model, num_shards))
        return self._elements[key]

    def layer(self, kind: LayerKind, tp: int, etp: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Elements of each trained tensor of a layer: (dense tensors, those of one expert), in the modules' order."""
        key = (kind, tp, etp)
        if key not in self._layers:
            layer = next(each for each in range(self.model.num_layers) if self.model.kind(each) == kind)
            here = [
                rule
                for rule in self._rules
                if rule.stage is Stage.layer and rule.dtype is None and rule.applies_to(self.model, layer)
            ]
            dense = tuple(self._size(rule, tp, etp) for rule in here if not rule.per_expert)
            self._layers[key] = dense, tuple(self._size(rule, tp, etp) for rule in here if rule.per_expert)
        return self._layers[key]

    def forward_flops(self, length: int) -> int:
        """Floating-point operations of a forward pass over one sequence of ``length`` tokens."""
        if length not in self._flops:
            self._flops[length] = forward_flops(self.model, [length], head=self.head)
        return self._flops[length]

    def ends(self, stages: Iterable[Stage], tp: int) -> tuple[int, ...]:
        """Elements of each tensor outside of the layers that belongs to ``stages``."""
        wanted = set(stages)
        return tuple(self._size(rule, tp, 1) for rule in self._rules if rule.stage in wanted)

    @cached_property
    def tower(self) -> tuple[int, ...]:
        """Elements of each tensor of the vision tower, in the modules' order; empty where there is none."""
        numels = list[int]()
        for _, rules in groupby(self._of_tower, key=_module_list):
            block = list(rules)
            size = [self._size(rule, 1, 1) for rule in block]
            numels += size * len(block[0].layers_of(self.model))
        return tuple(numels)

    @cached_property
    def num_parameters(self) -> int:
        """The parameters of the whole model; a tied embedding counts once."""
        moe = self.model.moe
        total = sum(self.ends((Stage.first, Stage.last), 1)) + sum(self.tower)
        for layer in range(self.model.num_layers):
            dense, expert = self.layer(self.model.kind(layer), 1, 1)
            total += sum(dense) + (0 if moe is None else moe.num_experts) * sum(expert)
        return total


def _module_place(rule: Rule) -> tuple[int, int]:
    """The place of a rule's tensor in the order of a layer's modules; shared experts come last."""
    name = _ADAPTER.sub(".weight", rule.name)  # adapters follow their weight, all A before all B
    return int("shared_experts" in name), next(i for i, part in enumerate(ORDER) if part in name)


def _module_list(rule: Rule) -> str:
    """The list of a tower's modules that a rule speaks of, which all of its modules follow; "": it is in none."""
    return rule.name.partition("{l}")[0] if "{l}" in rule.name else ""


@dataclass(frozen=True)
class Bucket:
    """Tensors that are packed end to end.  runs: in the modules' order, (elements of each tensor, repeats of these)."""

    runs: tuple[tuple[tuple[int, ...], int], ...]

    @cached_property
    def aligned(self) -> bool:
        """Whether no tensor needs padding before the next one."""
        return all(numel % TENSOR_MULTIPLE == 0 for numels, _ in self.runs for numel in numels)

    @cached_property
    def held(self) -> int:
        """The elements of all tensors, without padding."""
        return sum(sum(numels) * repeats for numels, repeats in self.runs)

    def padded(self, num_ranks: int) -> int:
        """The elements of the bucket with padding, over ``num_ranks`` data-parallel ranks."""
        gaps = sum(sum(map(_padded, numels)) * repeats for numels, repeats in self.runs)
        return _up(gaps, lcm(num_ranks, BUCKET_MULTIPLE))

    def part(self, num_ranks: int, rank: int) -> int:
        """The elements of tensors, without padding, in the ``rank``-th of ``num_ranks`` equal parts."""
        size = self.padded(num_ranks) // num_ranks
        begin = rank * size
        end = (rank + 1) * size
        if self.aligned:
            return max(0, min(end, self.held) - begin)
        place = total = 0
        for numels, repeats in reversed(self.runs):
            for _ in range(repeats):
                for numel in reversed(numels):
                    total += max(0, min(end, place + numel) - max(begin, place))
                    place += _padded(numel)
        return total


def _padded(numel: int) -> int:
    return _up(numel, TENSOR_MULTIPLE)


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def chunk_buckets(
    sizes: ModelSizes,
    parallel: ParallelConfig,
    layers: Sequence[int],
    *,
    first: bool,
    last: bool,
    tower: tuple[int, ...] = (),
) -> tuple[list[Bucket], list[Bucket]]:
    """(dense buckets, buckets of experts) of the model chunk of ``layers``.

    first, last: whether it is the model's first chunk, with the embedding, and its last, with the output.
    tower: elements of each tensor of a vision tower in it.
    """
    model = sizes.model
    tp = parallel.tp
    begin = sizes.ends((Stage.first,), tp) if first else ()
    stages = [Stage.last] if last else []
    end = sizes.ends(stages, tp)
    tied = model.tie_output and sizes.head is Head.lm
    copy = sizes.ends((Stage.last_copy,), tp) if last and not first and tied else ()
    dense: list[tuple[tuple[int, ...], int]] = []
    experts: list[tuple[tuple[int, ...], int]] = []
    per_rank = 0 if model.moe is None else model.moe.num_experts // parallel.ep
    for layer in layers:
        ours, expert = sizes.layer(model.kind(layer), tp, parallel.etp)
        if dense and dense[-1][0] == ours:
            dense[-1] = (ours, dense[-1][1] + 1)
        else:
            dense.append((ours, 1))
        if expert:
            count = experts[-1][1] if experts else 0
            experts = [(expert, count + per_rank)]
    shared = tied and parallel.pp > 1
    alone = [Bucket(((part, 1),)) for part in (copy, begin) if part] if shared else []
    inside = ([] if shared else [(begin, 1)]) + dense + [(end, 1), (tower, 1)]
    buckets = [Bucket(tuple(run for run in inside if run[0])), *alone]
    return [bucket for bucket in buckets if bucket.held], [Bucket(tuple(experts))] if experts else []


class States:
    """The ``StateBytes`` of every rank of ``parallel`` over ``world_size`` processes.

    overlap: gradients are reduced in buckets, during the backward pass (``overlap_grad_reduce``).
    lora: the adapters that train; None: all weights do.
    frozen_tower: the vision tower, if there is one, has weights alone.
    trained: the states of what trains.

    Raises ConfigError if the layout does not divide the world or the layers.
    """

    def __init__(
        self,
        sizes: ModelSizes,
        parallel: ParallelConfig,
        world_size: int,
        precision: Precision,
        *,
        trainable: bool = True,
        overlap: bool = False,
        lora: LoraConfig | None = None,
        frozen_tower: bool = False,
    ) -> None:
        self.sizes = sizes
        self.parallel = parallel
        self.precision = precision
        self.trainable = trainable
        self.overlap, self.trained = overlap, self
        self.frozen_tower = frozen_tower
        if lora is not None and trainable:
            adapters = ModelSizes(sizes.model, head=sizes.head, lora=lora)
            self.trained = States(adapters, parallel, world_size, Precision.float32, overlap=overlap)
        self.layout = Layout.of(parallel, world_size)
        self.placement = place_layers(sizes.model.num_layers, parallel)
        self._buckets: dict[int, tuple[list[Bucket], list[Bucket]]] = {}
        self._of_stage: dict[int, StateBytes] = {}

    def _cut(self, buckets: Sequence[Bucket]) -> list[Bucket]:
        """``buckets`` as ``overlap_grad_reduce`` cuts them: each is closed with the tensor that fills it.

        Megatron cuts from the last tensor to the first (param_and_grad_buffer.py), into buckets of at least 40 million
        elements, or a million per data-parallel rank (distributed_data_parallel.py).
        """
        size = max(40_000_000, 1_000_000 * self.layout.dp)
        parts = list[Bucket]()
        for bucket in buckets:
            tensors = list[int]()
            end = 0
            for numels, repeats in reversed(bucket.runs):
                for numel in (*reversed(numels),) * repeats:
                    tensors.append(numel)
                    end = _padded(end) + numel
                    if end >= size:
                        parts.append(Bucket(((tuple(reversed(tensors)), 1),)))
                        tensors = []
                        end = 0
            parts += [Bucket(((tuple(reversed(tensors)), 1),))] if tensors else []
        return parts

    def buckets(self, stage: int) -> tuple[list[Bucket], list[Bucket]]:
        """(dense buckets, buckets of experts) of all chunks of a pipeline stage."""
        if stage not in self._buckets:
            dense = list[Bucket]()
            experts = list[Bucket]()
            for chunk in range(stage, len(self.placement), self.parallel.pp):
                first = chunk == 0
                last = chunk == len(self.placement) - 1
                ours, theirs = chunk_buckets(
                    self.sizes,
                    self.parallel,
                    self.placement[chunk],
                    first=first,
                    last=last,
                    tower=self.sizes.tower if first and not self.frozen_tower else (),
                )
                if self.overlap and chunk == 0:  # the gradients of other chunks are ready before the first one's
                    ours = self._cut(ours)
                    theirs = self._cut(theirs)
                dense += ours
                experts += theirs
            self._buckets[stage] = dense, experts
        return self._buckets[stage]

    def of_rank(self, rank: int) -> StateBytes:
        """The state of ``rank``."""
        layout = self.layout
        stage = layout.coords(rank).pp
        if self.trained is not self:
            return self._beside(self._frozen(stage), self.trained.of_rank(rank))
        return self._bytes(stage, layout.group("dp_cp", rank).index(rank), layout.group("edp", rank).index(rank))

    def of_stage(self, stage: int) -> StateBytes:
        """The state of the rank of a pipeline stage that holds most."""
        if stage not in self._of_stage:
            self._of_stage[stage] = self._most(stage)
        return self._of_stage[stage]

    def _frozen(self, stage: int) -> StateBytes:
        """The state of weights that do not train; a value head, which does, is counted twice."""
        numels = sum(bucket.held for buckets in self.buckets(stage) for bucket in buckets) + self.outside(stage)
        weights = numels * BYTES[self.precision]
        return StateBytes(num_parameters=numels, weights=weights, gradients=0, optimizer=0)

    def outside(self, stage: int) -> int:
        """The elements of a frozen tower, which are in no bucket."""
        return sum(self.sizes.tower) if self.frozen_tower and stage == 0 else 0

    @staticmethod
    def _beside(frozen: StateBytes, trained: StateBytes) -> StateBytes:
        return replace(
            trained,
            num_parameters=frozen.num_parameters + trained.num_parameters,
            weights=frozen.weights + trained.weights,
        )

    def _most(self, stage: int) -> StateBytes:
        if self.trained is not self:
            return self._beside(self._frozen(stage), self.trained.of_stage(stage))
        layout, (dense, experts) = self.layout, self.buckets(stage)
        if all(bucket.aligned for bucket in (*dense, *experts)):
            return self._bytes(stage, 0, 0)
        ranks = range(layout.dp * layout.cp)
        most = max(ranks, key=lambda rank: sum(bucket.part(len(ranks), rank) for bucket in dense))
        expert_most = max(range(layout.edp), key=lambda rank: sum(each.part(layout.edp, rank) for each in experts))
        return self._bytes(stage, most, expert_most)

    def _bytes(self, stage: int, dense_rank: int, expert_rank: int) -> StateBytes:
        size = BYTES[self.precision]
        layout = self.layout
        numels = padded = parts = 0
        for buckets, num_ranks, rank in zip(
            self.buckets(stage), (layout.dp * layout.cp, layout.edp), (dense_rank, expert_rank), strict=True
        ):
            numels += sum(bucket.held for bucket in buckets)
            padded += sum(bucket.padded(num_ranks) for bucket in buckets)
            parts += sum(bucket.part(num_ranks, rank) for bucket in buckets)
        if not self.trainable:
            return self._frozen(stage)
        main = 0 if self.precision is Precision.float32 else MAIN_BYTES
        outside = self.outside(stage)
        return StateBytes(
            num_parameters=numels + outside,
            weights=(padded + outside) * size,
            gradients=padded * GRADIENT_BYTES,
            optimizer=parts * (main + 2 * MOMENT_BYTES),
        )
