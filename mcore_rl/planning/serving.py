"""The memory of a rollout rank: weights, exact by the families' tables of vLLM's tensors; cache; working memory.

vLLM (0.32) takes ``gpu_memory_utilization`` of a device, subtracts weights, graphs and the measured memory of a forward
pass over its longest batch, and uses the rest as cache (``determine_available_memory`` in v1/worker/gpu_worker.py).  On
the CPU, the cache has the configured size, or 1 GiB, and the output projection is in memory twice: plain, and packed as
vLLM packs the weight of every matrix product (``rollout/vllm/receiver/live_weights.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from mcore_rl.config.lora import LoraConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.rollout import (
    BYTES,
    CPU_BATCHED_TOKENS,
    CPU_KV_CACHE_BYTES,
    Quantization,
    RolloutLayout,
    ServingConfig,
    kv_bytes_per_token,
    padded_vocab_size,
    quantization_of,
    state_bytes,
)
from mcore_rl.families.rules import Axis, Rule
from mcore_rl.planning.overheads import GRAPH_BYTES, ProcessMemory
from mcore_rl.planning.states import family_for
from mcore_rl.weights.adapter_table import AdapterTable
from mcore_rl.weights.quantised_shards import bytes_of_scale, is_quantised, num_scales
from mcore_rl.weights.rollout_adapters import RolloutAdapterTable
from mcore_rl.weights.rollout_table import RolloutTable
from mcore_rl.weights.table import Table

BATCHED_TOKENS = 8192  # vLLM's default of max_num_batched_tokens on large devices


@dataclass(frozen=True, kw_only=True)
class Serving:
    """The memory of one rollout rank, bytes.

    weights: exact.
    adapters: vLLM's memory for adapters that it applies, exact.
    sent: what an update brings, if not all weights as they are held: adapters, or weights before they are quantised.
    converting: the largest tensor while an update quantises it, as it arrives and as it becomes.
    working: of a forward pass over the longest batch.
    overhead: context, communicators, graphs.
    budget: what vLLM may use in all.
    cache: the KV cache; negative if nothing is left for it.
    per_sequence: cache of one sequence of the greatest length.
    encoder: of a vision tower on the most pictures of a step, and their features; beside the budget, since vLLM is told
    not to measure it.
    packed: on the CPU, packed copies of weights that are also in memory plain.
    """

    weights: int
    working: int
    overhead: int
    budget: int
    cache: int
    per_sequence: int
    packed: int = 0
    adapters: int = 0
    sent: int = 0
    converting: int = 0
    encoder: int = 0

    @property
    def update_bytes(self) -> int:
        """What an update brings, after the first."""
        return self.sent or self.weights

    @property
    def concurrency(self) -> float:
        """How many sequences of the greatest length the cache holds at once."""
        return max(0, self.cache) / self.per_sequence

    @property
    def awake(self) -> int:
        """What it uses while weights are sent: its cache still sleeps."""
        return self.weights + self.adapters + self.converting + self.overhead

    @property
    def total(self) -> int:
        """What vLLM uses: its budget, or more if that is not enough; and ``encoder``."""
        used = self.weights + self.adapters + self.working + self.overhead + max(0, self.cache)
        return max(self.budget, used) + self.encoder


def serving(
    model: ModelConfig,
    config: ServingConfig,
    *,
    device_bytes: int | None,
    processes: ProcessMemory,
    latent_attention: bool = True,
    lora: LoraConfig | None = None,
) -> Serving:
    """The memory of a rank of an engine of ``model``.

    device_bytes: memory of one accelerator; None on the CPU.  processes: what they take beside tensors.
    latent_attention: vLLM runs MLA as such.  lora: the adapters that it applies.
    """
    layout = config.layout
    size = BYTES[config.dtype]
    quantization = quantization_of(config)
    adapters, sent = (0, 0) if lora is None else adapter_bytes(model, layout, lora, size)
    weights = rollout_weight_bytes(model, layout, size, latent_attention=latent_attention, quantization=quantization)
    converting = 0
    if quantization is not Quantization.none:
        sent = rollout_weight_bytes(model, layout, size, latent_attention=latent_attention)
        converting = converting_bytes(model, layout, size, quantization)
    per_token = cache_bytes_per_token(model, config, latent_attention=latent_attention)
    per_sequence = -(-config.max_model_len // 16) * 16 * per_token + state_bytes(model, config)  # blocks of 16 tokens
    working = _working_bytes(model, config, CPU_BATCHED_TOKENS if device_bytes is None else BATCHED_TOKENS)
    overhead = budget = packed = 0
    if device_bytes is None:
        cache = CPU_KV_CACHE_BYTES
        packed = padded_vocab_size(model) // layout.tp * model.hidden_size * size
    else:
        overhead = processes.on_device(layout.world_size, 1) + (0 if config.enforce_eager else GRAPH_BYTES)
        budget = int(config.gpu_memory_utilization * device_bytes)
        cache = budget - weights - adapters - working - overhead
    return Serving(
        weights=weights,
        working=working,
        overhead=overhead,
        budget=budget,
        packed=packed,
        adapters=adapters,
        sent=sent,
        cache=config.kv_cache_memory_bytes or cache,
        per_sequence=per_sequence,
        converting=converting,
        encoder=_encoder_bytes(model, config, CPU_BATCHED_TOKENS if device_bytes is None else BATCHED_TOKENS),
    )


def cache_bytes_per_token(model: ModelConfig, config: ServingConfig, *, latent_attention: bool = True) -> int:
    """Bytes of KV cache per token on a rank, all layers.  MLA caches the whole latent and rotated key on each rank."""
    if model.mla is None:
        return kv_bytes_per_token(model, config)
    size = BYTES[config.dtype] * model.num_layers
    if latent_attention:
        return size * (model.mla.kv_lora_rank + model.mla.qk_rope_head_dim)
    return size * 2 * model.head_dim * max(1, model.num_attention_heads // config.tp)


def rollout_weight_bytes(
    model: ModelConfig,
    layout: RolloutLayout,
    itemsize: int,
    *,
    latent_attention: bool = True,
    quantization: Quantization = Quantization.none,
) -> int:
    """The bytes of weights that a rollout rank stores, padding and scales included; all ranks store the same number."""
    family = family_for(model)
    latent = latent_attention or model.mla is None
    rules = family.rollout if latent else family.rollout_without_latent
    return sum(
        _rule_bytes(rule, model, layout, itemsize, quantization) * _num_layers(rule, model)
        for rule in rules
        if rule.only(model)
    )


def converting_bytes(model: ModelConfig, layout: RolloutLayout, itemsize: int, quantization: Quantization) -> int:
    """The most bytes of a tensor of a rank together with what it is quantised to."""
    rules = [rule for rule in family_for(model).rollout if rule.only(model) and is_quantised(rule)]
    return max(
        _rule_bytes(rule, model, layout, itemsize) + _rule_bytes(rule, model, layout, itemsize, quantization)
        for rule in rules
        if _num_layers(rule, model)
    )


def adapter_bytes(model: ModelConfig, layout: RolloutLayout, lora: LoraConfig, itemsize: int) -> tuple[int, int]:
    """(bytes of vLLM's memory for adapters on a rank, those of them that an update writes)."""
    family = family_for(model)
    table = RolloutAdapterTable(RolloutTable(family, model, layout), AdapterTable(Table(family, model), lora))
    return table.held_bytes * itemsize, int(table.bytes_stored(itemsize).max())


def _rule_bytes(
    rule: Rule,
    model: ModelConfig,
    layout: RolloutLayout,
    itemsize: int,
    quantization: Quantization = Quantization.none,
) -> int:
    """Bytes of a rank's tensor of ``rule``, of one layer."""
    cut = {
        Axis.none: False,
        Axis.tensor: True,
        Axis.expert_tensor: layout.ep == 1,
        Axis.shared_expert: not layout.experts_span_replicas,
    }[rule.axis]
    shape = rule.local_shape(model, layout.tp if cut else 1)
    slots = 1
    if rule.stacked:
        assert model.moe is not None
        slots = model.moe.num_experts // layout.ep
    if quantization is not Quantization.none and is_quantised(rule):
        rows, columns = num_scales(quantization, (shape[0], shape[1]))
        return slots * (prod(shape) + rows * columns * bytes_of_scale(quantization))
    return slots * prod(shape) * (4 if rule.dtype == "float32" else itemsize)


def _num_layers(rule: Rule, model: ModelConfig) -> int:
    """How many tensors of ``rule`` there are, one for each layer, or block of a tower, that has it."""
    return len(rule.layers_of(model))


def _step_tokens(config: ServingConfig, batched_tokens: int) -> int:
    """The most tokens of a step.  batched_tokens: vLLM's default."""
    tokens = config.max_num_batched_tokens or max(batched_tokens, config.max_model_len)
    return max(tokens, config.max_num_seqs)


def _encoder_bytes(model: ModelConfig, config: ServingConfig, batched_tokens: int) -> int:
    """Memory of a tower: vLLM's budgets of pictures to encode in a step, and to keep features of, are a step's tokens.

    A block needs a few hidden states, and the projections of attention or of the MLP, which tensor ranks share.
    """
    vision = model.vision
    if vision is None:
        return 0
    size = BYTES[config.dtype]
    tokens = _step_tokens(config, batched_tokens)
    features = tokens * (1 + len(vision.deepstack)) * model.hidden_size
    width = max(3 * vision.hidden_size, 2 * vision.ffn_hidden_size) / config.tp
    return round(size * (features + tokens * vision.merge_size**2 * (4 * vision.hidden_size + width)))


def _working_bytes(model: ModelConfig, config: ServingConfig, batched_tokens: int) -> int:
    """Memory of one step: a few hidden states and the widest product of all tokens; float32 logits of all sequences."""
    size = BYTES[config.dtype]
    tp = config.tp
    tokens = _step_tokens(config, batched_tokens)
    width = 2 * model.ffn_hidden_size / tp
    if model.moe is not None:
        moe = model.moe
        width = max(width, moe.top_k * (model.hidden_size + 2 * moe.ffn_hidden_size / (tp if config.ep == 1 else 1)))
    heads = (model.num_attention_heads + 2 * model.num_query_groups) * model.head_dim / tp
    logits = 3 * 4 * config.max_num_seqs * model.vocab_size
    return round(size * tokens * (4 * model.hidden_size + max(1.5 * width, heads))) + logits
