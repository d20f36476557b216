"""Patches: those of transformers' processors of Qwen2.5-VL and Qwen3-VL bit for bit, as bytes and normalised."""

from __future__ import annotations

import random

import numpy as np
import pytest
from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from mcore_rl.data.media.pixels import patches_of, patches_of_file
from mcore_rl.data.media.sizes import Sizing
from tests.support.pictures import encoded, noise

# (patch, mean, std) of preprocessor_config.json.
TOWERS = {
    "qwen2.5-vl": (14, OPENAI_CLIP_MEAN, OPENAI_CLIP_STD),
    "qwen3-vl": (16, [0.5, 0.5, 0.5], [0.5, 0.5, 0.5]),
}
LOW, HIGH = 56 * 56, 40_000


@pytest.mark.parametrize("tower", TOWERS)
def test_patches_are_those_of_the_processor_over_200_sizes(tower: str) -> None:
    patch, mean, std = TOWERS[tower]
    sizing = Sizing(patch, min_pixels=LOW, max_pixels=HIGH)
    size = {"shortest_edge": LOW, "longest_edge": HIGH}
    processor = Qwen2VLImageProcessorPil(patch_size=patch, size=size, image_mean=mean, image_std=std)
    draw = random.Random(0)
    sizes = [(1, 1), (56, 56), (64, 64), (3, 200), (199, 1), (28, 3), (3, 3), (1000, 600)]
    sizes += [(draw.randint(1, 400), draw.randint(1, 400)) for _ in range(192)]
    resized = 0
    for seed, (width, height) in enumerate(sizes):
        if max(width, height) > 200 * min(width, height):
            continue
        image = noise(width, height, seed)
        given = {"images": [image], "input_data_format": "channels_last", "return_tensors": "np"}
        raw = processor(**given, do_rescale=False, do_normalize=False)
        patches, grid = patches_of(image, sizing)
        assert patches.dtype == np.uint8
        assert [grid.t, grid.h, grid.w] == raw["image_grid_thw"][0].tolist()
        assert (patches == raw["pixel_values"]).all() and patches.shape == raw["pixel_values"].shape
        resized += (grid.w * patch, grid.h * patch) != (width, height)

        area = patch * patch * 2
        means, stds = (np.repeat(np.asarray(each, dtype=np.float32), area) for each in (mean, std))
        normalised = (patches.astype(np.float32) / np.float32(255) - means) / stds
        expected = processor(**given)["pixel_values"]
        assert expected.dtype == np.float32 and (normalised == expected).all()
    assert resized > 150


def test_a_file_is_decoded_first() -> None:
    image = noise(70, 60)
    patches, grid = patches_of_file(encoded(image), Sizing(14))
    assert (patches == patches_of(image, Sizing(14))[0]).all() and (grid.h, grid.w) == (4, 4)
