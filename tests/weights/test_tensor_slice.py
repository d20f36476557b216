"""Boxes against numpy's slicing; windows too are held to files in test_safetensors."""

from __future__ import annotations

import numpy as np
import pytest

from mcore_rl.weights.tensor_slice import (
    TensorSlice,
    is_one_run,
    offset_of,
    row_major_strides,
    slices_of_range,
    span_of,
    windows,
    without,
)

WHOLE = np.arange(4 * 6 * 5).reshape(4, 6, 5)
BOXES = [
    TensorSlice((0, 0, 0), (4, 6, 5)),
    TensorSlice((1, 2, 3), (2, 3, 2)),
    TensorSlice((1, 0, 0), (2, 6, 5)),
    TensorSlice((3, 5, 4), (1, 1, 1)),
    TensorSlice((0, 2, 0), (0, 3, 5)),
]


def cut(region: TensorSlice, array: np.ndarray = WHOLE) -> np.ndarray:
    return array[tuple(slice(start, start + length) for start, length in region.spans)]


@pytest.mark.parametrize("region", BOXES)
def test_sizes_and_places_in_memory(region: TensorSlice) -> None:
    part, strides = cut(region), row_major_strides(WHOLE.shape)
    assert region.num_elements == part.size
    assert region.end == tuple(np.add(region.start, region.shape))
    assert strides == tuple(stride // WHOLE.itemsize for stride in WHOLE.strides)
    assert is_one_run(region.shape, strides) == (part.size <= 1 or part.flat[-1] - part.flat[0] == part.size - 1)
    if part.size:
        assert offset_of(region.start, strides) == part.flat[0]
        assert span_of(region.shape, strides) == part.flat[-1] - part.flat[0] + 1


@pytest.mark.parametrize("region", BOXES)
@pytest.mark.parametrize("limit", [1, 7, 30, 1000])
def test_windows_are_the_box_in_order_and_small(region: TensorSlice, limit: int) -> None:
    parts = [cut(window).ravel() for window in windows(region, row_major_strides(WHOLE.shape), limit)]
    assert np.array_equal(np.concatenate([*parts, np.empty(0, int)]), cut(region).ravel())
    assert all(part[-1] - part[0] < limit for part in parts)


def test_overlap_is_an_element_in_both() -> None:
    for region in BOXES:
        for other in BOXES:
            assert region.overlaps(other) == bool(set(cut(region).flat) & set(cut(other).flat))


def test_what_is_shared_is_every_element_in_both() -> None:
    for region in BOXES:
        for other in BOXES:
            both = region.shared(other)
            expected = set(cut(region).flat) & set(cut(other).flat)
            assert (set() if both is None else set(cut(both).flat)) == expected
            if both is not None:
                assert np.array_equal(cut(both.within(region), cut(region)), cut(both))


def test_moving_keeps_the_elements() -> None:
    outer = TensorSlice((1, 2, 1), (3, 4, 4))
    inner = TensorSlice((2, 3, 2), (1, 2, 3))
    assert np.array_equal(cut(inner.moved(outer.start, (0, 0, 0)), cut(outer)), cut(inner))


@pytest.mark.parametrize(
    ("region", "fits"),
    [
        (TensorSlice.whole((4, 6)), True),
        (TensorSlice((3, 0), (1, 6)), True),
        (TensorSlice((3, 0), (2, 6)), False),
        (TensorSlice((-1, 0), (2, 6)), False),
        (TensorSlice((0,), (4,)), False),
    ],
)
def test_fits(region: TensorSlice, fits: bool) -> None:
    assert region.fits((4, 6)) == fits


@pytest.mark.parametrize("shape", [(4, 6, 5), (7, 3), (11,), (1, 1, 4)])
def test_a_range_of_elements_is_boxes_in_order(shape: tuple[int, ...]) -> None:
    whole = np.arange(np.prod(shape)).reshape(shape)
    for begin in range(whole.size + 1):
        for end in range(begin, whole.size + 1):
            parts = [cut(region, whole).ravel() for region in slices_of_range(shape, begin, end)]
            assert np.array_equal(np.concatenate([np.empty(0, int), *parts]), np.arange(begin, end))
            assert len(parts) <= 2 * len(shape) - 1
            assert all(part.size for part in parts)


@pytest.mark.parametrize("region", BOXES)
@pytest.mark.parametrize("hole", [*BOXES, TensorSlice((0, 0, 0), (2, 1, 5)), TensorSlice((3, 0, 0), (1, 6, 2))])
def test_what_is_left_without_a_hole(region: TensorSlice, hole: TensorSlice) -> None:
    left = without(region, hole)
    elements = np.concatenate([np.empty(0, int), *(cut(part).ravel() for part in left)])
    assert len(set(elements)) == len(elements), "no element twice"
    assert set(elements) == set(cut(region).ravel()) - set(cut(hole).ravel())
