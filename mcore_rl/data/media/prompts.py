"""Pictures in prompts: which ones a row has, where its messages have them, and where their tokens stand.

A row's messages say ``<image>`` in a text, or hold a part of type image, once for each picture of its column, in order.
The model's own chat template writes one token for a picture, between two that open and close it; that token becomes as
many as the picture's grid has.  Places are found by what the template wrote, and never by a token's id: a
``<|image_pad|>`` that somebody else wrote stays one token.  In the texts of messages it is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mcore_rl.config.data import ImagesConfig
from mcore_rl.config.model import ModelConfig
from mcore_rl.data.media.images import image_size, read_image, values_of
from mcore_rl.data.media.pixels import patches_of_file
from mcore_rl.data.media.placed import ImageRef, Placed, SizedImage
from mcore_rl.data.media.sizes import Sizing

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BRING_BACK = "Bring the file back, or begin the run anew"
MARK = "<image>"  # in a text, as verl and LLaMA-Factory write it
START = "<|vision_start|>"
PAD = "<|image_pad|>"
END = "<|vision_end|>"
WRITTEN = START + PAD + END  # what a chat template writes for a picture
SPECIAL = (START, END, PAD, "<|video_pad|>", "<|vision_pad|>")  # tokens of pictures and videos


@dataclass(frozen=True)
class PictureReader:
    """Reads the pictures of rows for one model.

    sizing: what its tower asks of their size.  key: their column.  max_images: the most of a row; None is any number.
    """

    sizing: Sizing
    key: str = "images"
    max_images: int | None = None

    def read(self, record: Mapping[str, Any], folder: Path, row_id: str) -> list[SizedImage]:
        """The pictures of a row, none of them decoded.  folder: of the file of rows.

        ValueError, with the column and the remedy: one of them cannot be read, or there are too many.
        """
        values = values_of(record.get(self.key))
        if self.max_images is not None and len(values) > self.max_images:
            limit = f"more than {self.max_images}, the most of a row"
            raise ValueError(f"{self.key}: has {len(values)} pictures, {limit}. Allow more, or leave the row out")
        return [self._read_one(value, folder, row_id, place) for place, value in enumerate(values)]

    def _read_one(self, value: Any, folder: Path, row_id: str, place: int) -> SizedImage:
        name = f"{self.key}[{place}]"
        try:
            file = read_image(value, folder)
            grid = self.sizing.grid(*image_size(file.content))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        return SizedImage(ImageRef(file.sha256, file.path or f"{row_id} {name}"), grid)

    def contents(self, record: Mapping[str, Any], folder: Path, media: Sequence[Placed]) -> list[bytes]:
        """The files of a row's pictures, which were placed as ``media``.  ValueError: one is another now."""
        return [self._content(record, folder, place, each.image) for place, each in enumerate(media)]

    def _content(self, record: Mapping[str, Any], folder: Path, place: int, image: ImageRef) -> bytes:
        file = read_image(values_of(record.get(self.key))[place], folder)
        if file.sha256 != image.sha256:
            raise ValueError(f"{self.key}: {image.source} is not what it was when the run began. {BRING_BACK}")
        return file.content

    def patches(
        self, record: Mapping[str, Any], folder: Path, media: Sequence[Placed], place: int
    ) -> NDArray[np.uint8]:
        """The patches of a row's picture ``place``, of those placed as ``media``; see ``pixels.patches_of``.

        ValueError, with the column: a file is another one now, or is damaged behind its header.
        """
        content = self._content(record, folder, place, media[place].image)
        try:
            patches, grid = patches_of_file(content, self.sizing)
        except ValueError as error:
            raise ValueError(f"{self.key}[{place}]: {error}") from error
        assert grid == media[place].grid, f"{media[place].image.source} has {grid}, and another by its header"
        return patches

    def messages(self, messages: Sequence[Mapping[str, Any]], count: int) -> list[dict[str, Any]]:
        """``messages`` with a part of type image in the place of each picture, as chat templates read them.

        count: the row's pictures.  ValueError, with the remedy: there are not as many places, a text spells a token of
        pictures, or a part is neither a picture's place nor a text.
        """
        written = []
        for place, message in enumerate(messages):
            _refuse_special(message, place)
            content = message.get("content")
            is_plain = content is None or (isinstance(content, str) and MARK not in content)
            written.append({**message} if is_plain else {**message, "content": list(_parts(content, place))})
        places = sum(part == {"type": "image"} for message in written for part in _list(message.get("content")))
        if places != count:
            has = f"{self.key} has {count} pictures, and the messages have {places} places for one"
            raise ValueError(f"{has}. Write {MARK}, or a part of type image, once for each picture")
        return written

    def placed(
        self, text: str, images: Sequence[SizedImage], tokenizer: PreTrainedTokenizerBase
    ) -> tuple[list[int], list[Placed]]:
        """The tokens of ``text``, which the chat template wrote, and where its pictures are among them.

        ValueError, with the remedy: the template, or the tokenizer, is none of a model that takes pictures.
        """
        encoded = tokenizer(
            text, add_special_tokens=False, return_attention_mask=False, return_offsets_mapping=True
        )  # where tokens stand in the text is all that tells the template's from others
        ids = list(encoded["input_ids"])
        sources, media = expanded(text, encoded["offset_mapping"], images)
        return [ids[source] for source in sources], media


