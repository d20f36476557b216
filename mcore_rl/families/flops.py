"""Floating-point operations that a model needs for sequences of given lengths: the numerator of MFU.

MFU, model FLOPs utilisation (PaLM, arXiv:2204.02311, appendix B), is these operations divided by what the devices could
have done in the same time.  Repeated work (recompute) and useless work (padding, the masked half of the attention
scores) do not count, so that layouts and kernels can be compared.  A multiplication with its addition counts as two:

    matrices    2 N a token.  N: parameters that multiply a token; of the experts only the chosen ones
    attention   2 (d_k + d_v) for each head and each pair of a query and a key that it sees: ``q k``, then ``p v``
    linear      6 d_k d_v a token and head: ``S k``, the outer product that is added to the state S, ``S q``
    training    3 times the forward pass: each product has two more in the backward pass (arXiv:2001.08361, 2.1)
    pictures    2 N a patch of the vision tower, its attention over all pairs of a picture or of a window of it

Appendix B counts 12 L H Q T for attention, all pairs of a sequence of T; here only pairs that the causal mask and the
window leave count, by each sequence's own length.  Norms, rotations, softmax and activations are left out, as there.

Everything follows from the ``ModelConfig``; nothing here knows a device or a layout.
"""

from __future__ import annotations

from collections.abc import Iterable

from mcore_rl.config.model import ModelConfig, MoeConfig, TowerKind, VisionConfig
from mcore_rl.config.role import Head

PatchGrid = tuple[int, int]


def matmul_parameters(model: ModelConfig, *, head: Head = Head.lm) -> int:
    """Parameters that multiply a token: all but the embedding (a lookup), norms, biases and idle experts.

    head: the value head has one column, the projection to the vocabulary as many as there are tokens.
    """
    outputs = {Head.lm: model.vocab_size, Head.value: 1, Head.hidden: 0}[head]
    return sum(_layer_parameters(model, layer) for layer in range(model.num_layers)) + outputs * model.hidden_size


def visible_pairs(length: int, window: int | None = None) -> int:
    """Pairs of a query and a key in a sequence of ``length`` tokens: a token sees itself and the tokens before it.

    window: keys that a query sees at most, itself included.
    """
    seen = length if window is None else min(length, window)
    return seen * (seen + 1) // 2 + (length - seen) * seen


def forward_flops(model: ModelConfig, lengths: Iterable[int], *, head: Head = Head.lm) -> int:
    """Operations of one forward pass over separate sequences of ``lengths`` tokens."""
    lengths = list(lengths)
    num_sliding = len(set(model.sliding_layers))
    pairs = (model.num_attention_layers - num_sliding) * sum(visible_pairs(length) for length in lengths)
    if num_sliding:
        pairs += num_sliding * sum(visible_pairs(length, model.sliding_window) for length in lengths)
    attention = 2 * model.num_attention_heads * (model.head_dim + _value_width(model)) * pairs
    return 2 * matmul_parameters(model, head=head) * sum(lengths) + attention + _delta_rule(model) * sum(lengths)


def train_flops(model: ModelConfig, lengths: Iterable[int], *, head: Head = Head.lm) -> int:
    """Operations of one forward and backward pass, all weights trained."""
    return 3 * forward_flops(model, lengths, head=head)


def patch_cost(model: ModelConfig, *, trained: bool) -> float:
    """What a patch of a picture costs in the vision tower, beside a token of text in the language model.

    Attention is left out in both.  trained: whether the tower learns, else it has a third of its products.
    """
    if model.vision is None:
        return 0.0
    return tower_parameters(model, model.vision) / matmul_parameters(model) / (1 if trained else 3)


def tower_parameters(model: ModelConfig, vision: VisionConfig) -> float:
    """Parameters of the tower that multiply a patch; those that multiply merged patches count for each in part."""
    width = vision.hidden_size
    gated = vision.kind is TowerKind.qwen2_5_vl
    block = 4 * width**2 + (3 if gated else 2) * width * vision.ffn_hidden_size
    area = vision.merge_size**2
    merger = (width * area + model.hidden_size) * width * area
    return _embedding_parameters(vision) + vision.depth * block + (1 + len(vision.deepstack)) * merger / area


