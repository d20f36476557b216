"""Floating-point operations of a training step, and the peak that they are measured against.

MFU (arXiv:2204.02311, appendix B): the operations that the model needs, over those that the device could have done in
the time.  What is done twice (recompute) or for nothing (padding) does not count.
"""

from __future__ import annotations

from collections.abc import Iterable

from mcore_rl.config.model import ModelConfig

# Dense bfloat16, no sparsity, from the vendors' data sheets, by a part of the device's name; the first that fits.
PEAK_BF16 = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "A100": 312e12,
    "MI300X": 1307e12,
    "MI325X": 1307e12,
}


def num_matmul_parameters(model: ModelConfig, *, active: bool = True) -> int:
    """Parameters that a token is multiplied by: neither the embedding, which is looked up, nor norms and biases.

    active: of the experts, only the ``top_k`` that a token goes to; else all.
    """
    hidden, heads = model.hidden_size, model.num_attention_heads * model.head_dim
    layer = 2 * hidden * heads + 2 * hidden * model.num_query_groups * model.head_dim
    if model.moe is None:
        layer += 3 * hidden * model.ffn_hidden_size
    else:
        num_experts = model.moe.top_k if active else model.moe.num_experts
        layer += 3 * hidden * model.moe.ffn_hidden_size * num_experts + hidden * model.moe.num_experts
    return model.num_layers * layer + model.vocab_size * hidden


def num_parameters(model: ModelConfig) -> int:
    """All matrices: those that are multiplied by, and an embedding that is not tied to the output."""
    embedding = 0 if model.tie_output else model.vocab_size * model.hidden_size
    return num_matmul_parameters(model, active=False) + embedding


def train_step_flops(model: ModelConfig, lengths: Iterable[int]) -> float:
    """Operations of forward and backward over sequences of ``lengths`` tokens.

    Matrices: ``6 N`` a token, N the active parameters: a multiplication and an addition each, once forward and twice
    backward (arXiv:2001.08361, section 2.1).  Attention: ``12 L D s / 2`` a token, D = heads * head_dim, s the length
    of its sequence: scores and values are 2 D s operations each in each of L layers, three times over as before, and
    half of that because causal attention looks at half of the pairs.
    """
    lengths = list(lengths)
    matrices = 6.0 * num_matmul_parameters(model) * sum(lengths)
    width = model.num_layers * model.num_attention_heads * model.head_dim
    return matrices + sum(12.0 * width * length * length / 2 for length in lengths)


def peak_bf16(device_name: str) -> float | None:
    """Operations a second of the device; None where it is not in the table."""
    return next((peak for part, peak in PEAK_BF16.items() if part in device_name), None)
