"""The records of pictures: which one, its grid of patches, and where its tokens stand in a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mcore_rl.ground.arrays import Int32Array


@dataclass(frozen=True)
class ImageRef:
    """A picture by its content.

    sha256: of its file's bytes, in hex; equal pictures have one.  source: where the file is, for people and for reading
    it again: ``train.parquet:12 images[0]``, or a path.
    """

    sha256: str
    source: str


@dataclass(frozen=True)
class Grid:
    """The patches of a picture: ``t`` in time, which is 1 for a still picture, ``h`` high, ``w`` wide.

    merge: patches along each side of the square that the tower makes one token of; it divides ``h`` and ``w``.
    """

    t: int
    h: int
    w: int
    merge: int = 2

    def __post_init__(self) -> None:
        assert min(self.t, self.h, self.w, self.merge) >= 1, f"{self} has no patch"
        assert self.h % self.merge == self.w % self.merge == 0, f"{self} has patches that make no token"

    @property
    def patches(self) -> int:
        """The number of patches: rows of ``pixels.patches_of``."""
        return self.t * self.h * self.w

    @property
    def tokens(self) -> int:
        """The number of tokens that stand for the picture."""
        return self.patches // self.merge**2

    @property
    def span(self) -> int:
        """How far positions move on over the picture (``batch.positions_3T``)."""
        return max(self.h, self.w) // self.merge


@dataclass(frozen=True)
class SizedImage:
    """A picture of a row, and the grid that a tower will see of it."""

    image: ImageRef
    grid: Grid


@dataclass(frozen=True)
class Placed:
    """A picture in a sequence: its tokens are ``first`` up to ``end``, whatever ids they have."""

    image: ImageRef
    first: int
    grid: Grid

    @property
    def end(self) -> int:
        """The place behind its last token."""
        return self.first + self.grid.tokens

    def moved(self, by: int) -> Placed:
        """The same picture ``by`` places further on."""
        return replace(self, first=self.first + by)


def misplaced(media: Sequence[Placed], tokens: Int32Array) -> str | None:
    """What is wrong with ``media`` as the pictures of ``tokens``, in words; None: nothing.

    Each picture lies whole within the tokens, behind the one before it, and its tokens are of one id.
    """
    before = 0
    for place, each in enumerate(media):
        if each.first < before:
            return f"picture {place} begins at {each.first}, before {before}, where it may"
        if each.end > len(tokens):
            return f"picture {place} has the tokens {each.first} to {each.end}, of {len(tokens)}"
        if (tokens[each.first : each.end] != tokens[each.first]).any():
            return f"picture {place} stands on tokens of several ids, {each.first} to {each.end}"
        before = each.end
    return None
