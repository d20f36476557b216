"""Tiny models that see pictures, a batch with pictures for them, and what transformers' whole model says of it.

The batch has what goes wrong elsewhere: a sequence of text alone, two pictures in one, a picture at the end, and one
that two sequences share.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForImageTextToText, PreTrainedModel

from mcore_rl.config.model import ModelConfig, VisionConfig
from mcore_rl.data.media.batch import positions_3T, with_pictures
from mcore_rl.data.media.placed import Grid, ImageRef, Placed
from mcore_rl.families.registry import model_of
from mcore_rl.ground.types import LossInputs, LossSums, Picture, TrainBatch
from mcore_rl.training.vision import build_tower
from tests.support import batches, text_parts

ARCHITECTURES = {
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
}
PICTURE = 195  # the token of pictures
GRIDS = {"wide": (4, 8), "square": (4, 4), "large": (12, 10), "least": (2, 4)}  # patches: of several windows, and one
TOKENS_OF_TEXT = text_parts.TOKENS_OF_TEXT


def config(family: str, **text_changes: object) -> dict[str, Any]:
    """A config.json of ``family``.  text_changes: fields of its text part."""
    made = text_parts.config(ARCHITECTURES[family], **text_changes)
    if family == "qwen2_5_vl":
        made["vision_config"]["window_size"] = 56
    return made


def write(family: str, directory: Path, **text_changes: Any) -> None:
    """A checkpoint of a random model of ``family``, whose layers all count."""
    text_parts.write(ARCHITECTURES[family], directory, **text_changes)


def model(family: str, **text_changes: object) -> ModelConfig:
    """What ``config`` describes, with its tower."""
    return model_of(config(family, **text_changes), pictures=True)[1]


def tower_weights(model: ModelConfig) -> dict[str, Tensor]:
    """Seeded weights of the tower, under Megatron's names, large enough that a mistake shows."""
    assert model.vision is not None
    tower = build_tower(model.vision, model.hidden_size, torch.device("cpu"), torch.float32)
    random = torch.Generator().manual_seed(17)
    return {
        f"vision.{name}": (parameter.dim() == 1 and not name.endswith("bias"))
        + 0.1 * torch.randn(parameter.shape, generator=random)
        for name, parameter in tower.named_parameters()
    }


def whole_model(directory: Path) -> PreTrainedModel:
    """transformers' model of the checkpoint in ``directory``."""
    auto: Any = AutoModelForImageTextToText
    model: PreTrainedModel = auto.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa")
    embedding: Any = model.get_input_embeddings()
    embedding.padding_idx = None
    return model.train()


@dataclass(frozen=True)
class _Row:
    """A sequence: its tokens, its pictures with the places of their first tokens, and how many tokens are trained."""

    tokens: list[int]
    media: tuple[tuple[str, int], ...]
    trained: int


