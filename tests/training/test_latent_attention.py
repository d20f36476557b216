"""Rotation of latent attention against transformers and by hand; the replicated linear's marks.

The whole module is held to transformers' model by tests/parity and to itself under every layout by tests/invariance.
"""

from __future__ import annotations

import pytest
import torch
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    apply_rotary_pos_emb,
    apply_rotary_pos_emb_interleave,
)

from mcore_rl.config.engine import LayerSpec
from mcore_rl.config.parallel import parse_layout
from mcore_rl.training.latent_attention import ReplicatedLinear, rotate
from mcore_rl.training.model import transformer_config
from tests.support import engines, models


@pytest.mark.parametrize("interleaved", [True, False])
def test_pairs_turn_as_in_transformers(interleaved: bool) -> None:
    """Bit for bit: the same products and sums."""
    x, angles = torch.randn(5, 3, 8), torch.randn(5, 4)
    cos, sin = angles.cos() * 1.3, angles.sin() * 1.3
    theirs = apply_rotary_pos_emb_interleave if interleaved else apply_rotary_pos_emb
    by_head = x[None].transpose(1, 2)
    expected, _ = theirs(by_head, by_head, *(torch.cat([y, y], -1)[None] for y in (cos, sin)))
    ours = rotate(x, cos[:, None], sin[:, None], interleaved=interleaved)
    assert torch.equal(ours, expected[0].transpose(0, 1))


def test_the_two_orders_of_pairs_differ() -> None:
    x, angles = torch.randn(5, 8), torch.randn(5, 4)
    one, other = (rotate(x, angles.cos(), angles.sin(), interleaved=interleaved) for interleaved in (True, False))
    assert not torch.allclose(one, other)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_replicated_weight_is_whole_and_marked_for_summation(tp: int) -> None:
    config = transformer_config(models.deepseek_v3(), parse_layout(f"tp={tp},etp=1"), engines.config(), LayerSpec.local)
    linear = ReplicatedLinear(
        48, 20, parallel_mode="duplicated", config=config, init_method=torch.nn.init.ones_, bias=False,
        skip_bias_add=False, skip_weight_param_allocation=False,
    )  # fmt: skip
    assert linear.weight.shape == (20, 48) and linear.weight.sequence_parallel is (tp > 1)
    out, bias = linear(torch.ones(2, 3, 48))
    assert bias is None and torch.equal(out, torch.full((2, 3, 20), 48.0))
