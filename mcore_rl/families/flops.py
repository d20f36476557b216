"""Floating-point operations that a model needs for sequences of given lengths: the numerator of MFU.

MFU, model FLOPs utilisation (PaLM, arXiv:2204.02311, appendix B), is these operations divided by what the devices could
have done in the same time.  Repeated work (recompute) and useless work (padding, the masked half of the attention
scores) do not count, so that layouts and kernels can be compared.  A multiplication with its addition counts as two:

    matrices    2 N a token.  N: parameters that multiply a token; of the experts only the chosen ones
    attention   2 (d_k + d_v) for each head and each pair of a query and a key that it sees: ``q k``, then ``p v``
    training    3 times the forward pass: each product has two more in the backward pass (arXiv:2001.08361, 2.1)

Appendix B counts 12 L H Q T for attention, all pairs of a sequence of T; here only pairs that the causal mask and the
window leave count, by each sequence's own length.  Norms, rotations, softmax and activations are left out, as there.

Everything follows from the ``ModelConfig``; nothing here knows a device or a layout.
"""

from __future__ import annotations

from collections.abc import Iterable

from mcore_rl.config.model import ModelConfig, MoeConfig


def matmul_parameters(model: ModelConfig, *, critic: bool = False) -> int:
    """Parameters that multiply a token: all but the embedding (a lookup), norms, biases and idle experts.

    critic: a value head of one column in place of the projection to the vocabulary.
    """
    outputs = 1 if critic else model.vocab_size
    return sum(_layer_parameters(model, layer) for layer in range(model.num_layers)) + outputs * model.hidden_size


def visible_pairs(length: int, window: int | None = None) -> int:
    """Pairs of a query and a key in a sequence of ``length`` tokens: a token sees itself and the tokens before it.

    window: keys that a query sees at most, itself included.
    """
    seen = length if window is None else min(length, window)
    return seen * (seen + 1) // 2 + (length - seen) * seen


def forward_flops(model: ModelConfig, lengths: Iterable[int], *, critic: bool = False) -> int:
    """Operations of one forward pass over separate sequences of ``lengths`` tokens."""
    lengths = list(lengths)
    num_sliding = len(set(model.sliding_layers))
    pairs = (model.num_layers - num_sliding) * sum(visible_pairs(length) for length in lengths)
    if num_sliding:
        pairs += num_sliding * sum(visible_pairs(length, model.sliding_window) for length in lengths)
    attention = 2 * model.num_attention_heads * (model.head_dim + _value_width(model)) * pairs
    return 2 * matmul_parameters(model, critic=critic) * sum(lengths) + attention


def train_flops(model: ModelConfig, lengths: Iterable[int], *, critic: bool = False) -> int:
    """Operations of one forward and backward pass, all weights trained."""
    return 3 * forward_flops(model, lengths, critic=critic)


def _value_width(model: ModelConfig) -> int:
    return model.head_dim if model.mla is None else model.mla.v_head_dim


def _layer_parameters(model: ModelConfig, layer: int) -> int:
    if model.has_experts(layer):
        assert model.moe is not None
        return _attention_parameters(model) + _expert_parameters(model.hidden_size, model.moe)
    return _attention_parameters(model) + 3 * model.hidden_size * model.ffn_hidden_size


def _attention_parameters(model: ModelConfig) -> int:
    hidden, heads, mla = model.hidden_size, model.num_attention_heads, model.mla
    query = heads * model.head_dim
    if mla is None:
        return hidden * (query + 2 * model.num_query_groups * model.head_dim) + query * hidden
    # As trained: keys and values are projected up from the latent.  (Inference may absorb that into the queries.)
    queries = hidden * query if mla.q_lora_rank is None else mla.q_lora_rank * (hidden + query)
    latent = hidden * (mla.kv_lora_rank + mla.qk_rope_head_dim)
    keys_and_values = mla.kv_lora_rank * heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    return queries + latent + keys_and_values + heads * mla.v_head_dim * hidden


def _expert_parameters(hidden: int, moe: MoeConfig) -> int:
    """Parameters of the router, the chosen experts, and the shared expert with its gate."""
    widths = moe.top_k * moe.ffn_hidden_size + moe.shared_ffn_hidden_size
    return hidden * (moe.num_experts + 3 * widths + moe.shared_gate)
