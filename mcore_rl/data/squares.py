"""Generated pictures of red squares on white, for runs in which a small model must learn to see.

Nothing but the picture tells how many there are: the question is the same in every row.  A digest of where its squares
are assigns a picture to training or validation, so that no run trains on what another validates with.  Equal arguments
give equal pictures, none twice.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from io import BytesIO

from PIL import Image

from mcore_rl.data.arithmetic import TRIES, Split, distinct

QUESTION = "<image>How many red squares are there?"
SIDE = 56  # pixels of a picture: 4 tokens for patches of 14 and of 16
CELL, SQUARE = 14, 8  # squares lie apart, each anywhere in a cell of its own
MOST = 6  # squares
RED = (220, 30, 30)


@dataclass(frozen=True)
class Squares:
    """A picture.  corners: (x, y) of the upper left corner of each square, in pixels, ascending."""

    corners: tuple[tuple[int, int], ...]

    @property
    def name(self) -> str:
        """Where the squares are, as text."""
        return " ".join(f"{x},{y}" for x, y in self.corners)

    @property
    def answer(self) -> str:
        """How many there are."""
        return str(len(self.corners))

    @property
    def png(self) -> bytes:
        """The picture as a file."""
        image = Image.new("RGB", (SIDE, SIDE), "white")
        for x, y in self.corners:
            image.paste(RED, (x, y, x + SQUARE, y + SQUARE))
        file = BytesIO()
        image.save(file, format="PNG")
        return file.getvalue()


def squares(count: int, seed: int, split: Split) -> list[Squares]:
    """``count`` different pictures of ``split``, of 1 to 6 squares, as many of each in the mean.

    ConfigError: ``count`` is not positive, or more than there are.
    """
    rng = random.Random(f"{seed}/squares/{split.value}")
    drawn = (_draw(rng) for _ in range(TRIES * count))
    return distinct(((each.name, each.name, each) for each in drawn), count, split, "there are about {} pictures")


def _draw(rng: random.Random) -> Squares:
    cells = [(x, y) for x in range(0, SIDE, CELL) for y in range(0, SIDE, CELL)]
    number = 1 + _below(rng, MOST)
    taken = [cells.pop(_below(rng, len(cells))) for _ in range(number)]
    room = CELL - SQUARE + 1
    return Squares(tuple(sorted((x + _below(rng, room), y + _below(rng, room)) for x, y in taken)))


def _below(rng: random.Random, limit: int) -> int:
    return int(rng.random() * limit)  # only random() is the same in every version of Python
