"""The pixels of a step: each picture is read and made patches of once, however many sequences have it.

Files are decoded in threads, into Ray's store.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mcore_rl.config.model import ModelConfig
from mcore_rl.data.media.placed import Placed
from mcore_rl.families.flops import patch_cost
from mcore_rl.parallel.device import num_cores
from mcore_rl.runtime.shared_batch import PatchesRef
from mcore_rl.runtime.train_group import TrainGroup


@dataclass(frozen=True)
class StepPictures:
    """The pictures of a step.

    patches: a reference to those of each picture, by its key.  patch_cost: what a patch costs, in tokens of text.
    """

    patches: Mapping[str, PatchesRef]
    patch_cost: float


# (number of a row, place of a picture among its own) -> its patches; DataError if it cannot be read
ReadPatches = Callable[[int, int], NDArray[np.uint8]]


async def step_pictures(
    group: TrainGroup, read: ReadPatches, media: Mapping[int, Sequence[Placed]], model: ModelConfig, *, trained: bool
) -> StepPictures:
    """The pictures of rows, in Ray's store.

    group, read, media, errors: see ``put_pixels``.  model: has the tower.  trained: whether that learns.
    """
    patches = await asyncio.to_thread(put_pixels, group, read, media)
    return StepPictures(patches, patch_cost(model, trained=trained))


def put_pixels(group: TrainGroup, read: ReadPatches, media: Mapping[int, Sequence[Placed]]) -> dict[str, PatchesRef]:
    """Puts the patches of the rows' pictures into Ray's store; returns a reference to each, by the picture's key.

    read: makes patches, in several threads.  media: the pictures of each row, by its number.
    DataError, with the row: a file has changed or cannot be decoded.
    """
    places = dict[str, tuple[int, int]]()
    for number, placed in media.items():
        for place, each in enumerate(placed):
            places.setdefault(each.image.sha256, (number, place))

    def put(where: tuple[int, int]) -> PatchesRef:
        return group.put_patches(read(*where))

    with ThreadPoolExecutor(num_cores(), thread_name_prefix="pixels") as pool:
        return dict(zip(places, pool.map(put, places.values()), strict=True))
