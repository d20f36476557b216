"""Rotary frequencies: transformers' bit for bit, those of published checkpoints, and in Megatron's own embedding."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from mcore_rl.config.engine import LayerSpec
from mcore_rl.config.model import RopeConfig, RopeType
from mcore_rl.config.parallel import ParallelConfig
from mcore_rl.training.model import transformer_config
from mcore_rl.training.rope import (
    PackedRotaryEmbedding,
    ScaledKeyPart,
    angles_of,
    frequency_sets,
    inverse_frequencies,
    score_scale,
    set_frequencies,
)
from mcore_rl.training.sequences import PackedSequences
from tests.support import engines, hf_reference, models

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


def test_each_kind_of_layer_takes_its_own_angles() -> None:
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    def embedding(*frequencies: torch.Tensor) -> torch.Tensor:
        rotary = RotaryEmbedding(kv_channels=16, rotary_percent=1.0, use_cpu_initialization=True, cp_group=None)
        set_frequencies(rotary, *frequencies)
        angles = rotary.get_freqs_non_repeated(40)
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]  # as its forward pass does

    sets = frequency_sets(models.gemma3())
    assert len(sets) == 2 and len(frequency_sets(models.gemma2())) == 1
    for index, frequencies in enumerate(sets):
        assert torch.equal(angles_of(embedding(*sets), index, 2), embedding(frequencies))


@dataclass(frozen=True)
class ContextRank:
    """As much of a process group as the rotation asks for."""

    cp: int
    number: int

    def size(self) -> int:
        return self.cp

    def rank(self) -> int:
        return self.number


class Operations(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's embedding moves its frequencies to the current device."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))


@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize("lengths", [(16,), (8, 24, 16), (24, 8), (16, 16), (8,) * 8])
def test_packed_sequences_turn_at_once_and_each_from_its_own_beginning(
    cp: int, lengths: tuple[int, ...], on_cpu: None
) -> None:
    """By hand: token n is its pairs, as complex numbers, times exp(i n w); a rank has two chunks of each sequence."""
    from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    config = transformer_config(models.dense(), ParallelConfig(), engines.config(), LayerSpec.local)
    frequencies = inverse_frequencies(DEFAULT, 10000.0, 12)
    whole = [torch.randn(length, 3, 16) for length in lengths]
    turned = []
    for x in whole:
        angles = torch.outer(torch.arange(len(x)).double(), frequencies.double())[:, None]
        pairs = torch.complex(x[..., :6].double(), x[..., 6:12].double()) * torch.exp(1j * angles)
        turned.append(torch.cat([pairs.real, pairs.imag, x[..., 12:].double()], dim=-1))

    def of_rank(rows: list[torch.Tensor], rank: int) -> torch.Tensor:
        chunks = [each.chunk(2 * cp) for each in rows]
        return torch.cat([chunk for each in chunks for chunk in (each[rank], each[2 * cp - 1 - rank])])

    for rank in range(cp):
        group = ContextRank(cp, rank)
        megatrons = RotaryEmbedding(kv_channels=16, rotary_percent=0.75, use_cpu_initialization=True, cp_group=group)
        embedding = PackedRotaryEmbedding.instead_of(megatrons)
        set_frequencies(embedding, frequencies)
        packed = PackedSequences.of(lengths, lengths, cp, rank, torch.device("cpu"))
        length = embedding.get_rotary_seq_len(None, None, None, config, packed)
        with Operations() as operations:
            angles = embedding(length, packed_seq=True)
            out = apply_rotary_pos_emb(of_rank(whole, rank), angles, config, packed.cu_seqlens_q, cp_group=group)
        torch.testing.assert_close(out.double(), of_rank(turned, rank), rtol=0, atol=2e-6)
        assert operations.counts["cos.default"] == operations.counts["sin.default"] == 1, operations.counts


def test_sequences_of_one_length_have_megatrons_angles(on_cpu: None) -> None:
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    group = ContextRank(1, 0)
    megatrons = RotaryEmbedding(kv_channels=16, rotary_percent=1.0, use_cpu_initialization=True, cp_group=group)
    assert torch.equal(PackedRotaryEmbedding.instead_of(megatrons)(40), megatrons(40))