def tower_flops(model: ModelConfig, grids: Iterable[PatchGrid], *, train: bool = False) -> int:
    """Operations of the vision tower on pictures, forward, or with ``train`` also backward; 0 without a tower.

    grids: (patches high, patches wide) of each picture.
    """
    vision = model.vision
    if vision is None:
        return 0
    patches = pairs = 0
    full = vision.depth if vision.window_size is None else len(set(vision.full_blocks))
    for height, width in grids:
        patches += height * width
        pairs += full * (height * width) ** 2
        if vision.window_size is not None:
            side = vision.window_size // vision.patch_size // vision.merge_size * vision.merge_size
            pairs += (vision.depth - full) * _pieces_squared(height, side) * _pieces_squared(width, side)
    forward = round(2 * tower_parameters(model, vision) * patches) + 4 * vision.hidden_size * pairs
    if not train:
        return forward
    return 3 * forward - 2 * _embedding_parameters(vision) * patches  # pixels need no gradient


def patch_width(vision: VisionConfig) -> int:
    """The numbers of a patch: three colours of each pixel, in each frame."""
    return 3 * vision.temporal_patch_size * vision.patch_size**2


def _embedding_parameters(vision: VisionConfig) -> int:
    """Parameters of the projection that makes a hidden state of a patch's pixels."""
    return patch_width(vision) * vision.hidden_size


def _pieces_squared(length: int, side: int) -> int:
    """The sum of squares of the pieces that ``length`` is cut into, each of ``side`` but for a shorter last one."""
    whole, rest = divmod(length, side)
    return whole * side**2 + rest**2


def _delta_rule(model: ModelConfig) -> int:
    """Operations of linear attention's state, of a token in all layers that have one; by the rule's definition."""
    linear = model.linear_attention
    if linear is None:
        return 0
    return len(linear.layers) * 6 * linear.num_value_heads * linear.key_head_dim * linear.value_head_dim


def _value_width(model: ModelConfig) -> int:
    return model.head_dim if model.mla is None else model.mla.v_head_dim


def _layer_parameters(model: ModelConfig, layer: int) -> int:
    attention = _linear_parameters(model) if model.is_linear(layer) else _attention_parameters(model)
    if model.has_experts(layer):
        assert model.moe is not None
        return attention + _expert_parameters(model.hidden_size, model.moe)
    return attention + 3 * model.hidden_size * model.ffn_hidden_size


def _linear_parameters(model: ModelConfig) -> int:
    """Projections and convolution of linear attention."""
    linear = model.linear_attention
    assert linear is not None
    keys = linear.key_dim
    values = linear.value_dim
    projected = 2 * keys + 2 * values + 2 * linear.num_value_heads
    return model.hidden_size * (projected + values) + linear.conv_kernel_dim * (2 * keys + values)


def _attention_parameters(model: ModelConfig) -> int:
    hidden = model.hidden_size
    heads = model.num_attention_heads
    mla = model.mla
    query = heads * model.head_dim
    if mla is None:
        projected = query * (2 if model.attention_output_gate else 1) + 2 * model.num_query_groups * model.head_dim
        return hidden * projected + query * hidden
    # As trained: keys and values are projected up from the latent.  (Inference may absorb that into the queries.)
    queries = hidden * query if mla.q_lora_rank is None else mla.q_lora_rank * (hidden + query)
    latent = hidden * (mla.kv_lora_rank + mla.qk_rope_head_dim)
    keys_and_values = mla.kv_lora_rank * heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    return queries + latent + keys_and_values + heads * mla.v_head_dim * hidden


def _expert_parameters(hidden: int, moe: MoeConfig) -> int:
    """Parameters of the router, the chosen experts, and the shared expert with its gate."""
    widths = moe.top_k * moe.ffn_hidden_size + moe.shared_ffn_hidden_size
    return hidden * (moe.num_experts + 3 * widths + moe.shared_gate)
