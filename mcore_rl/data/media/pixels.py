"""Pixels as a model's tower reads them: uint8 patches, the same for the engine that draws and the trainer that learns.

Patches stay bytes, a quarter of float32, until they are on the device, where ``(x / 255 - mean) / std`` gives the bits
of transformers' processor.  The oracle is ``Qwen2VLImageProcessorPil``.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mcore_rl.data.media.images import decoded
from mcore_rl.data.media.placed import Grid
from mcore_rl.data.media.sizes import Sizing

CHANNELS = 3


def patches_of(image: Image.Image, sizing: Sizing) -> tuple[NDArray[np.uint8], Grid]:
    """The patches of an RGB picture, [grid.patches, 3 * temporal_patch * patch * patch] uint8, and their grid.

    A row is one patch: for each channel each frame, and in it the patch line by line.  Rows go token by token, and
    within a token line by line.  ValueError: see ``Sizing.resized``.
    """
    assert image.mode == "RGB", f"a picture of mode {image.mode} is no RGB"
    grid = sizing.grid(*image.size)
    size = (grid.w * sizing.patch, grid.h * sizing.patch)
    resized = image if image.size == size else image.resize(size, Image.Resampling.BICUBIC)
    merge = grid.merge
    patch = sizing.patch
    pixels = np.asarray(resized).reshape(grid.h // merge, merge, patch, grid.w // merge, merge, patch, CHANNELS)
    by_token = pixels.transpose(0, 3, 1, 4, 6, 2, 5)  # token row, token column, patch row, patch column, channel, y, x
    patches = np.empty((*by_token.shape[:5], sizing.temporal_patch, patch, patch), dtype=np.uint8)
    patches[:] = by_token[:, :, :, :, :, None]
    return patches.reshape(grid.patches, -1), grid


def patches_of_file(content: bytes, sizing: Sizing) -> tuple[NDArray[np.uint8], Grid]:
    """``patches_of`` the picture in a file.  ValueError: see ``images.decoded`` and ``Sizing.resized``."""
    return patches_of(decoded(content), sizing)
