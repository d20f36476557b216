"""The memory of a rollout rank: weights, exactly, from the families' tables of vLLM's tensors; cache; what is left.

vLLM (0.32) takes ``gpu_memory_utilization`` of a device, subtracts weights, graphs and what a forward pass of its
longest batch was seen to take, and makes the rest cache (``determine_available_memory`` in v1/worker/gpu_worker.py).
On the CPU the cache is what is asked for, or 1 GiB, and the output projection is there twice: plain, and packed as the
weight of every product is (``rollout/receiver/live_weights.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from mcore_rl.config.model import ModelConfig
from mcore_rl.config.rollout import (
    BYTES,
    CPU_BATCHED_TOKENS,
    CPU_KV_CACHE_BYTES,
    RolloutLayout,
    ServingConfig,
    kv_bytes_per_token,
    padded_vocab_size,
)
from mcore_rl.families.rules import Axis, Rule, Stage
from mcore_rl.planning.overheads import COLLECTIVE_BYTES, CONTEXT_BYTES, GRAPH_BYTES
from mcore_rl.planning.states import family_for

BATCHED_TOKENS = 8192  # of one step of vLLM on large devices, where max_num_batched_tokens is not given


@dataclass(frozen=True, kw_only=True)
class Serving:
    """Of one rollout rank, in bytes.

    weights: exact.  working: of a forward pass over its longest batch.  overhead: context, communicators, graphs.
    budget: what vLLM may take in all.  cache: of keys and values; negative where nothing is left.  per_sequence: of
    it, a sequence of the greatest length.  packed: on the CPU, of weights that are there plain too.
    """

    weights: int
    working: int
    overhead: int
    budget: int
    cache: int
    per_sequence: int
    packed: int = 0

    @property
    def concurrency(self) -> float:
        """Sequences of the greatest length that the cache holds at once."""
        return max(0, self.cache) / self.per_sequence

    @property
    def total(self) -> int:
        """What vLLM takes: its budget, or more where that is not enough."""
        return max(self.budget, self.weights + self.working + self.overhead + max(0, self.cache))


def serving(
    model: ModelConfig, config: ServingConfig, *, device_bytes: int | None, latent_attention: bool = True
) -> Serving:
    """Of an engine of ``model``.  device_bytes: of one accelerator; None on the CPU."""
    layout = config.layout
    weights = rollout_weight_bytes(model, layout, BYTES[config.dtype], latent_attention=latent_attention)
    per_token = cache_bytes_per_token(model, config, latent_attention=latent_attention)
    per_sequence = -(-config.max_model_len // 16) * 16 * per_token  # blocks of 16 tokens
    working = _working_bytes(model, config, CPU_BATCHED_TOKENS if device_bytes is None else BATCHED_TOKENS)
    if device_bytes is None:
        rows = padded_vocab_size(model) // layout.tp
        return Serving(
            weights=weights,
            working=working,
            overhead=0,
            budget=0,
            cache=config.kv_cache_memory_bytes or CPU_KV_CACHE_BYTES,
            per_sequence=per_sequence,
            packed=rows * model.hidden_size * BYTES[config.dtype],
        )
    overhead = CONTEXT_BYTES + (COLLECTIVE_BYTES if layout.world_size > 1 else 0)
    overhead += 0 if config.enforce_eager else GRAPH_BYTES
    budget = int(config.gpu_memory_utilization * device_bytes)
    cache = config.kv_cache_memory_bytes or budget - weights - working - overhead
    return Serving(
        weights=weights, working=working, overhead=overhead, budget=budget, cache=cache, per_sequence=per_sequence
    )  # fmt: skip


def cache_bytes_per_token(model: ModelConfig, config: ServingConfig, *, latent_attention: bool = True) -> int:
    """Of one rank, all layers.  Latent attention keeps the latent and the rotated key, whole on every rank."""
    if model.mla is None:
        return kv_bytes_per_token(model, config)
    size = BYTES[config.dtype] * model.num_layers
    if latent_attention:
        return size * (model.mla.kv_lora_rank + model.mla.qk_rope_head_dim)
    return size * 2 * model.head_dim * max(1, model.num_attention_heads // config.tp)


def rollout_weight_bytes(
    model: ModelConfig, layout: RolloutLayout, itemsize: int, *, latent_attention: bool = True
) -> int:
    """Bytes of the weights that a rollout rank stores, padding included; all ranks store equally many."""
    family = family_for(model)
    latent = latent_attention or model.mla is None
    rules = family.rollout if latent else family.rollout_without_latent
    return sum(_rule_bytes(rule, model, layout, itemsize) for rule in rules if rule.only(model))


def _rule_bytes(rule: Rule, model: ModelConfig, layout: RolloutLayout, itemsize: int) -> int:
    cut = {
        Axis.none: False,
        Axis.tensor: True,
        Axis.expert_tensor: layout.ep == 1,
        Axis.shared_expert: not layout.experts_span_replicas,
    }[rule.axis]
    elements = prod(rule.local_shape(model, layout.tp if cut else 1))
    if rule.stacked:
        assert model.moe is not None
        elements *= model.moe.num_experts // layout.ep
    layers = 1
    if rule.stage is Stage.layer:
        layers = sum(rule.applies_to(model, layer) for layer in range(model.num_layers))
    return elements * layers * (4 if rule.dtype == "float32" else itemsize)


def _working_bytes(model: ModelConfig, config: ServingConfig, batched_tokens: int) -> int:
    """Of a step: a few hidden states and the widest product of all its tokens; logits of its sequences, in float32."""
    size, tp = BYTES[config.dtype], config.tp
    tokens = config.max_num_batched_tokens or max(batched_tokens, config.max_model_len)
    tokens = max(tokens, config.max_num_seqs)
    width = 2 * model.ffn_hidden_size / tp
    if model.moe is not None:
        moe = model.moe
        width = max(width, moe.top_k * (model.hidden_size + 2 * moe.ffn_hidden_size / (tp if config.ep == 1 else 1)))
    heads = (model.num_attention_heads + 2 * model.num_query_groups) * model.head_dim / tp
    logits = 3 * 4 * config.max_num_seqs * model.vocab_size
    return round(size * tokens * (4 * model.hidden_size + max(1.5 * width, heads))) + logits