def _row(random: torch.Generator, parts: list[int | str], trained: int) -> _Row:
    """parts: so many random tokens of text, or a picture."""
    tokens: list[int] = []
    media = []
    for part in parts:
        if isinstance(part, str):
            media.append((part, len(tokens)))
            tokens += [PICTURE] * (GRIDS[part][0] * GRIDS[part][1] // 4)
        else:
            tokens += torch.randint(10, TOKENS_OF_TEXT, (part,), generator=random).tolist()
    return _Row(tokens, tuple(media), trained)


def batch_of(vision: VisionConfig) -> TrainBatch:
    """The batch, for a tower."""
    random = torch.Generator().manual_seed(5)
    rows = [
        _row(random, [3, "wide", 9], 6),
        _row(random, [13], 7),
        _row(random, [2, "square", 2, "large", 11], 8),
        _row(random, ["least", 6], 4),
        _row(random, [1, "square", 5], 4),  # a picture that another sequence has, too
        _row(random, [4, "least"], 3),  # the picture is the last token, and is trained on
    ]
    lengths = tuple(len(row.tokens) for row in rows)
    mask_T = torch.cat([torch.arange(len(row.tokens)) >= len(row.tokens) - row.trained for row in rows])
    positions, features, images = [], [], []
    for row in rows:
        placed, feature = [], torch.full((len(row.tokens),), -1, dtype=torch.int32)
        number = 0
        for name, first in row.media:
            grid = Grid(1, *GRIDS[name])
            placed.append(Placed(ImageRef(name, name), first, grid))
            feature[first : first + grid.tokens] = torch.arange(number, number + grid.tokens, dtype=torch.int32)
            number += grid.tokens
        positions.append(torch.from_numpy(positions_3T(len(row.tokens), placed)).T)
        features.append(feature)
        images.append(tuple(Picture(name, *GRIDS[name], Grid(1, *GRIDS[name]).tokens) for name, _ in row.media))
    return TrainBatch(
        lengths_S=lengths,
        tokens_T=torch.tensor([token for row in rows for token in row.tokens]),
        mask_T=mask_T,
        positions_T3=torch.cat(positions),
        feature_T=torch.cat(features),
        images_S=tuple(images),
        patches=_patches(vision),
    )


def _patches(vision: VisionConfig) -> dict[str, NDArray[np.uint8]]:
    """Random ones of each picture in ``GRIDS``."""
    width = 3 * vision.temporal_patch_size * vision.patch_size**2
    draw = np.random.default_rng(3)
    return {name: draw.integers(0, 256, (high * wide, width), dtype=np.uint8) for name, (high, wide) in GRIDS.items()}


ALONE = 46  # tokens of the longest of LENGTHS, into which no two of them fit
LENGTHS = (37, 24, ALONE, 25, 31, 28, 40, 26, 33, 30)
# The pictures of a sequence, with the places of their first tokens.  Sequence 2 has five, two of them twice; that of 4
# ends it; that of 6 lies over all borders at which context parallelism cuts; 8 has one that 2 has.  Those with odd
# numbers have none: nor has the second of two data ranks.
PLACES = {
    0: (("wide", 3),),
    2: (("least", 2), ("square", 6), ("least", 12), ("wide", 16), ("square", 30)),
    4: (("square", 27),),
    6: (("large", 5),),
    8: (("square", 9),),
}


def ragged(model: ModelConfig) -> TrainBatch:
    """``batches.ragged`` of ``LENGTHS`` with the pictures of ``PLACES``."""
    assert model.vision is not None
    batch = batches.ragged(model.vocab_size, LENGTHS)
    media = [
        [Placed(ImageRef(name, name), first, Grid(1, *GRIDS[name])) for name, first in PLACES.get(number, ())]
        for number in range(len(LENGTHS))
    ]
    tokens_T = batch.tokens_T.clone()
    for start, placed in zip(batch.offsets_S, media, strict=True):
        for each in placed:
            tokens_T[start + each.first : start + each.end] = PICTURE
    return replace(with_pictures(replace(batch, tokens_T=tokens_T), media), patches=_patches(model.vision))


def literal(batch: TrainBatch) -> TrainBatch:
    """``batch`` with the pictures' token written in text: first, amid it, behind a picture, and drawn as the last."""
    assert batch.feature_T is not None
    tokens_T = batch.tokens_T.clone()
    for sequence, place in ((1, 0), (1, 6), (0, 12), (3, 7)):
        tokens_T[batch.offsets_S[sequence] + place] = PICTURE
        assert batch.feature_T[batch.offsets_S[sequence] + place] < 0, "a token of text"
    return replace(batch, tokens_T=tokens_T)


def loss(inputs: LossInputs) -> LossSums:
    """The negative log-likelihood of the trained tokens."""
    assert inputs.logprobs_N is not None
    return LossSums(total=-(inputs.logprobs_N * inputs.mask_N).sum(), metrics={})


def whole_side(whole: PreTrainedModel, vision: VisionConfig, batch: TrainBatch) -> tuple[Tensor, Tensor]:
    """(log-probs [T], mean loss) of transformers' model, sequence by sequence, with normalised float32 pixels."""
    logprobs = []
    for given in _given(vision, batch):
        tokens, logits = given["input_ids"], whole(**given).logits
        chosen = torch.log_softmax(logits[0].float(), dim=-1)[:-1].gather(1, tokens[0, 1:, None])[:, 0]
        logprobs.append(torch.cat([torch.zeros(1), chosen]))
    logprobs_T = torch.cat(logprobs)
    return logprobs_T, -(logprobs_T * batch.mask_T).sum() / batch.mask_T.sum()


def whole_values(whole: PreTrainedModel, vision: VisionConfig, batch: TrainBatch, weight_H: Tensor) -> Tensor:
    """What ``weight_H`` says of the last hidden state of transformers' model in front of each token, [T]."""
    values = [whole.model(**given).last_hidden_state[0] @ weight_H for given in _given(vision, batch)]
    return torch.cat([torch.cat([torch.zeros(1), each[:-1]]) for each in values])


def _given(vision: VisionConfig, batch: TrainBatch) -> Iterator[dict[str, Any]]:
    """The arguments of transformers' model, for each sequence."""
    assert batch.images_S is not None and batch.feature_T is not None
    area = vision.temporal_patch_size * vision.patch_size**2
    mean, std = (torch.tensor(x).repeat_interleave(area) for x in (vision.pixel_mean, vision.pixel_std))
    for start, length, images in zip(batch.offsets_S, batch.lengths_S, batch.images_S, strict=True):
        tokens = batch.tokens_T[None, start : start + length]
        given: dict[str, Any] = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        if images:
            given["pixel_values"] = torch.cat(
                [(torch.from_numpy(batch.patches[x.key]).float() / 255 - mean) / std for x in images]
            )
            given["image_grid_thw"] = torch.tensor([(1, x.height, x.width) for x in images])
            given["mm_token_type_ids"] = (batch.feature_T[None, start : start + length] >= 0).int()
        yield given
