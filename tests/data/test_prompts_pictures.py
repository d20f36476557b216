"""Prompts with pictures: expanded lengths, cuts, bad pictures by row, and models that take none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from mcore_rl.config.data import DataConfig, Truncation
from mcore_rl.data.media.placed import Grid, ImageRef, Placed
from mcore_rl.data.media.prompts import PAD, PictureReader
from mcore_rl.data.media.sizes import Sizing
from mcore_rl.data.prompts import PromptSet, kept_media, truncated
from mcore_rl.ground.errors import DataError
from tests.support.chat_styles import style
from tests.support.pictures import animated, bomb, encoded, noise, picture, turned
from tests.support.prompt_files import row, user, write

TITLE = "data.train_files"
READER = PictureReader(Sizing(14, max_pixels=40_000), max_images=3)
TOKENIZER = style("qwen2.5-vl")


def load(*paths: Path, reader: PictureReader | None = READER, **options: Any) -> PromptSet:
    config = DataConfig(**options)
    return PromptSet.load(paths, config, TOKENIZER, max_samples=None, title=TITLE, pictures=reader)


def problems(*paths: Path, **options: Any) -> tuple[str, ...]:
    with pytest.raises(DataError) as caught:
        load(*paths, **options)
    return caught.value.problems


def struct(content: bytes) -> dict[str, Any]:
    return {"bytes": content, "path": None}


def test_a_prompt_has_its_pictures_tokens(tmp_path: Path) -> None:
    rows = [
        row("<image>Find x.", images=[struct(picture(56, 84))], note=None),
        row("2 + 3?", images=None),
        row("<image> or <image>?", images=[struct(picture(112, 56)), struct(picture(112, 56))], note="x"),
    ]
    prompts = load(write(tmp_path / "t.parquet", rows))
    written = TOKENIZER.apply_chat_template(
        user("2 images: ?"), tokenize=False, add_generation_prompt=True
    )  # oracle of the text around
    before, after = written.split("2 images: ?")
    place = "<|vision_start|>{}<|vision_end|>"
    expected = [
        before + place.format(PAD * 6) + "Find x." + after,
        before + "2 + 3?" + after,
        before + place.format(PAD * 8) + " or " + place.format(PAD * 8) + "?" + after,
    ]
    assert [list(prompts[index].tokens) for index in range(3)] == [
        TOKENIZER.encode(text, add_special_tokens=False) for text in expected
    ]
    assert [len(prompts[index].media) for index in range(3)] == [1, 0, 2]
    first, second = prompts[2].media
    assert first.image.sha256 == second.image.sha256 and first.end < second.first
    assert prompts.image_files(2) == [picture(112, 56)] * 2 and prompts.image_files(1) == []
    assert prompts[2].messages == user("<image> or <image>?") and prompts[2].columns["note"] == "x"
    assert "images" not in prompts[2].columns, "bytes of pictures are for no reward process"
    assert "; 3 pictures, 2 different, of 6 to 8 tokens" in prompts.describe()


def test_files_beside_the_file_of_rows_and_contents_of_parts(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.png").write_bytes(picture())
    parts = [{"type": "image", "text": None}, {"type": "text", "text": "Find x."}]
    asked = [{"role": "user", "content": parts}]
    path = write(tmp_path / "t.parquet", [row(prompt=asked, images=["in/a.png"])])
    lines = tmp_path / "t.jsonl"
    texts = [row("2 + 3?"), row("<image>Find x.", images=["in/a.png"]), row(prompt=asked, images=["in/a.png"])]
    lines.write_text("".join(f"{json.dumps(each)}\n" for each in texts))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "t.parquet").symlink_to(path)  # beside whose link there is no picture
    prompts = load(path, lines)
    assert prompts[0].tokens == prompts[2].tokens == prompts[3].tokens
    assert [len(prompts[index].media) for index in range(4)] == [1, 0, 1, 1]
    assert prompts.image_files(0) == prompts.image_files(3) == [picture()]
    assert "is no file, seen from the file of rows" in problems(tmp_path / "elsewhere" / "t.parquet")[0]


def test_prompts_are_filtered_by_what_they_become(tmp_path: Path) -> None:
    sizes = [(56, 56), (196, 196)]  # 4 and 49 tokens
    path = write(tmp_path / "t.parquet", [row("<image>?", images=[struct(picture(*size))]) for size in sizes])
    short, long = load(path).lengths
    assert long - short == 45
    left = load(path, max_prompt_length=long - 1, filter_overlong_prompts=True)
    assert left.lengths == [short] and left.num_left_out == 1 and len(left[0].media) == 1
    assert f"the longest {long}: t.parquet:1" in problems(path, max_prompt_length=long - 1)[0]


@pytest.mark.parametrize("truncation", [Truncation.left, Truncation.right, Truncation.middle])
def test_no_picture_is_cut(truncation: Truncation) -> None:
    """Every place of a picture and every length: what is kept of it is all, with its two neighbours, or it is named."""
    length, grid = 12, Grid(1, 2, 4)
    for first in range(1, length - 2):
        picture_there = Placed(ImageRef("a", "a"), first, grid)
        for limit in range(1, length + 2):
            places = list(truncated(range(length), limit, truncation))
            kept = kept_media([picture_there], length, limit, truncation)
            if {first - 1, first, first + 1, first + 2} <= set(places):
                assert isinstance(kept, list) and places[kept[0].first : kept[0].end] == [first, first + 1]
            else:
                assert kept == picture_there


def test_rows_whose_cut_meets_a_picture_are_named(tmp_path: Path) -> None:
    rows = [row("<image>" + "x y " * 30, images=[struct(picture())]), row("x y " * 30)]
    path = write(tmp_path / "t.parquet", rows)
    whole = load(path)
    limit = whole.lengths[0] - 10
    cut = load(path, max_prompt_length=limit, truncation=Truncation.right)
    assert cut[0].media == whole[0].media and cut[0].tokens == whole[0].tokens[:limit]
    (problem,) = problems(path, max_prompt_length=limit - 20, truncation=Truncation.left)
    begin = "t.parquet:0: data.truncation=left would cut the picture at the tokens "
    assert problem.startswith(begin) and f"data.max_prompt_length={limit - 20}. Write" in problem


BAD = {
    "no picture": (b"hello", "images[0]: is no PNG, JPEG or WEBP"),
    "bomb": (bomb(10_000, 10_000), "images[0]: has more than 64,000,000 pixels"),
    "animated": (animated(), "images[0]: is animated"),
    "half": (picture()[:20], "images[0]: "),
    "long and thin": (encoded(noise(700, 2)), "images[0]: is 700 x 2 pixels, more than 200 times"),
    "null": (None, "images[0]: has neither bytes nor a path"),
    "missing": ("none.png", "images[0]: is no file, seen from the file of rows: none.png"),
    "url": ("https://example.com/a.png", "images[0]: is an address, and a run fetches no picture"),
}


def test_every_bad_picture_is_named_by_row_and_key(tmp_path: Path) -> None:
    rows = [
        row("<image>?", images=[struct(value) if isinstance(value, bytes) else {"bytes": None, "path": value}])
        for value, _ in BAD.values()
    ]
    rows += [
        row("What is it?", images=[struct(picture())]),
        row("<image><image>?", images=[struct(picture())]),
        row("<image>?", images=None),
        row("<image>" * 4, images=[struct(picture())] * 4),
        row(f"<image>{PAD}", images=[struct(picture())]),
    ]
    said = problems(write(tmp_path / "t.parquet", rows))
    expected = [
        *(text for _, text in BAD.values()),
        "prompt: images has 1 pictures, and the messages have 0 places for one. Write <image>",
        "prompt: images has 1 pictures, and the messages have 2 places for one",
        "prompt: images has 0 pictures, and the messages have 1 places for one",
        "images: has 4 pictures, more than 3, the most of a row",
        "prompt: message 0 spells <|image_pad|> 1 times",
    ]
    assert len(said) == len(expected)
    for number, (problem, text) in enumerate(zip(said, expected, strict=True)):
        assert problem.startswith(f"t.parquet:{number}: {text}"), problem


def test_odd_pictures_are_taken(tmp_path: Path) -> None:
    odd = [
        encoded(noise(1, 1)),
        encoded(noise(30, 30, mode="RGBA")),
        turned(noise(112, 56), 6),
        encoded(noise(9, 9), "WEBP"),
    ]
    prompts = load(write(tmp_path / "t.parquet", [row("<image>?", images=[struct(each)]) for each in odd]))
    assert [prompts[index].media[0].grid for index in range(4)] == [
        Grid(1, 4, 4),
        Grid(1, 4, 4),
        Grid(1, 8, 4),  # it stands upright
        Grid(1, 4, 4),
    ]


def test_the_same_fault_of_many_rows_is_said_once(tmp_path: Path) -> None:
    path = write(tmp_path / "t.parquet", [row("<image>?", images=[struct(b"hello")]) for _ in range(30)])
    with pytest.raises(DataError) as caught:
        load(path)
    assert str(caught.value).count("is no PNG") == 1 and "29 more with this fault" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("images", [struct(picture())]),
        ("images", ["a.png"]),
        ("image", struct(picture())),
        ("figure", [struct(picture())]),
    ],
)
def test_a_model_of_text_refuses_pictures_of_any_column(tmp_path: Path, name: str, value: Any) -> None:
    path = write(tmp_path / "t.parquet", [row("2 + 3?", **{name: None}), row("Find x.", **{name: value})])
    (problem,) = problems(path, reader=None)
    assert problem.startswith(f"{name}: ") and "1 would be read as text alone: t.parquet:1. Leave these rows" in problem
    other = PictureReader(Sizing(14), key="photo")
    problem, missing = problems(path, reader=other)
    assert problem.startswith(f"{name}: "), "nor does a model drop those of a column that it does not read"
    assert missing.startswith("no file has a column photo of pictures. Write data.image_key=COLUMN")


def test_a_model_of_text_refuses_parts_that_are_none(tmp_path: Path) -> None:
    parts = [{"type": "image"}, {"type": "text", "text": "Find x."}]
    texts = [row("2 + 3?"), row(prompt=[{"role": "user", "content": parts}])]
    path = tmp_path / "t.jsonl"
    path.write_text("".join(f"{json.dumps(each)}\n" for each in texts))
    (problem,) = problems(path, reader=None)
    assert problem.startswith("t.jsonl:1: prompt: message 0 has a part of type image, and text alone is read.")


def test_other_columns_are_no_pictures(tmp_path: Path) -> None:
    """The name of a container's image, and a struct of texts."""
    path = write(tmp_path / "t.parquet", [row(image="swebench/x:latest", file={"bytes": "12", "path": "a"})])
    assert load(path, reader=None)[0].columns["image"] == "swebench/x:latest"


def test_a_picture_that_changes_during_the_run_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(picture())
    prompts = load(write(tmp_path / "t.parquet", [row("<image>?", images=["a.png"])]))
    (tmp_path / "a.png").write_bytes(picture(seed=1))
    with pytest.raises(DataError, match=r"t.parquet:0: images: .*a.png is not what it was when the run began"):
        prompts.image_files(0)
    assert pa.types.is_list(prompts.table().schema.field("images").type)
