"""The rows of pictures: their column, their sizes, and what verl tells engines of them."""

from __future__ import annotations

from typing import Any

from mcore_rl.from_verl.row import KeyRow, absent, gone, part, to

COLUMN = (
    "asked for by name (verl's default is `images`, of any model): from-verl writes it if the script does, or names a "
    "model of pictures"
)
STILLS = "pictures alone are read: rows with videos or sounds are refused"
SIZE = "pixels of a picture; without it from-verl writes those of the model's own processor, 12,845,056 of Qwen2.5-VL"
ONE_SIZING = "a picture is sized once, by the tower's own patches"
LIMIT = "pictures of a row: more is refused"
LIMIT_OF_ENGINE = "pictures of a row: more is refused, and 0 is a run of text"
PATCHES = "engines are given patches, and process no picture (docs/rollout.md)"


def sizes(verl: str) -> list[KeyRow]:
    """The rows of what a processor is told.  verl: the group of it."""
    return [
        to(f"{verl}.{{min_pixels,size.shortest_edge}}", "data.image_min_pixels"),
        to(f"{verl}.{{max_pixels,size.longest_edge}}", "data.image_max_pixels", note=SIZE),
        gone(verl, "an empty group"),
        absent(f"{verl}.*", "a picture has its fewest and most pixels, and no other setting"),
    ]


def or_any(most: Any) -> Any:
    """A number of pictures: 0 is null here."""
    return most or None


def pictures() -> list[KeyRow]:
    """The rows of a run's data."""
    return [
        part("data.image_key", "data.image_key", "pictures", COLUMN),
        part("data.{video_key,audio_key}", "data.image_key", "pictures", STILLS),
        *sizes("data.mm_processor_kwargs"),
        gone("data.image_patch_size", ONE_SIZING),
        gone("data.return_multi_modal_inputs", "pictures stay with their rows"),
    ]


def engine_pictures(rollout: str) -> list[KeyRow]:
    """The rows of engines.  rollout: verl's group of them."""
    vllm = f"{rollout}.engine_kwargs.vllm"
    return [
        to(f"{vllm}.limit_mm_per_prompt.image", "data.max_images", or_any, LIMIT_OF_ENGINE),
        to(f"{rollout}.limit_images", "data.max_images", or_any, LIMIT),  # in verl, too, it goes before vLLM's
        absent(f"{vllm}.limit_mm_per_prompt.{{video,audio}}", STILLS),
        *sizes(f"{vllm}.mm_processor_kwargs"),
        gone(f"{vllm}.{{disable_mm_preprocessor_cache,mm_processor_cache_gb}}", PATCHES),
    ]
