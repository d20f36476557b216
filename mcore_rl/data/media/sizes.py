"""How large a picture becomes for a model's tower, from its width and height alone: nothing is decoded for it.

The rule is ``smart_resize`` of Qwen2-VL (arXiv:2409.12191), which Qwen2.5-VL and Qwen3-VL kept: sides are multiples of
a token's, the shape stays as far as that allows, and the area is between two bounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mcore_rl.config.data import MAX_PIXELS, MIN_PIXELS
from mcore_rl.data.media.placed import Grid

MOST_ELONGATED = 200  # sides of a picture, the longer one over the shorter


@dataclass(frozen=True)
class Sizing:
    """What a tower asks of a picture's size.

    patch: pixels along a side of a patch.  merge: see ``Grid``.  temporal_patch: frames in a patch; a still picture is
    repeated.  min_pixels, max_pixels: bounds of the area, in pixels.
    """

    patch: int
    merge: int = 2
    temporal_patch: int = 2
    min_pixels: int = MIN_PIXELS
    max_pixels: int = MAX_PIXELS

    @property
    def factor(self) -> int:
        """Pixels along a side of a token."""
        return self.patch * self.merge

    @property
    def max_tokens(self) -> int:
        """The most tokens of a picture that is not as long and thin as a row of single tokens."""
        return self.max_pixels // self.factor**2

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """(width, height) that a picture of ``width`` and ``height`` pixels is brought to.

        ValueError, with the remedy: it is too long and thin.
        """
        if max(width, height) > MOST_ELONGATED * min(width, height):
            said = f"is {width} x {height} pixels, more than {MOST_ELONGATED} times as long as it is wide"
            raise ValueError(f"{said}. Cut it into pieces, or leave the row out")
        factor = self.factor
        sides = [round(side / factor) * factor for side in (width, height)]
        if math.prod(sides) > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            sides = [max(factor, math.floor(side / shrink / factor) * factor) for side in (width, height)]
        elif math.prod(sides) < self.min_pixels:
            stretch = math.sqrt(self.min_pixels / (height * width))
            sides = [math.ceil(side * stretch / factor) * factor for side in (width, height)]
        return sides[0], sides[1]

    def grid(self, width: int, height: int) -> Grid:
        """The patches of a picture of ``width`` and ``height`` pixels.  ValueError: see ``resized``."""
        resized_width, resized_height = self.resized(width, height)
        return Grid(1, resized_height // self.patch, resized_width // self.patch, self.merge)
