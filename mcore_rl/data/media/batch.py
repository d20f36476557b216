"""The pictures of a batch of sequences: positions of all tokens, and which feature takes whose place.

Made on the controller from lengths and grids alone: no token id is read, so that a drawn or written ``<|image_pad|>``
is text.

Positions are integers in time, height and width (multimodal rope of Qwen2-VL, arXiv:2409.12191).  A token of text has
the next position in all three.  A picture's tokens have its first position, with their row and column on top of it;
what follows goes on behind its longer side.  The oracle is ``get_rope_index`` of transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from mcore_rl.data.media.placed import Placed
from mcore_rl.ground.arrays import Int32Array
from mcore_rl.ground.types import Picture, TrainBatch


def positions_3T(length: int, media: Sequence[Placed]) -> Int32Array:
    """[3, length] int32: time, height and width of each token.  media: the pictures among them, in order."""
    positions = np.empty((3, length), dtype=np.int32)
    place = 0
    position = 0
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


TEXT = -1  # of a token that is no picture's


def with_pictures(batch: TrainBatch, media_S: Sequence[Sequence[Placed]]) -> TrainBatch:
    """``batch`` with the pictures of its sequences, in order, maybe none of one."""
    positions = []
    features = []
    images = []
    for length, media in zip(batch.lengths_S, media_S, strict=True):
        feature = np.full(length, TEXT, dtype=np.int32)
        number = 0
        for each in media:
            feature[each.first : each.end] = np.arange(number, number + each.grid.tokens)
            number += each.grid.tokens
        positions.append(np.ascontiguousarray(positions_3T(length, media).T))  # so that parts travel without a copy
        features.append(feature)
        images.append(tuple(_picture(each) for each in media))
    return replace(
        batch,
        positions_T3=torch.from_numpy(np.concatenate(positions)),
        feature_T=torch.from_numpy(np.concatenate(features)),
        images_S=tuple(images),
    )


def _picture(placed: Placed) -> Picture:
    assert placed.grid.t == 1, "a still picture has one moment"
    return Picture(placed.image.sha256, placed.grid.h, placed.grid.w, placed.grid.tokens)
