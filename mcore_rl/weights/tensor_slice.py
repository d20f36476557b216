"""Rectangular parts of tensors, in integers: no torch, no numpy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple


class TensorSlice(NamedTuple):
    """A rectangular part of a tensor: first index and length of each dimension."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> TensorSlice:
        """All of a tensor of ``shape``."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def spans(self) -> Iterator[tuple[int, int]]:
        """(start, length) per dimension."""
        return zip(self.start, self.shape, strict=True)

    @property
    def end(self) -> tuple[int, ...]:
        """One past the last index, per dimension."""
        return tuple(begin + size for begin, size in self.spans)

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def moved(self, origin: Sequence[int], to: Sequence[int]) -> TensorSlice:
        """The part shifted by ``to - origin``."""
        return TensorSlice(tuple(at - a + b for at, a, b in zip(self.start, origin, to, strict=True)), self.shape)

    def within(self, outer: TensorSlice) -> TensorSlice:
        """The part relative to the start of ``outer``."""
        return self.moved(outer.start, (0,) * len(outer.start))

    def shared(self, other: TensorSlice) -> TensorSlice | None:
        """The intersection; None if it is empty."""
        if not self.overlaps(other):
            return None
        begin = tuple(map(max, self.start, other.start))
        return TensorSlice(begin, tuple(end - at for end, at in zip(map(min, self.end, other.end), begin, strict=True)))

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether the part lies inside a tensor of ``shape``."""
        if not len(self.start) == len(self.shape) == len(shape):
            return False
        return all(
            begin >= 0 and size >= 0 and begin + size <= limit
            for begin, size, limit in zip(self.start, self.shape, shape, strict=True)
        )

    def overlaps(self, other: TensorSlice) -> bool:
        """Whether the two parts share an element."""
        return all(
            max(begin, other_begin) < min(begin + size, other_begin + other_size)
            for begin, size, other_begin, other_size in zip(*self, *other, strict=True)
        )


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides in elements of a contiguous tensor of ``shape``."""
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))


def offset_of(start: Sequence[int], strides: Sequence[int]) -> int:
    """Offset, in elements, of element ``start``."""
    return sum(index * stride for index, stride in zip(start, strides, strict=True))


def span_of(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last of a region of ``shape``, both included, in a tensor with ``strides``."""
    return 1 + offset_of([size - 1 for size in shape], strides) if prod(shape) else 0


def is_one_run(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a region of ``shape`` is contiguous in a tensor with row-major ``strides``."""
    return span_of(shape, strides) == prod(shape)


def windows(region: TensorSlice, strides: Sequence[int], max_elements: int) -> Iterator[TensorSlice]:
    """``region`` cut into parts, in order, that each span at most ``max_elements``; ``strides`` are row-major."""
    if 0 in region.shape:
        return
    if span_of(region.shape, strides) <= max_elements:
        yield region
        return
    dim = next(dim for dim, size in enumerate(region.shape) if size > 1)
    step = max(1, max_elements // strides[dim])
    begin = region.start[dim]
    size = region.shape[dim]
    for index in range(0, size, step):
        start = (*region.start[:dim], begin + index, *region.start[dim + 1 :])
        shape = (*region.shape[:dim], min(step, size - index), *region.shape[dim + 1 :])
        yield from windows(TensorSlice(start, shape), strides, max_elements)


def slices_of_range(shape: Sequence[int], begin: int, end: int) -> Iterator[TensorSlice]:
    """Elements ``begin`` to ``end`` (exclusive) of a row-major tensor of ``shape``, as regions, in order.

    A matrix needs at most three: the rest of a row, whole rows, the beginning of a row.
    """
    if begin >= end:
        return
    if not shape:
        yield TensorSlice((), ())
        return
    row = prod(shape[1:])
    rest = tuple(shape[1:])

    def part_of_row(index: int, from_: int, to: int) -> Iterator[TensorSlice]:
        return (TensorSlice((index, *part.start), (1, *part.shape)) for part in slices_of_range(rest, from_, to))

    first = -(-begin // row)  # whole rows
    last = end // row
    if first > last:
        yield from part_of_row(last, begin - last * row, end - last * row)
        return
    if first * row > begin:
        yield from part_of_row(first - 1, begin % row, row)
    if last > first:
        yield TensorSlice((first, *(0 for _ in rest)), (last - first, *rest))
    yield from part_of_row(last, 0, end - last * row)


def without(region: TensorSlice, hole: TensorSlice) -> list[TensorSlice]:
    """``region`` minus ``hole``, as regions that do not overlap."""
    shared = region.shared(hole)
    if shared is None:
        return [region]
    left = []
    start = list(region.start)
    end = list(region.end)
    for dim, (begin, stop) in enumerate(zip(shared.start, shared.end, strict=True)):
        for low, high in ((start[dim], begin), (stop, end[dim])):
            if low < high:
                corner = [*start[:dim], low, *start[dim + 1 :]]
                far = [*end[:dim], high, *end[dim + 1 :]]
                left.append(TensorSlice(tuple(corner), tuple(b - a for a, b in zip(corner, far, strict=True))))
        start[dim] = begin
        end[dim] = stop
    return left
