"""Boxes against numpy's slicing; windows too are held to files in test_safetensors."""

from __future__ import annotations

import numpy as np
import pytest

from mcore_rl.weights.box import (
    Box,
    boxes_of_range,
    is_one_run,
    offset_of,
    row_major_strides,
    span_of,
    windows,
    without,
)

WHOLE = np.arange(4 * 6 * 5).reshape(4, 6, 5)
BOXES = [
    Box((0, 0, 0), (4, 6, 5)),
    Box((1, 2, 3), (2, 3, 2)),
    Box((1, 0, 0), (2, 6, 5)),
    Box((3, 5, 4), (1, 1, 1)),
    Box((0, 2, 0), (0, 3, 5)),
]


def cut(box: Box, array: np.ndarray = WHOLE) -> np.ndarray:
    return array[tuple(slice(start, start + length) for start, length in box.spans)]


@pytest.mark.parametrize("box", BOXES)
def test_sizes_and_places_in_memory(box: Box) -> None:
    part, strides = cut(box), row_major_strides(WHOLE.shape)
    assert box.num_elements == part.size
    assert box.end == tuple(np.add(box.start, box.shape))
    assert strides == tuple(stride // WHOLE.itemsize for stride in WHOLE.strides)
    assert is_one_run(box.shape, strides) == (part.size <= 1 or part.flat[-1] - part.flat[0] == part.size - 1)
    if part.size:
        assert offset_of(box.start, strides) == part.flat[0]
        assert span_of(box.shape, strides) == part.flat[-1] - part.flat[0] + 1


@pytest.mark.parametrize("box", BOXES)
@pytest.mark.parametrize("limit", [1, 7, 30, 1000])
def test_windows_are_the_box_in_order_and_small(box: Box, limit: int) -> None:
    parts = [cut(window).ravel() for window in windows(box, row_major_strides(WHOLE.shape), limit)]
    assert np.array_equal(np.concatenate([*parts, np.empty(0, int)]), cut(box).ravel())
    assert all(part[-1] - part[0] < limit for part in parts)


def test_overlap_is_an_element_in_both() -> None:
    for box in BOXES:
        for other in BOXES:
            assert box.overlaps(other) == bool(set(cut(box).flat) & set(cut(other).flat))


def test_what_is_shared_is_every_element_in_both() -> None:
    for box in BOXES:
        for other in BOXES:
            both = box.shared(other)
            expected = set(cut(box).flat) & set(cut(other).flat)
            assert (set() if both is None else set(cut(both).flat)) == expected
            if both is not None:
                assert np.array_equal(cut(both.within(box), cut(box)), cut(both))


def test_moving_keeps_the_elements() -> None:
    outer = Box((1, 2, 1), (3, 4, 4))
    inner = Box((2, 3, 2), (1, 2, 3))
    assert np.array_equal(cut(inner.moved(outer.start, (0, 0, 0)), cut(outer)), cut(inner))


@pytest.mark.parametrize(
    ("box", "fits"),
    [
        (Box.whole((4, 6)), True),
        (Box((3, 0), (1, 6)), True),
        (Box((3, 0), (2, 6)), False),
        (Box((-1, 0), (2, 6)), False),
        (Box((0,), (4,)), False),
    ],
)
def test_fits(box: Box, fits: bool) -> None:
    assert box.fits((4, 6)) == fits


@pytest.mark.parametrize("shape", [(4, 6, 5), (7, 3), (11,), (1, 1, 4)])
def test_a_range_of_elements_is_boxes_in_order(shape: tuple[int, ...]) -> None:
    whole = np.arange(np.prod(shape)).reshape(shape)
    for begin in range(whole.size + 1):
        for end in range(begin, whole.size + 1):
            parts = [cut(box, whole).ravel() for box in boxes_of_range(shape, begin, end)]
            assert np.array_equal(np.concatenate([np.empty(0, int), *parts]), np.arange(begin, end))
            assert len(parts) <= 2 * len(shape) - 1
            assert all(part.size for part in parts)


@pytest.mark.parametrize("box", BOXES)
@pytest.mark.parametrize("hole", [*BOXES, Box((0, 0, 0), (2, 1, 5)), Box((3, 0, 0), (1, 6, 2))])
def test_what_is_left_without_a_hole(box: Box, hole: Box) -> None:
    left = without(box, hole)
    found = np.concatenate([np.empty(0, int), *(cut(part).ravel() for part in left)])
    assert len(set(found)) == len(found), "no element twice"
    assert set(found) == set(cut(box).ravel()) - set(cut(hole).ravel())
