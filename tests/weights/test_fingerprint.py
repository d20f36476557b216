"""Parts add up to the whole, and whatever differs shows; the reference is the formula in Python's integers."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from mcore_rl.weights.fingerprint import added, fingerprint

FIRST, SECOND, MASK = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, (1 << 64) - 1


def signed(value: int) -> int:
    value &= MASK
    return value - (1 << 64) if value >> 63 else value


def factor(dim: int, index: int) -> int:
    mixed = signed((index * 8 + dim + 1) * FIRST)
    mixed = signed((mixed ^ mixed >> 29) * SECOND)
    return (mixed ^ mixed >> 32) | 1


def by_hand(values: torch.Tensor) -> int:
    bits = values.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[values.dtype.itemsize])
    total = 0
    for place in product(*map(range, values.shape)):
        weight = int(np.prod([factor(dim, index) for dim, index in enumerate(place)], dtype=object))
        total += int(bits[place]) * weight
    return signed(total)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_it_is_the_formula(dtype: torch.dtype) -> None:
    values = (60 + 9 * torch.randn(3, 5, 4)).to(dtype)
    assert fingerprint(values, (0, 0, 0)) == by_hand(values)


def test_parts_add_up_in_any_cut_also_of_tensors_with_gaps() -> None:
    values = torch.randn(700, 801)
    parts = [
        fingerprint(values[rows, columns], (rows.start, columns.start))
        for rows in (slice(0, 13), slice(13, 700))
        for columns in (slice(0, 400), slice(400, 801))
    ]
    assert added(*parts) == fingerprint(values, (0, 0))
    assert fingerprint(values.t().contiguous().t(), (0, 0)) == fingerprint(values, (0, 0))


def test_zeros_add_nothing_of_either_sign() -> None:
    assert fingerprint(torch.tensor([0.0, -0.0]), (7,)) == 0


def test_every_bit_of_every_element_shows() -> None:
    values = torch.randn(4, 6)
    whole = fingerprint(values, (0, 0))
    for row, column, bit in product(range(4), range(6), range(31)):
        changed = values.clone()
        changed.view(torch.int32)[row, column] ^= 1 << bit
        assert fingerprint(changed, (0, 0)) != whole


def test_what_changed_places_shows() -> None:
    values = torch.randn(8, 8)
    whole = fingerprint(values, (0, 0))
    assert fingerprint(values.flip(0), (0, 0)) != whole
    assert fingerprint(values.roll(1, 1), (0, 0)) != whole
    assert fingerprint(values.t(), (0, 0)) != whole
