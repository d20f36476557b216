"""Positions: transformers' ``get_rope_index`` of Qwen2.5-VL and Qwen3-VL, over sequences with 0 to 5 pictures."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLModel, Qwen3VLConfig, Qwen3VLModel

from mcore_rl.data.media.batch import positions_3T
from mcore_rl.data.media.placed import Grid, ImageRef, Placed

TEXT, PAD = 5, 6


class Oracle:
    """The method of a model, without the model."""

    def __init__(self, model: Any, config: Any) -> None:
        self.config = config
        self._model = model

    def get_vision_position_ids(self, *args: Any, **kwargs: Any) -> Any:
        return self._model.get_vision_position_ids(self, *args, **kwargs)

    def positions(self, length: int, media: list[Placed]) -> torch.Tensor:
        ids = torch.full((1, length), TEXT)
        types = torch.zeros((1, length), dtype=torch.int32)
        for each in media:
            ids[0, each.first : each.end] = PAD
            types[0, each.first : each.end] = 1
        grids = torch.tensor([[each.grid.t, each.grid.h, each.grid.w] for each in media]) if media else None
        return self._model.get_rope_index(self, ids, types, image_grid_thw=grids)[0][:, 0]


ORACLES = {
    "qwen2.5-vl": Oracle(Qwen2_5_VLModel, Qwen2_5_VLConfig()),
    "qwen3-vl": Oracle(Qwen3VLModel, Qwen3VLConfig()),
}


def sequence(draw: random.Random, begins: bool, ends: bool) -> tuple[int, list[Placed]]:
    media, place = list[Placed](), 0 if begins else draw.randint(1, 9)
    grids = [Grid(1, 2 * draw.randint(1, 7), 2 * draw.randint(1, 7)) for _ in range(2)]
    for number in range(draw.randint(0, 5)):
        grid = draw.choice(grids)  # equal pictures too
        media.append(Placed(ImageRef(f"{grid}", f"images[{number}]"), place, grid))
        place = media[-1].end + draw.randint(1, 9)
    if media and ends:
        return media[-1].end, media
    return place + 1, media


@pytest.mark.parametrize("model", ORACLES)
def test_positions_are_those_of_transformers(model: str) -> None:
    draw = random.Random(0)
    counts = set[int]()
    for number in range(300):
        length, media = sequence(draw, begins=number % 3 == 0, ends=number % 5 == 0)
        counts.add(len(media))
        positions = positions_3T(length, media)
        assert positions.dtype.name == "int32" and positions.shape == (3, length)
        assert positions.tolist() == ORACLES[model].positions(length, media).tolist()
    assert counts == {0, 1, 2, 3, 4, 5}


def test_by_hand() -> None:
    """Two tokens, a picture of 2 x 3 tokens, a token; and a picture right behind another, which ids could not tell."""
    picture = Placed(ImageRef("a", "x"), 2, Grid(1, 4, 6))
    assert positions_3T(9, [picture]).tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5],
        [0, 1, 2, 2, 2, 3, 3, 3, 5],
        [0, 1, 2, 3, 4, 2, 3, 4, 5],
    ]
    two = [Placed(ImageRef("a", "x"), first, Grid(1, 2, 2)) for first in (0, 1)]
    assert positions_3T(2, two).tolist() == [[0, 1]] * 3