def picture_reader(data: object, model: ModelConfig) -> PictureReader | None:
    """What reads the pictures of rows for ``model``; None: it is given none.  data: the configuration group."""
    if not isinstance(data, ImagesConfig) or data.image_key is None:
        return None
    vision = model.vision
    assert vision is not None, "a model without a tower is refused"
    sizing = Sizing(
        vision.patch_size,
        vision.merge_size,
        vision.temporal_patch_size,
        data.image_min_pixels,
        data.image_max_pixels,
    )
    return PictureReader(sizing, data.image_key, data.max_images)


def expanded(
    text: str, offsets: Sequence[Sequence[int]], images: Sequence[SizedImage]
) -> tuple[list[int], list[Placed]]:
    """(for each token of the expanded sequence, the token that it repeats; where the pictures are in it).

    text: what the chat template wrote.  offsets: where each of its tokens stands in it.

    ValueError, with the remedy: the template, or the tokenizer, is none of a model that takes pictures.
    """
    pads = [match.start() + len(START) for match in re.finditer(re.escape(WRITTEN), text)]
    if len(pads) != len(images):
        wrote = f"the chat template writes {WRITTEN} {len(pads)} times for {len(images)} pictures"
        raise ValueError(f"{wrote}. Use the template of a model that takes pictures")
    by_span = {tuple(span): place for place, span in enumerate(offsets)}
    sources = list[int]()
    media = list[Placed]()
    before = 0
    for pad, sized in zip(pads, images, strict=True):
        place = by_span.get((pad, pad + len(PAD)))
        if place is None:
            raise ValueError(f"the tokenizer has no token {PAD}. Use that of a model that takes pictures")
        sources += range(before, place)
        media.append(Placed(sized.image, len(sources), sized.grid))
        sources += [place] * sized.grid.tokens
        before = place + 1
    return [*sources, *range(before, len(offsets))], media


def _parts(content: Any, place: int) -> Iterator[dict[str, str]]:
    """The parts of a message's content: texts, and places of pictures."""
    for part in [{"type": "text", "text": content}] if isinstance(content, str) else _list(content):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind == "text" and isinstance(part.get("text"), str):
            for index, piece in enumerate(part["text"].split(MARK)):
                if index:
                    yield {"type": "image"}
                if piece:
                    yield {"type": "text", "text": piece}
        elif kind == "image" and not any(value is not None for key, value in part.items() if key != "type"):
            yield {"type": "image"}
        elif kind in ("image", "image_url"):
            remedy = "Write the picture into the column of pictures, and {type: image} here"
            raise ValueError(f"message {place} holds a picture itself. {remedy}")
        else:
            raise ValueError(
                f"message {place} has a part of type {kind}. Write {{type: text, text}} or {{type: image}}"
            )


def _list(content: Any) -> list[Any]:
    return list(content) if isinstance(content, list | tuple) else []


def _refuse_special(message: Mapping[str, Any], place: int) -> None:
    texts = list(_texts(message))
    for token in SPECIAL:
        if count := sum(text.count(token) for text in texts):
            spells = f"message {place} spells {token} {count} times, which a model takes for a picture's token"
            raise ValueError(f"{spells}. Write it otherwise, or leave the row out")


def _texts(value: Any) -> Iterator[str]:
    """Every text in a message, at any depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _texts(key)
            yield from _texts(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each)
