"""The memory that a preset of ``model_configs/`` needs on one GPU: the formula of model_configs/README.md."""

from __future__ import annotations

from math import prod

from mcore_rl.config.model import ModelConfig
from mcore_rl.families.checkpoints import Preset
from mcore_rl.families.family import Family
from mcore_rl.families.rules import Axis
from mcore_rl.weights.table import Table

TOKENS = 8192  # of one microbatch on one data-parallel rank
RESERVED_GB = 4.0  # of the runtime, the collectives and a rollout engine that sleeps
USABLE = 0.9  # of the memory, while training
ROLLOUT_WEIGHTS = 0.6  # of the memory at most; the rest is for the cache of keys and values


def training_gb(family: Family, model: ModelConfig, preset: Preset) -> float:
    """10**9 bytes on the GPU that has most, with Adam, the distributed optimizer and full recompute."""
    table = Table(family, model, preset.training, preset.num_gpus)
    stages = [_stage_bytes(table, model, stage) for stage in range(preset.training.pp)]
    return max(stages) / 1e9 + RESERVED_GB


def _stage_bytes(table: Table, model: ModelConfig, stage: int) -> float:
    layout = table.layout
    rank = layout.rank_of(tp=0, cp=0, dp=0, pp=stage)
    dense = experts = 0
    for local in table.tensors(rank):
        if local.rule.per_expert:
            experts += prod(table.shape(local))
        else:
            dense += prod(table.shape(local))
    state = dense * (2 + 4 + 12 / (layout.dp * layout.cp)) + experts * (2 + 4 + 12 / layout.edp)
    layers = len(table.placement[stage])
    kept = 2 * TOKENS * model.hidden_size / layout.tp * layers * (layout.pp - stage)
    logits = 10 * TOKENS * -(-model.vocab_size // layout.tp) if stage == layout.pp - 1 else 0
    return state + kept + max(_layer_bytes(table, model), logits)


def _layer_bytes(table: Table, model: ModelConfig) -> float:
    """One layer while it is recomputed: its activations and their gradients, split over the tensor ranks."""
    heads = model.num_attention_heads + 2 * model.num_query_groups
    width = 6 * model.hidden_size + 2 * heads * model.head_dim + 3 * model.ffn_hidden_size
    if model.moe is not None:  # twice: tokens do not spread evenly over the experts
        width += 2 * model.moe.top_k * (2 * model.hidden_size + 3 * model.moe.ffn_hidden_size)
    return 2 * 2 * TOKENS * width / table.layout.tp


def rollout_gb(family: Family, model: ModelConfig, preset: Preset) -> float:
    """10**9 bytes of bfloat16 weights on one rollout rank."""
    whole = dense = experts = 0
    table = Table(family, model)
    for local in table.tensors(0):
        size = prod(table.shape(local))
        if local.rule.per_expert:
            experts += size
        elif local.rule.axis is Axis.none:
            whole += size
        else:
            dense += size
    layout = preset.rollout
    over = layout.ep if layout.ep > 1 else layout.tp
    return 2 * (whole + dense / layout.tp + experts / over) / 1e9
