"""Which tensors engines hold in fp8, in which blocks, and whether shards are whole blocks; read from tables."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum

from mcore_rl.config.model import ModelConfig
from mcore_rl.config.rollout import Quantization, RolloutConfig
from mcore_rl.families.family import Family
from mcore_rl.families.rules import Axis, Layers, Rule, Stage
from mcore_rl.ground.errors import Violation
from mcore_rl.weights.rollout_table import RolloutTable

KEY = "rollout.quantization"
BLOCK = 128
MX_BLOCK = 32


class LayerGroup(Enum):
    """Where in a layer a quantised matrix is; shared experts are dense."""

    attention = "attention"
    dense = "dense"
    experts = "experts"


def group_of(rule: Rule) -> LayerGroup:
    """The group of a quantised ``rule``."""
    if rule.stacked:
        return LayerGroup.experts
    return LayerGroup.attention if "attn." in rule.name else LayerGroup.dense


def is_quantised(rule: Rule) -> bool:
    """Whether vLLM's online quantisation takes the tensors of ``rule``.

    These are the matrices of attention, of dense layers and of experts.  Everything else stays as it is: embedding,
    head, norms, biases, routers and other matrices that are whole on every rank, linear attention, a vision tower.
    """
    return (
        rule.stage is Stage.layer
        and rule.layers is not Layers.linear
        and rule.axis is not Axis.none
        and rule.dtype is None
        and all(len(tensor.dims) == 2 for tensor in rule.hf)
    )


def block_shape(quantization: Quantization, shape: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns that share a scale, in a matrix of ``shape``."""
    rows, columns = shape
    return {
        Quantization.fp8_block: (BLOCK, BLOCK),
        Quantization.fp8_channel: (1, columns),
        Quantization.fp8_tensor: (rows, columns),
        Quantization.mxfp8: (1, MX_BLOCK),
    }[quantization]


def num_scales(quantization: Quantization, shape: tuple[int, int]) -> tuple[int, int]:
    """How many scales a matrix of ``shape`` has, along its rows and its columns."""
    rows, columns = block_shape(quantization, shape)
    return -(-shape[0] // rows), -(-shape[1] // columns)


def bytes_of_scale(quantization: Quantization) -> int:
    """Bytes of a scale: float32, or the exponent of a power of two."""
    return 1 if quantization is Quantization.mxfp8 else 4


def partial_columns(quantization: Quantization, rule: Rule, model: ModelConfig, num_shards: int) -> int | None:
    """Columns of a shard that is not whole blocks; None: it is, or its scheme has no blocks of columns."""
    if quantization not in (Quantization.fp8_block, Quantization.mxfp8):
        return None
    columns = rule.local_shape(model, num_shards)[1]
    return columns if columns % block_shape(quantization, (1, columns))[1] else None


def shard_violations(family: Family, model: ModelConfig, rollout: RolloutConfig) -> Iterator[Violation]:
    """Why the engines of ``rollout`` cannot hold ``model`` in ``rollout.quantization``.

    Kernels multiply whole blocks of columns, and vLLM widens experts that are not whole blocks.  ``rollout``'s layout
    must be one that vLLM can run.
    """
    quantization = rollout.quantization
    if quantization is Quantization.none:
        return
    table = RolloutTable(family, model, rollout.layout)
    for what, there in (
        ("latent attention, which vLLM multiplies out after quantising,", model.mla is not None),
        ("a model with a vision tower", model.vision is not None),
        ("experts whose halves take turns", any(rule.turn[1] > 1 for rule in table.rules)),
    ):
        if there:
            problem = f"updates of {what} are not quantised yet"
            yield Violation(KEY, quantization.value, problem, f"Write {KEY}=none")
            return
    tp = rollout.layout.tp
    if tp > 1 and quantization in (Quantization.fp8_channel, Quantization.fp8_tensor):
        problem = "has scales of elements that several ranks hold, and these would wait for one another in an update"
        remedy = f"Write rollout.tp=1, or {KEY}={Quantization.fp8_block.value}"
        yield Violation(KEY, quantization.value, problem, remedy)
    partial = {}
    for rule in table.rules:
        if is_quantised(rule) and table.layers(rule):
            columns = partial_columns(quantization, rule, model, table.num_shards(rule))
            if columns is not None:
                partial[rule.name.rpartition("{l}.")[2]] = columns
    if partial:
        names = ", ".join(f"{name} has {columns} on a rank" for name, columns in partial.items())
        size = block_shape(quantization, (1, 1))[1]
        problem = f"scales {size} columns of a matrix at a time, and {names}"
        other = f"{KEY}={Quantization.fp8_channel.value}"
        remedy = f"Write {other}" if tp == 1 else f"Write a rollout.tp that leaves multiples of {size}"
        yield Violation(KEY, quantization.value, problem, remedy)


def tensors_by_form(family: Family, model: ModelConfig) -> tuple[list[str], list[str]]:
    """(tensors that are quantised, matrices that stay plain) of a layer of each kind, and of the ends, by name."""
    quantised: list[str] = []
    plain: list[str] = []
    for rule in family.rollout:
        if rule.only(model) and rule.layers_of(model) and all(len(tensor.dims) > 1 for tensor in rule.hf):
            (quantised if is_quantised(rule) else plain).append(rule.name.rpartition("{l}.")[2])
    return quantised, plain
