"""Rotations: complex numbers in float64, Megatron's and transformers' bits, what is kept for backward."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from torch import Tensor
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    apply_rotary_pos_emb as of_halves,
)
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    apply_rotary_pos_emb_interleave as of_neighbours,
)

from mcore_rl.config.engine import LayerSpec
from mcore_rl.config.model import RopeConfig, RopeType
from mcore_rl.config.parallel import ParallelConfig
from mcore_rl.training.model import transformer_config
from mcore_rl.training.rope import inverse_frequencies
from mcore_rl.training.rotation import rotate
from tests.support import engines, models
from tests.support.rotations import ContextRank, cosines_and_sines

LLAMA31 = RopeConfig(type=RopeType.llama3, factor=8.0, original_max_position_embeddings=8192)
YARN = RopeConfig(type=RopeType.yarn, factor=4.0, original_max_position_embeddings=32, attention_factor=1.1386)
ROPES = {"default": RopeConfig(), "llama 3.1": LLAMA31, "yarn": YARN, "linear": replace(LLAMA31, type=RopeType.linear)}


def turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """The definition: pairs are complex numbers, times cos + i sin; in float64."""
    width = 2 * cos.shape[-1]
    part = x[..., :width].double()
    one, other = (part[..., 0::2], part[..., 1::2]) if interleaved else part.chunk(2, dim=-1)
    pairs = torch.complex(one, other) * torch.complex(cos.double(), sin.double())
    return torch.cat([pairs.real, pairs.imag, x[..., width:].double()], dim=-1)


@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize("lengths", [(16,), (8, 24, 16), (24, 8), (16, 16), (8,) * 8])
def test_packed_sequences_turn_at_once_and_each_from_its_own_beginning(cp: int, lengths: tuple[int, ...]) -> None:
    """By hand: token n is its pairs, as complex numbers, times exp(i n w); a rank has two chunks of each sequence."""
    frequencies = inverse_frequencies(RopeConfig(), 10000.0, 12)
    whole = [torch.randn(length, 1, 3, 16) for length in lengths]
    expected = []
    for x in whole:
        angles = torch.outer(torch.arange(len(x)).double(), frequencies.double())[:, None, None]
        expected.append(turned(x, angles.cos(), angles.sin()))

    def of_rank(rows: list[Tensor], rank: int) -> Tensor:
        chunks = [each.chunk(2 * cp) for each in rows]
        return torch.cat([chunk for each in chunks for chunk in (each[rank], each[2 * cp - 1 - rank])])

    for rank in range(cp):
        cos, sin = cosines_and_sines([frequencies], lengths, group=ContextRank(cp, rank)).chunk(2, dim=-1)
        out = rotate(of_rank(whole, rank), cos, sin)
        torch.testing.assert_close(out.double(), of_rank(expected, rank), rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [(40,), (8, 24, 16)], ids=["one", "packed"])
@pytest.mark.parametrize("rotated", [16, 12])
@pytest.mark.parametrize("rope", ROPES.values(), ids=list(ROPES))
def test_outputs_and_gradients_are_megatrons_bit_for_bit(
    rope: RopeConfig, rotated: int, lengths: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Of each sequence by itself, unpacked: Megatron's rotation of angles that it makes cosines and sines of."""
    config = transformer_config(models.dense(), ParallelConfig(), engines.config(), LayerSpec.local)
    frequencies = inverse_frequencies(rope, 10000.0, rotated)
    x, grad = (torch.randn(sum(lengths), 1, 3, 16).to(dtype) for _ in range(2))
    cos, sin = cosines_and_sines([frequencies], lengths, dtype=dtype, packed=len(lengths) > 1).chunk(2, dim=-1)
    leaf = x.clone().requires_grad_()
    ours = rotate(leaf, cos, sin)
    (of_ours,) = torch.autograd.grad(ours, leaf, grad)
    leaf = x.clone().requires_grad_()
    angles = [torch.outer(torch.arange(float(length)), frequencies).repeat(1, 2)[:, None, None] for length in lengths]
    parts = zip(leaf.split(lengths), angles, strict=True)
    theirs = torch.cat([apply_rotary_pos_emb(part, each, config, cp_group=ContextRank(1, 0)) for part, each in parts])
    (of_theirs,) = torch.autograd.grad(theirs, leaf, grad)
    assert ours.dtype == dtype
    assert torch.equal(ours, theirs)
    assert torch.equal(of_ours, of_theirs)


@pytest.mark.parametrize("interleaved", [True, False])
def test_pairs_turn_as_in_transformers(interleaved: bool) -> None:
    """Bit for bit: the same products and sums."""
    x, angles = torch.randn(5, 3, 8), torch.randn(5, 4)
    cos, sin = angles.cos() * 1.3, angles.sin() * 1.3
    by_head = x[None].transpose(1, 2)
    theirs = of_neighbours if interleaved else of_halves
    expected, _ = theirs(by_head, by_head, *(torch.cat([y, y], -1)[None] for y in (cos, sin)))
    ours = rotate(x, cos[:, None], sin[:, None], interleaved=interleaved)
    assert torch.equal(ours, expected[0].transpose(0, 1))


def test_the_two_orders_of_pairs_differ() -> None:
    x, angles = torch.randn(5, 8), torch.randn(5, 4)
    one, other = (rotate(x, angles.cos(), angles.sin(), interleaved=interleaved) for interleaved in (True, False))
    assert not torch.allclose(one, other)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("width", [8, 11])
def test_gradients_are_those_of_complex_numbers(width: int, interleaved: bool) -> None:
    """Of strided heads too, as keys are: they lie in the projection of queries, keys and values."""
    angles = torch.randn(5, 1, 4).double()
    x, grad = torch.randn(5, 3, width + 7).double()[..., :width].requires_grad_(), torch.randn(5, 3, width).double()
    out = rotate(x, angles.cos(), angles.sin(), interleaved=interleaved)
    expected = turned(x, angles.cos(), angles.sin(), interleaved)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(*(torch.autograd.grad(each, x, grad)[0] for each in (out, expected)))


def test_nothing_is_kept_for_backward_but_what_all_layers_share() -> None:
    cos_sin = cosines_and_sines([inverse_frequencies(RopeConfig(), 10000.0, 12)], (8, 24))
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        rotate(torch.randn(32, 1, 3, 16, requires_grad=True), *cos_sin.chunk(2, dim=-1))
    assert kept and {each.untyped_storage().data_ptr() for each in kept} == {cos_sin.untyped_storage().data_ptr()}
