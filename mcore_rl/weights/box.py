"""Rectangular parts of tensors, in integers: no torch, no numpy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple


class Box(NamedTuple):
    """A rectangular part of a tensor: where it begins and how far it goes, for each dimension."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """All of a tensor of ``shape``."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def spans(self) -> Iterator[tuple[int, int]]:
        """(start, length) per dimension."""
        return zip(self.start, self.shape, strict=True)

    @property
    def end(self) -> tuple[int, ...]:
        """Behind the last index, per dimension."""
        return tuple(begin + size for begin, size in self.spans)

    @property
    def num_elements(self) -> int:
        """Elements in it."""
        return prod(self.shape)

    def moved(self, origin: Sequence[int], to: Sequence[int]) -> Box:
        """The same part, counted from ``to`` where it was counted from ``origin``."""
        return Box(tuple(at - a + b for at, a, b in zip(self.start, origin, to, strict=True)), self.shape)

    def within(self, outer: Box) -> Box:
        """The same part, counted from where ``outer`` begins."""
        return self.moved(outer.start, (0,) * len(outer.start))

    def shared(self, other: Box) -> Box | None:
        """The elements that lie in both; None where none does."""
        if not self.overlaps(other):
            return None
        begin = tuple(map(max, self.start, other.start))
        return Box(begin, tuple(end - at for end, at in zip(map(min, self.end, other.end), begin, strict=True)))

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether it lies inside a tensor of ``shape``."""
        if not len(self.start) == len(self.shape) == len(shape):
            return False
        return all(
            begin >= 0 and size >= 0 and begin + size <= limit
            for begin, size, limit in zip(self.start, self.shape, shape, strict=True)
        )

    def overlaps(self, other: Box) -> bool:
        """Whether an element lies in both."""
        return all(
            max(begin, other_begin) < min(begin + size, other_begin + other_size)
            for begin, size, other_begin, other_size in zip(*self, *other, strict=True)
        )


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides in elements of a contiguous tensor of ``shape``."""
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))


def offset_of(start: Sequence[int], strides: Sequence[int]) -> int:
    """Elements before element ``start``."""
    return sum(index * stride for index, stride in zip(start, strides, strict=True))


def span_of(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last of a box of ``shape``, both included, in a tensor with ``strides``."""
    return 1 + offset_of([size - 1 for size in shape], strides) if prod(shape) else 0


def is_one_run(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a box of ``shape`` lies without gaps in a tensor with row-major ``strides``."""
    return span_of(shape, strides) == prod(shape)


def windows(box: Box, strides: Sequence[int], max_elements: int) -> Iterator[Box]:
    """``box`` in order, in parts that span at most ``max_elements`` of a tensor with row-major ``strides``."""
    if 0 in box.shape:
        return
    if span_of(box.shape, strides) <= max_elements:
        yield box
        return
    dim = next(dim for dim, size in enumerate(box.shape) if size > 1)
    step = max(1, max_elements // strides[dim])
    begin, size = box.start[dim], box.shape[dim]
    for index in range(0, size, step):
        start = (*box.start[:dim], begin + index, *box.start[dim + 1 :])
        shape = (*box.shape[:dim], min(step, size - index), *box.shape[dim + 1 :])
        yield from windows(Box(start, shape), strides, max_elements)


def boxes_of_range(shape: Sequence[int], begin: int, end: int) -> Iterator[Box]:
    """Elements ``begin`` to ``end`` (exclusive) of a row-major tensor of ``shape``, as boxes, in their order.

    Of a matrix at most three: the rest of a row, whole rows, the beginning of a row.
    """
    if begin >= end:
        return
    if not shape:
        yield Box((), ())
        return
    row, rest = prod(shape[1:]), tuple(shape[1:])

    def part_of_row(index: int, from_: int, to: int) -> Iterator[Box]:
        return (Box((index, *part.start), (1, *part.shape)) for part in boxes_of_range(rest, from_, to))

    first, last = -(-begin // row), end // row  # whole rows
    if first > last:
        yield from part_of_row(last, begin - last * row, end - last * row)
        return
    if first * row > begin:
        yield from part_of_row(first - 1, begin % row, row)
    if last > first:
        yield Box((first, *(0 for _ in rest)), (last - first, *rest))
    yield from part_of_row(last, 0, end - last * row)


def without(box: Box, hole: Box) -> list[Box]:
    """``box`` less what it shares with ``hole``, in boxes that do not overlap."""
    shared = box.shared(hole)
    if shared is None:
        return [box]
    left = []
    start, end = list(box.start), list(box.end)
    for dim, (begin, stop) in enumerate(zip(shared.start, shared.end, strict=True)):
        for low, high in ((start[dim], begin), (stop, end[dim])):
            if low < high:
                corner, far = [*start[:dim], low, *start[dim + 1 :]], [*end[:dim], high, *end[dim + 1 :]]
                left.append(Box(tuple(corner), tuple(b - a for a, b in zip(corner, far, strict=True))))
        start[dim], end[dim] = begin, stop
    return left
