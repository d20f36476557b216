"""The fields of a batch's pictures, by hand."""

from __future__ import annotations

import torch

from mcore_rl.data.media.batch import with_pictures
from mcore_rl.data.media.placed import Grid, ImageRef, Placed
from mcore_rl.ground.types import Picture, TrainBatch

A, B = ImageRef("a", "a.png"), ImageRef("b", "b.png")


def test_features_are_numbered_within_their_sequence() -> None:
    """Sequences of 7 tokens with two pictures of 2 and 1 tokens, of 2 without, and of 3 with one at its end."""
    media = [[Placed(A, 1, Grid(1, 2, 4)), Placed(B, 4, Grid(1, 2, 2))], [], [Placed(A, 1, Grid(1, 2, 4))]]
    batch = TrainBatch(
        lengths_S=(7, 2, 3),
        tokens_T=torch.zeros(12, dtype=torch.int64),
        mask_T=torch.zeros(12, dtype=torch.bool),
    )
    made = with_pictures(batch, media)
    assert made.feature_T is not None and made.positions_T3 is not None
    assert made.feature_T.tolist() == [-1, 0, 1, -1, 2, -1, -1, -1, -1, -1, 0, 1]
    assert made.feature_T.dtype == made.positions_T3.dtype == torch.int32
    picture, other = Picture("a", 2, 4, 2), Picture("b", 2, 2, 1)
    assert made.images_S == ((picture, other), (), (picture,))
    height = made.positions_T3[:, 1].tolist()
    width = made.positions_T3[:, 2].tolist()
    assert made.positions_T3[:, 0].tolist() == [0, 1, 1, 3, 4, 5, 6, 0, 1, 0, 1, 1]
    assert height == [0, 1, 1, 3, 4, 5, 6, 0, 1, 0, 1, 1]
    assert width == [0, 1, 2, 3, 4, 5, 6, 0, 1, 0, 1, 2]
    assert made.patches_S == [12, 0, 8]
