"""Windows of one length at once give the bits that transformers' one call a window gives, and its gradients."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from mcore_rl.training.tower_attention import attend_by_windows

HEADS, WIDTH, SCALE = 2, 8, 8**-0.5
WINDOWS = {"equal": [4] * 6, "borders": [16, 16, 8, 16, 4, 8, 16], "one": [24], "all different": [1, 2, 3]}


def one_by_one(query: Tensor, key: Tensor, value: Tensor, lengths: list[int]) -> Tensor:
    """As transformers' towers call an attention that is no flash attention."""
    module = SimpleNamespace(is_causal=False, num_key_value_groups=1, training=False)
    parts = zip(*(x.split(lengths, dim=2) for x in (query, key, value)), strict=True)
    options = {"attention_mask": None, "scaling": SCALE, "dropout": 0.0, "is_causal": False}
    return torch.cat([sdpa_attention_forward(module, *each, **options)[0] for each in parts], dim=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", WINDOWS)
def test_windows_together_are_windows_one_by_one(name: str) -> None:
    lengths = WINDOWS[name]
    draw = torch.Generator().manual_seed(2)
    shape = (3, 1, HEADS, sum(lengths), WIDTH)
    ours, theirs = (torch.randn(shape, generator=draw.manual_seed(2), requires_grad=True) for _ in range(2))
    boundaries = torch.tensor([0, *lengths]).cumsum(0)
    together, _ = attend_by_windows(None, *ours.unbind(0), scaling=SCALE, cu_seq_lens_q=boundaries)
    alone = one_by_one(*theirs.unbind(0), lengths)
    assert torch.equal(together, alone)
    weights = torch.randn(together.shape, generator=draw)
    for out in (together, alone):
        (out * weights).sum().backward()
    assert ours.grad is not None and theirs.grad is not None
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-6)
