"""Rotation by positions of three axes: transformers' cosines and sines bit for bit, whatever rows a rank has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRotaryEmbedding
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from mcore_rl.config.model import MropeConfig
from mcore_rl.training.rope import AxesRotaryEmbedding
from mcore_rl.training.sequences import PackedSequences
from tests.support import picture_models

CPU = torch.device("cpu")
SECTIONS = {"qwen2_5_vl": [4, 7, 5], "qwen3_vl": [6, 5, 5]}
ROTARY: dict[str, Any] = {"qwen2_5_vl": Qwen2_5_VLRotaryEmbedding, "qwen3_vl": Qwen3VLTextRotaryEmbedding}


def embedding(family: str) -> AxesRotaryEmbedding:
    """Ours, of heads of 32, in place of one of Megatron's."""
    group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    base = SimpleNamespace(inv_freq=1.0 / (1e4 ** (torch.arange(0, 32, 2, dtype=torch.float32) / 32)), cp_group=group)
    made = AxesRotaryEmbedding.instead_of(base, CPU, torch.float32)
    made.rotate_by(MropeConfig(sections=SECTIONS[family], interleaved=family == "qwen3_vl"))
    return made


@pytest.mark.parametrize("family", ROTARY)
def test_cosines_and_sines_are_transformers(family: str) -> None:
    config = picture_models.config(family, hidden_size=128, num_attention_heads=4, num_key_value_heads=2)
    rope = config["text_config"]["rope_parameters"] | {"mrope_section": SECTIONS[family], "rope_theta": 1e4}
    config["text_config"] |= {"rope_parameters": rope} | ({"head_dim": 32} if family == "qwen3_vl" else {})
    values = {name: value for name, value in config.items() if name != "model_type"}
    theirs = ROTARY[family](CONFIG_MAPPING[family](**values).text_config)
    positions_3N = torch.randint(0, 900, (3, 61), generator=torch.Generator().manual_seed(0))
    cos, sin = theirs(torch.zeros(1), positions_3N[:, None])

    ours = embedding(family)
    ours.positions_3N = positions_3N.int()
    out = ours(61)
    assert out.shape == (61, 1, 1, 32)
    assert torch.equal(out[:, 0, 0, :16], cos[0, :, :16]) and torch.equal(out[:, 0, 0, 16:], sin[0, :, :16])


def test_text_has_its_place_in_its_sequence() -> None:
    """Sequences without positions of their own rotate as those of other models."""
    ours = embedding("qwen3_vl")
    packed = PackedSequences.of((5, 3), (6, 4), cp=1, cp_rank=0, device=CPU)
    ours.padded_lengths = packed.padded_lengths
    plain = ours(6)
    ours.positions_3N = torch.cat([torch.arange(6), torch.arange(4)]).expand(3, -1)
    assert torch.equal(plain, ours(6))
