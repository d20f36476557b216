"""Attention within the windows of a vision tower: windows of one length at once, in the place of one call a window.

transformers calls its attention for each window unless it takes that for a flash attention, which is given the
boundaries of all (``is_flash_attention_requested`` reads the name).  A picture of a million pixels has some 90.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mcore_rl.training.sequences import cached_on_device

NAME = "flash_attention_by_windows"


def attend_by_windows(
    module: object,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None = None,
    *,
    scaling: float,
    cu_seq_lens_q: Tensor,
    **options: Any,
) -> tuple[Tensor, None]:
    """([1, rows, heads, d], None): each row attends to its own window, in both directions.

    query, key, value: [1, heads, rows, d].  cu_seq_lens_q: where windows begin, and the rows, on the host.  options:
    of transformers' flash attentions; they do not matter here.
    """
    assert attention_mask is None, "windows have no padding"
    assert cu_seq_lens_q.device.type == "cpu", "the host would wait in every block"
    parts = [x[0].transpose(0, 1) for x in (query, key, value)]
    groups = _rows_of_equal_windows(tuple(cu_seq_lens_q.tolist()), query.device)
    if len(groups) == 1:  # in their order, nothing between
        return _attend(*(x.unflatten(0, groups[0].shape) for x in parts), scaling=scaling)[None], None
    attended = [_attend(*(x[rows] for x in parts), scaling=scaling) for rows in groups]
    joined = torch.empty_like(parts[0])
    return joined.index_copy(0, torch.cat([rows.flatten() for rows in groups]), torch.cat(attended))[None], None


def _attend(query: Tensor, key: Tensor, value: Tensor, *, scaling: float) -> Tensor:
    """[windows * length, heads, d], of [windows, length, heads, d]."""
    heads_first = (x.transpose(1, 2) for x in (query, key, value))
    out = F.scaled_dot_product_attention(*heads_first, scale=scaling)  # type: ignore[misc, arg-type]
    return out.transpose(1, 2).flatten(0, 1)


@cached_on_device
def _rows_of_equal_windows(boundaries: tuple[int, ...], device: torch.device) -> list[Tensor]:
    """[windows, length] for each length: the rows of the windows of that length."""
    begins = dict[int, list[int]]()
    for begin, end in pairwise(boundaries):
        begins.setdefault(end - begin, []).append(begin)
    return [
        (torch.tensor(of_length)[:, None] + torch.arange(length)).to(device) for length, of_length in begins.items()
    ]


ALL_ATTENTION_FUNCTIONS.register(NAME, attend_by_windows)
