"""Sizes: transformers' own ``smart_resize``, over random sizes, towers and bounds."""

from __future__ import annotations

import random

import pytest
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from mcore_rl.data.media.sizes import MAX_PIXELS, Sizing


def test_sizes_are_those_of_transformers() -> None:
    draw = random.Random(0)
    for _ in range(5_000):
        patch = draw.choice((14, 16))
        low = draw.choice((56 * 56, 256 * 256))
        sizing = Sizing(patch, min_pixels=low, max_pixels=draw.choice((low, 65_536, 401_408, MAX_PIXELS, 12_845_056)))
        width, height = (int(2 ** draw.uniform(0, 12)) for _ in range(2))
        if max(width, height) > 200 * min(width, height):
            continue
        expected = smart_resize(height, width, 2 * patch, sizing.min_pixels, sizing.max_pixels)
        assert sizing.resized(width, height) == (expected[1], expected[0])
        grid = sizing.grid(width, height)
        assert (grid.t, grid.h * patch, grid.w * patch) == (1, *expected)
        assert grid.tokens == expected[0] * expected[1] // (2 * patch) ** 2


def test_a_picture_that_is_too_long_is_refused() -> None:
    assert Sizing(14).resized(200, 1) == smart_resize(1, 200)[::-1]
    for size in ((201, 1), (1, 201)):
        with pytest.raises(ValueError, match=r"more than 200 times as long as it is wide\. Cut it"):
            Sizing(14).resized(*size)


def test_a_million_pixels_are_1280_tokens() -> None:
    assert Sizing(14).max_tokens == 1280
    assert Sizing(14).grid(4000, 3000).tokens <= 1280 < Sizing(14, max_pixels=12_845_056).grid(4000, 3000).tokens
