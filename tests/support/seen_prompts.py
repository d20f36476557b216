"""Prompts with pictures for the tiny models of ``picture_models``, and what transformers' whole model says of them."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from mcore_rl.config.model import VisionConfig
from mcore_rl.data.media.placed import Grid, ImageRef, Placed
from mcore_rl.rollout.protocol import MadePatches, Prompt, PromptPicture
from tests.support import picture_models
from tests.support.picture_models import GRIDS, PICTURE, TOKENS_OF_TEXT

PARTS: dict[str, list[int | str]] = {
    "one": [3, "wide", 9],
    "text": [13],
    "two": [2, "square", 2, "large", 11],
    "twice": [4, "square", 1, "square", 3],
    "last": [5, "least"],
    "five": [2, "least", 1, "square", 1, "least", 2, "wide", 1, "square", 4],
    "literal": [3, "wide", 2, "token", 3],
}


def prompts(vision: VisionConfig, names: Sequence[str] = tuple(PARTS)) -> list[Prompt]:
    """Each of ``names``: numbers are so many random tokens of text; "token" is a picture's, written in text."""
    random = np.random.default_rng(11)
    width = 3 * vision.temporal_patch_size * vision.patch_size**2
    patches = {
        name: random.integers(0, 256, (high * wide, width), dtype=np.uint8) for name, (high, wide) in GRIDS.items()
    }
    made = []
    for name, parts in PARTS.items():
        tokens, pictures = list[int](), list[PromptPicture]()
        for part in parts:
            if part == "token":
                tokens.append(PICTURE)
            elif isinstance(part, str):
                image = ImageRef(sha256(patches[part].tobytes()).hexdigest(), part)
                placed = Placed(image, len(tokens), Grid(1, *GRIDS[part]))
                pictures.append(PromptPicture(placed, MadePatches(patches[part])))
                tokens += [PICTURE] * placed.grid.tokens
            else:
                tokens += random.integers(10, TOKENS_OF_TEXT, part).tolist()
        made.append(Prompt(id=name, tokens=tuple(tokens), pictures=tuple(pictures)))
    return [prompt for prompt in made if prompt.id in names]


def whole_model(directory: Path) -> PreTrainedModel:
    """transformers' model of the checkpoint in ``directory``."""
    return picture_models.whole_model(directory).eval()


@torch.no_grad()
def whole_logprobs(
    whole: PreTrainedModel, vision: VisionConfig, prompt: Prompt, response: Sequence[int]
) -> NDArray[np.float32]:
    """[N]: of the response's tokens, by ``whole``, for which a token that nobody wrote or drew stands for pictures."""
    tokens = torch.tensor([[*prompt.tokens, *response]])
    seen, other = [token for token in range(TOKENS_OF_TEXT) if token not in tokens][:2]
    for config in (whole.config, whole.model.config):
        config.image_token_id, config.video_token_id = seen, other
    told, given = tokens.clone(), dict[str, Any]()
    if prompt.pictures:
        area = vision.temporal_patch_size * vision.patch_size**2
        mean, std = (torch.tensor(each).repeat_interleave(area) for each in (vision.pixel_mean, vision.pixel_std))
        for each in prompt.pictures:
            told[0, each.placed.first : each.placed.end] = seen
        grids = [each.placed.grid for each in prompt.pictures]
        pixels = torch.cat([torch.from_numpy(each.read()) for each in prompt.pictures])
        given["pixel_values"] = (pixels.float() / 255 - mean) / std
        given["image_grid_thw"] = torch.tensor([[1, grid.h, grid.w] for grid in grids])
        given["mm_token_type_ids"] = (told == seen).int()
    logits = whole(input_ids=told, attention_mask=torch.ones_like(told), **given).logits
    logprobs = torch.log_softmax(logits[0, len(prompt.tokens) - 1 : -1].float(), dim=-1)
    chosen: NDArray[np.float32] = logprobs.gather(1, tokens[0, len(prompt.tokens) :, None])[:, 0].numpy()
    return chosen
