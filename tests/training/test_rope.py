"""Rotary frequencies: transformers' bit for bit, those of published checkpoints, and in Megatron's own embedding."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from mcore_rl.config.model import RopeConfig, RopeType
from mcore_rl.training.rope import (
    ScaledKeyPart,
    frequency_sets,
    inverse_frequencies,
    of_set,
    score_scale,
    set_frequencies,
)
from tests.support import hf_reference, models
from tests.support.rotations import cosines_and_sines

DEFAULT = RopeConfig()
LINEAR = RopeConfig(type=RopeType.linear, factor=4.0)
# Llama 3.1 8B's config.json, and 3.2's factor
LLAMA31 = RopeConfig(type=RopeType.llama3, factor=8.0, original_max_position_embeddings=8192)
LLAMA32 = replace(LLAMA31, factor=32.0)
# Qwen2.5's model card on long texts; DeepSeek-V3's config.json
QWEN25 = RopeConfig(type=RopeType.yarn, factor=4.0, original_max_position_embeddings=32768, attention_factor=1.1386)
DEEPSEEK = RopeConfig(type=RopeType.yarn, factor=40.0, original_max_position_embeddings=4096)
UNROUNDED = replace(QWEN25, factor=2.5, beta_fast=20.0, beta_slow=1.5, truncate=False)
STEP = replace(QWEN25, original_max_position_embeddings=6)  # both bounds are dimension 0


def theirs(rope: RopeConfig, base: float, dim: int) -> LlamaConfig:
    """The same for transformers."""
    model = models.with_rope(rope, rotary_base=base, head_dim=dim)
    return LlamaConfig(
        hidden_size=2 * dim, num_attention_heads=2, head_dim=dim, max_position_embeddings=131072,
        rope_parameters=hf_reference.rope_parameters(model),
    )  # fmt: skip


@pytest.mark.parametrize(("base", "dim"), [(10000.0, 128), (500000.0, 64), (1000000.0, 128), (10000.0, 6)])
@pytest.mark.parametrize("rope", [DEFAULT, LINEAR, LLAMA31, LLAMA32, QWEN25, DEEPSEEK, UNROUNDED, STEP])
def test_equals_transformers_bit_for_bit(rope: RopeConfig, base: float, dim: int) -> None:
    config = theirs(rope, base, dim)
    if rope.type is RopeType.default:
        expected, factor = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        expected, factor = ROPE_INIT_FUNCTIONS[rope.type.value](config)
    frequencies = inverse_frequencies(rope, base, dim)
    assert frequencies.dtype == torch.float32 and frequencies.shape == (dim // 2,)
    assert torch.equal(frequencies, expected)
    assert rope.attention_factor == factor


def test_llama31_slows_long_waves_and_keeps_short_ones() -> None:
    """By hand: wavelengths below 8192 / 4 tokens are kept, those above 8192 / 1 are 8 times as long."""
    plain, scaled = (inverse_frequencies(rope, 500000.0, 128).double() for rope in (DEFAULT, LLAMA31))
    wavelengths = 2 * torch.pi / plain
    short, long = wavelengths < 2048, wavelengths > 8192
    assert short.any() and long.any() and (~short & ~long).any()
    assert torch.equal(scaled[short], plain[short])
    torch.testing.assert_close(scaled[long] * 8, plain[long], rtol=1e-6, atol=0)
    between = scaled[~short & ~long] / plain[~short & ~long]
    assert ((between > 1 / 8) & (between < 1)).all() and (between.diff() < 0).all()


def test_deepseek_v3_ramps_between_its_two_bounds() -> None:
    """By hand: 32 rotations in 4096 tokens are dimension 10.4, 1 rotation is 22.5; kept up to 10, over 40 from 23."""
    plain, scaled = (inverse_frequencies(rope, 10000.0, 64).double() for rope in (DEFAULT, DEEPSEEK))
    torch.testing.assert_close(scaled[:11], plain[:11], rtol=1e-6, atol=0)
    torch.testing.assert_close(scaled[23:] * 40, plain[23:], rtol=1e-6, atol=0)
    ramp = (torch.arange(11, 23).double() - 10) / 13
    torch.testing.assert_close(scaled[11:23] / plain[11:23], 1 - ramp + ramp / 40, rtol=1e-5, atol=0)


def test_megatrons_embedding_rotates_by_them() -> None:
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    embedding = RotaryEmbedding(kv_channels=16, rotary_percent=1.0, use_cpu_initialization=True, cp_group=None)
    frequencies = inverse_frequencies(LINEAR, 10000.0, 16)
    set_frequencies(embedding, frequencies)
    angles = torch.outer(torch.arange(40.0), frequencies)
    assert torch.equal(embedding.get_freqs_non_repeated(40), angles)
    with pytest.raises(AssertionError, match=r"\(4,\) frequencies for \(8,\)"):
        set_frequencies(embedding, frequencies[:4])


def test_score_scale_carries_the_square_of_the_attention_factor() -> None:
    assert score_scale(models.dense()) == 16**-0.5
    assert score_scale(models.gemma2()) == 8**-0.5
    yarn = RopeConfig(type=RopeType.yarn, factor=4.0, original_max_position_embeddings=64, attention_factor=1.5)
    assert score_scale(models.with_rope(yarn)) == 2.25 / 4
    assert score_scale(models.with_rope(yarn, softmax_scale=0.5)) == 2.25 / 2


def test_a_factor_on_a_part_of_each_head_is_not_in_the_scale_of_scores() -> None:
    model = models.phi3()
    assert model.rope.attention_factor > 1 and score_scale(model) == 16**-0.5
    query, key = torch.randn(2, 5, 16).double()
    scaled = ScaledKeyPart(config=None, hidden_size=16, eps=1e-5, scale=2.25, rotary_dim=12)(key)
    # as if both had been multiplied by 1.5, in that part
    both = query[:, :12] * 1.5 @ (key[:, :12] * 1.5).T + query[:, 12:] @ key[:, 12:].T
    torch.testing.assert_close(query @ scaled.T, both)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_kind_of_layer_takes_its_own_cosines_and_sines(dtype: torch.dtype) -> None:
    sets = frequency_sets(models.gemma3())
    assert len(sets) == 2 and len(frequency_sets(models.gemma2())) == 1
    both = cosines_and_sines(sets, (40,), dtype=dtype, packed=False)
    for index, frequencies in enumerate(sets):
        angles = torch.outer(torch.arange(40.0), frequencies)
        cos, sin = of_set(both, index, 2).chunk(2, dim=-1)
        assert torch.equal(cos[:, 0, 0], angles.cos().to(dtype))
        assert torch.equal(sin[:, 0, 0], angles.sin().to(dtype))
