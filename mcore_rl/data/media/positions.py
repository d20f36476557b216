"""Positions in time, height and width of every token (multimodal rope of Qwen2-VL, arXiv:2409.12191), as integers.

A token of text has the next position in all three.  A picture's tokens have its first position, with their row and
column on top of it; what follows goes on behind its longer side.  Lengths and grids are all that is read: no token id,
so that a drawn or written ``<|image_pad|>`` is text.  The oracle is ``get_rope_index`` of transformers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mcore_rl.arrays import Int32Array
from mcore_rl.data.media.placed import Placed


def positions_3T(length: int, media: Sequence[Placed]) -> Int32Array:
    """[3, length] int32: time, height and width of each token.  media: the pictures among them, in order."""
    positions = np.empty((3, length), dtype=np.int32)
    place, position = 0, 0
    for each in media:
        assert place <= each.first <= each.end <= length, f"{each} is not among {length} tokens, behind {place}"
        text = each.first - place
        positions[:, place : each.first] = np.arange(position, position + text)
        grid = each.grid
        shape = (grid.t, grid.h // grid.merge, grid.w // grid.merge)
        positions[:, each.first : each.end] = np.indices(shape).reshape(3, -1) + position + text
        position += text + grid.span
        place = each.end
    positions[:, place:] = np.arange(position, position + length - place)
    return positions
