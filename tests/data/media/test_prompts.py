"""Pictures in messages: places and pictures are as many, the template's placeholders become tokens by position."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mcore_rl.data.media.images import read_image
from mcore_rl.data.media.placed import Grid, ImageRef, Placed, SizedImage
from mcore_rl.data.media.prompts import PAD, PictureReader
from mcore_rl.data.media.sizes import Sizing
from tests.support.chat_styles import style
from tests.support.pictures import picture

READER = PictureReader(Sizing(14))
IMAGE = {"type": "image"}
HERE = Path()


def text(said: str) -> dict[str, str]:
    return {"type": "text", "text": said}


def asked(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("<image>Find x.", [IMAGE, text("Find x.")]),
        ("Find x. <image>", [text("Find x. "), IMAGE]),
        ("a<image><image>b<image>", [text("a"), IMAGE, IMAGE, text("b"), IMAGE]),
        ([IMAGE, text("Find x.")], [IMAGE, text("Find x.")]),
        ([{"type": "image", "text": None, "image": None}, text("<image>?")], [IMAGE, IMAGE, text("?")]),
    ],
)
def test_marks_and_parts_are_places(content: Any, parts: list[dict[str, str]]) -> None:
    assert READER.messages(asked(content), parts.count(IMAGE)) == asked(parts)


def test_messages_without_a_place_stay_what_they_are() -> None:
    messages = [{"role": "system", "content": "Look."}, *asked("What < image > is it?")]
    assert READER.messages(messages, 0) == messages


def test_every_message_counts() -> None:
    messages = [*asked("<image>?"), {"role": "assistant", "content": "An apple."}, *asked([text("And"), IMAGE])]
    assert READER.messages(messages, 2)[0]["content"] == [IMAGE, text("?")]
    with pytest.raises(ValueError, match="images has 1 pictures, and the messages have 2 places for one"):
        READER.messages(messages, 1)
    with pytest.raises(ValueError, match="images has 1 pictures, and the messages have 0 places"):
        READER.messages(asked("Find x."), 1)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"content": f"What is {PAD}{PAD}?"}, r"message 0 spells <\|image_pad\|> 2 times"),
        ({"content": [text("<|vision_start|>")]}, r"spells <\|vision_start\|> 1 times"),
        ({"content": "x", "tool_calls": [{"function": {"arguments": {"a": ["<|video_pad|>"]}}}]}, "spells <.video_pad"),
        (
            {"content": [{"type": "image", "image": "a.png"}]},
            "message 0 holds a picture itself. Write the picture into",
        ),
        ({"content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "holds a picture itself"),
        ({"content": [{"type": "video"}]}, "message 0 has a part of type video"),
        ({"content": [{"type": "text"}]}, "has a part of type text. Write {type: text, text}"),
        ({"content": [{"text": "x"}]}, "has a part of type None"),
        ({"content": ["x"]}, "has a part of type str"),
    ],
)
def test_what_stands_for_no_picture_of_the_row_is_refused(message: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        READER.messages([{"role": "user", **message}], 0)


def sized(tokens: int, name: str = "a") -> SizedImage:
    return SizedImage(ImageRef(name, name), Grid(1, 2, 2 * tokens))


@pytest.mark.parametrize("name", ["qwen2.5-vl", "qwen3-vl"])
@pytest.mark.parametrize(
    ("content", "sizes"),
    [
        ([IMAGE], [3]),
        ([IMAGE, text("Find x.")], [1]),
        ([text("é? "), IMAGE, text(" and "), IMAGE, IMAGE], [4, 1, 7]),  # NFC makes another text of the first
    ],
)
def test_tokens_are_those_of_transformers(name: str, content: Any, sizes: list[int]) -> None:
    """Its processors write a picture's token as often as it has tokens, and encode the text."""
    tokenizer = style(name)
    written = tokenizer.apply_chat_template(asked(content), tokenize=False, add_generation_prompt=True)
    pieces = written.split(PAD)
    expected = pieces[0] + "".join(PAD * size + piece for size, piece in zip(sizes, pieces[1:], strict=True))
    images = [sized(size, f"{place}") for place, size in enumerate(sizes)]
    tokens, media = READER.placed(written, images, tokenizer)
    assert tokens == tokenizer.encode(expected, add_special_tokens=False)
    pad = tokenizer.convert_tokens_to_ids(PAD)
    assert [place for each in media for place in range(each.first, each.end)] == [
        place for place, token in enumerate(tokens) if token == pad
    ]
    assert [each.image.sha256 for each in media] == [f"{place}" for place in range(len(sizes))]


def test_a_written_token_stays_one_token() -> None:
    """Whoever wrote it, as a description of a tool: only what the template writes for a picture is a place."""
    tokenizer = style("qwen3-vl")
    written = f"Use {PAD} for pictures. <|vision_start|>{PAD}<|vision_end|> and {PAD}<|vision_end|>"
    tokens, media = READER.placed(written, [sized(5)], tokenizer)
    pad = tokenizer.convert_tokens_to_ids(PAD)
    assert tokens.count(pad) == 7 and media[0].grid.tokens == 5
    assert tokens.index(pad) < media[0].first and tokens[media[0].end :].count(pad) == 1


def test_a_template_that_has_no_place_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"writes <\|vision_start\|>.* 0 times for 1 pictures. Use the template of a model"
    ):
        READER.placed("Find x.", [sized(1)], style("qwen2.5-vl"))
    with pytest.raises(ValueError, match=r"the tokenizer has no token <\|image_pad\|>"):
        READER.placed("<|vision_start|><|image_pad|><|vision_end|>", [sized(1)], style("qwen2.5"))


def test_pictures_of_a_row_are_sized_and_named(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(picture(112, 56))
    record = {"images": [{"bytes": picture(56, 84), "path": "x"}, "a.png"], "other": 1}
    first, second = READER.read(record, tmp_path, "t.parquet:3")
    assert (first.grid, second.grid) == (Grid(1, 6, 4), Grid(1, 4, 8))
    assert first.image == ImageRef(read_image(picture(56, 84), HERE).sha256, "t.parquet:3 images[0]")
    assert second.image.source == str(tmp_path / "a.png")
    media = [Placed(first.image, 1, first.grid), Placed(second.image, 9, second.grid)]
    assert READER.contents(record, tmp_path, media) == [picture(56, 84), picture(112, 56)]
    (tmp_path / "a.png").write_bytes(picture(112, 56, seed=1))
    with pytest.raises(ValueError, match="is not what it was when the run began"):
        READER.contents(record, tmp_path, media)
    with pytest.raises(ValueError, match=r"images\[1\]: is no file.*none.png"):
        READER.read({"images": [picture(), "none.png"]}, tmp_path, "t.parquet:3")
    with pytest.raises(ValueError, match="images: has 2 pictures, more than 1, the most of a row"):
        PictureReader(Sizing(14), max_images=1).read(record, tmp_path, "t.parquet:3")
    one = PictureReader(Sizing(14), key="image").read({"image": picture(), "images": [b"x"]}, tmp_path, "t.parquet:0")
    assert [each.image.source for each in one] == ["t.parquet:0 image[0]"]
