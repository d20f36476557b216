"""Pictures of squares: as many as is said, equal for equal arguments, none twice and none in both splits."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from mcore_rl.data.arithmetic import Split, split_of
from mcore_rl.data.media.images import decoded
from mcore_rl.data.media.sizes import Sizing
from mcore_rl.data.squares import squares
from mcore_rl.ground.errors import ConfigError


def islands(red: np.ndarray) -> int:
    """How many connected parts a mask has."""
    left = set(zip(*np.nonzero(red), strict=True))
    count = 0
    while left:
        count += 1
        edge = [left.pop()]
        while edge:
            y, x = edge.pop()
            near = {(y + 1, x), (y - 1, x), (y, x + 1), (y, x - 1)} & left
            left -= near
            edge += near
    return count


def test_the_answer_is_what_is_seen() -> None:
    """Two squares may touch, and then are one island of two areas."""
    for each in squares(60, 3, Split.train):
        pixels = np.asarray(decoded(each.png)).astype(int)
        assert pixels.shape == (56, 56, 3)
        red = (pixels == [220, 30, 30]).all(axis=2)
        assert ((pixels == 255).all(axis=2) | red).all()
        assert red.sum() == 64 * int(each.answer)
        assert islands(red) <= int(each.answer)


@pytest.mark.parametrize("split", list(Split))
def test_pictures_are_of_their_split_and_differ(split: Split) -> None:
    made = squares(300, 5, split)
    assert made == squares(300, 5, split) != squares(300, 6, split)
    assert len({each.png for each in made}) == 300
    assert {split_of(each.name) for each in made} == {split}
    assert min(Counter(each.answer for each in made).values()) > 25 and {each.answer for each in made} == set("123456")


def test_a_picture_is_four_tokens_for_either_tower() -> None:
    assert [Sizing(patch).grid(56, 56).tokens for patch in (14, 16)] == [4, 4]


def test_no_count_is_refused() -> None:
    with pytest.raises(ConfigError, match="train=0: must be positive"):
        squares(0, 1, Split.train)
