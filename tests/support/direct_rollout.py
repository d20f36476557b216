"""What vLLM stores of a Hugging Face checkpoint, sliced by hand, parameter by parameter, with no code of the tables.

Written from vllm/model_executor/layers/linear.py, vocab_parallel_embedding.py and fused_moe (0.32).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from mcore_rl.config.model import ModelConfig
from mcore_rl.config.rollout import RolloutLayout

Array = NDArray[np.int64]
Read = Callable[[str], Array]


def _part(tensor: Array, dim: int, count: int, index: int) -> Array:
    return np.split(tensor, count, axis=dim)[index]


def _vocab(tensor: Array, tp: int, rank: int) -> Array:
    rows = -(-len(tensor) // 64) * 64
    return _part(np.pad(tensor, ((0, rows - len(tensor)), (0, 0))), 0, tp, rank)


def _qkv(read: Read, name: str, model: ModelConfig, tp: int, rank: int) -> Array:
    heads, kv_heads, width = model.num_attention_heads // tp, model.num_query_groups, model.head_dim
    query = read(name.format("q"))[rank * heads * width : (rank + 1) * heads * width]
    mine = range(rank * kv_heads // tp, max((rank + 1) * kv_heads // tp, rank * kv_heads // tp + 1))
    rows = [row for head in mine for row in range(head * width, (head + 1) * width)]
    return np.concatenate([query, read(name.format("k"))[rows], read(name.format("v"))[rows]])


def llama_like(
    read: Read, model: ModelConfig, layout: RolloutLayout, rank: int, *, bias: bool = False, mixtral: bool = False
) -> dict[str, Array]:
    """Llama's, Qwen2's (``bias``) or Mixtral's tensors of ``rank``; ``read`` gives a Hugging Face tensor."""
    tp, at = layout.tp, rank % layout.tp
    tensors = {"model.embed_tokens.weight": _vocab(read("model.embed_tokens.weight"), tp, at)}
    tensors["model.norm.weight"] = read("model.norm.weight")
    if not model.tie_output:
        tensors["lm_head.weight"] = _vocab(read("lm_head.weight"), tp, at)
    for layer in range(model.num_layers):
        prefix = f"model.layers.{layer}."
        for norm in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            tensors[prefix + norm] = read(prefix + norm)
        attention = prefix + "self_attn."
        for kind in ("weight", "bias") if bias else ("weight",):
            tensors[f"{attention}qkv_proj.{kind}"] = _qkv(read, f"{attention}{{}}_proj.{kind}", model, tp, at)
        tensors[attention + "o_proj.weight"] = _part(read(attention + "o_proj.weight"), 1, tp, at)
        if mixtral:
            tensors |= _mixtral_experts(read, prefix + "block_sparse_moe.", model, layout, rank)
            continue
        gate, up = (_part(read(f"{prefix}mlp.{name}_proj.weight"), 0, tp, at) for name in ("gate", "up"))
        tensors[prefix + "mlp.gate_up_proj.weight"] = np.concatenate([gate, up])
        tensors[prefix + "mlp.down_proj.weight"] = _part(read(prefix + "mlp.down_proj.weight"), 1, tp, at)
    return tensors


def _mixtral_experts(read: Read, prefix: str, model: ModelConfig, layout: RolloutLayout, rank: int) -> dict[str, Array]:
    assert model.moe is not None
    if layout.ep == 1:
        experts, count, at = range(model.moe.num_experts), layout.tp, rank % layout.tp
    else:
        share = model.moe.num_experts // layout.ep
        first = (rank if layout.ep == layout.tp * layout.dp else rank % layout.tp) * share
        experts, count, at = range(first, first + share), 1, 0

    def stack(make: Callable[[str], Array]) -> Array:
        return np.stack([make(f"{prefix}experts.{expert}.") for expert in experts])

    w13 = stack(lambda e: np.concatenate([_part(read(f"{e}{name}.weight"), 0, count, at) for name in ("w1", "w3")]))
    w2 = stack(lambda e: _part(read(e + "w2.weight"), 1, count, at))
    stored = prefix + "experts.routed_experts."
    return {prefix + "gate.weight": read(prefix + "gate.weight"), stored + "w13_weight": w13, stored + "w2_weight": w2}
