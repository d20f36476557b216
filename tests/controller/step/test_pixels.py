"""Each picture of a step is made patches of once, and what cannot be read is said as its rows say it."""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from mcore_rl.controller.step.pixels import put_pixels
from mcore_rl.data.media.placed import Grid, ImageRef, Placed
from mcore_rl.ground.errors import DataError
from mcore_rl.runtime.train_group import TrainGroup


class Rows:
    """Rows whose picture ``place`` of row ``index`` has the one number ``10 index + place``."""

    def __init__(self) -> None:
        self.made: Counter[tuple[int, int]] = Counter()

    def patches(self, index: int, place: int) -> NDArray[np.uint8]:
        self.made[index, place] += 1
        if index == 9:
            raise DataError("data.train_files", ["t.parquet:9: images[0]: is no PNG"])
        return np.full((4, 6), 10 * index + place, dtype=np.uint8)


class Store:
    """Keeps what it is given, as references."""

    def put_patches(self, patches: NDArray[np.uint8]) -> Any:
        return ("reference", int(patches[0, 0]))


def placed(key: str, first: int) -> Placed:
    return Placed(ImageRef(key, f"{key}.png"), first, Grid(1, 2, 2))


def test_pictures_that_rows_share_are_made_once() -> None:
    rows = Rows()
    media = {3: [placed("a", 1), placed("b", 3)], 4: [], 5: [placed("b", 1), placed("c", 4)]}
    refs: dict[str, Any] = dict(put_pixels(cast(TrainGroup, Store()), rows.patches, media))
    assert refs == {"a": ("reference", 30), "b": ("reference", 31), "c": ("reference", 51)}
    assert rows.made == {(3, 0): 1, (3, 1): 1, (5, 1): 1}


def test_a_picture_that_cannot_be_read_ends_the_step() -> None:
    with pytest.raises(DataError, match=r"t.parquet:9: images\[0\]: is no PNG"):
        put_pixels(cast(TrainGroup, Store()), Rows().patches, {9: [placed("a", 1)]})
