"""Files of pictures: every form that people publish, what is refused, and that a hostile file does nothing worse."""

from __future__ import annotations

import base64
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFile, ImageOps

from mcore_rl.data.media import images
from mcore_rl.data.media.images import decoded, image_size, read_image, values_of
from tests.support.pictures import animated, bomb, encoded, noise, picture, turned

PNG = picture()


def test_every_form_is_the_same_picture(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    path = tmp_path / "in" / "a picture.png"
    path.write_bytes(PNG)
    uri = base64.b64encode(PNG).decode()
    forms: list[Any] = [
        {"bytes": PNG, "path": None},
        {"bytes": PNG, "path": "elsewhere.png"},  # what datasets keeps of the name
        {"bytes": None, "path": "in/a picture.png"},
        {"path": str(path)},
        {"image": "in/a picture.png"},
        PNG,
        "in/a picture.png",
        str(path),
        path.as_uri(),  # file:///.../a%20picture.png
        f"data:image/png;base64,{uri}",
        f"DATA:;base64,{uri}",
        {"image": f"data:image/png;charset=x;base64,{uri}"},
    ]
    for form in forms:
        assert read_image(form, tmp_path).content == PNG, form
    assert {read_image(form, tmp_path).path for form in forms} == {"", str(path)}


def test_a_column_holds_a_list_one_or_none() -> None:
    struct = {"bytes": PNG, "path": None}
    assert values_of([struct, PNG]) == [struct, PNG]
    assert values_of(struct) == [struct]
    assert values_of(PNG) == [PNG] and values_of("a.png") == ["a.png"]
    assert values_of(None) == values_of([]) == []


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "is null, and no picture. Write {bytes, path}"),
        (7, "is int, and no picture"),
        ("", "is str, and no picture"),
        (b"", "has no bytes"),
        ({"bytes": None, "path": None}, "has neither bytes nor a path; it has bytes, path"),
        ({}, "it has no field"),
        ({"bytes": PNG, "min_pixels": 4}, "has min_pixels, which is not read of a single picture. Leave it out"),
        (
            "https://example.com/a.png",
            "is an address, and a run fetches no picture: https://example.com/a.png. Download",
        ),
        ({"path": "s3://bucket/a.png"}, "is an address"),
        ("data:image/png,abc", "is a data: URI without ;base64,"),
        ("data:image/png;base64,@@@", "is a data: URI whose base64 is broken"),
        ("none.png", "is no file, seen from the file of rows: none.png. Mend the path"),
        ("/none.png", "is no file: /none.png"),
        (".", "is no file"),
        ("x" * 5000, "xxx... Mend"),
        ("a\0b", "is no file"),
    ],
)
def test_what_is_no_picture_is_refused_with_a_remedy(tmp_path: Path, value: Any, said: str) -> None:
    with pytest.raises(ValueError, match=r"\. [A-Z]") as caught:
        read_image(value, tmp_path)
    assert said.replace("xxx... Mend", "xxx") in str(caught.value) and len(str(caught.value)) < 400


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "MAX_BYTES", len(PNG) - 1)
    (tmp_path / "a.png").write_bytes(PNG)
    for form in ("a.png", PNG, "data:;base64," + base64.b64encode(PNG).decode()):
        with pytest.raises(ValueError, match="is a file of more than"):
            read_image(form, tmp_path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"no picture at all", "is no PNG, JPEG or WEBP. Write it as one of them"),
        (encoded(noise(8, 8), "GIF"), "is no PNG, JPEG or WEBP"),
        (encoded(noise(8, 8), "BMP"), "is no PNG, JPEG or WEBP"),
        (encoded(noise(8, 8), "TIFF"), "is no PNG, JPEG or WEBP"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "is no PNG, JPEG or WEBP"),
        (bomb(10_000, 10_000), "has more than 64,000,000 pixels. Make it smaller"),
        (bomb(30_000, 30_000), "has more than 64,000,000 pixels"),
        (bomb(2**31 - 1, 2**31 - 1), "has more than 64,000,000 pixels"),
        (bomb(0, 4), "is no PNG, JPEG or WEBP"),
        (animated("PNG"), "is animated. Take one of its frames"),
        (animated("WEBP"), "is animated"),
    ],
    ids=range(11),
)
def test_what_a_header_tells_is_refused_before_anything_is_decoded(content: bytes, said: str) -> None:
    for read in (image_size, decoded):
        with pytest.raises(ValueError, match=r"\. [A-Z]") as caught:
            read(content)
        assert said in str(caught.value)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_the_size_is_read_of_the_header_alone(kind: str) -> None:
    whole = encoded(noise(123, 45), kind)
    half = whole[: len(whole) // 2]
    if kind != "WEBP":  # whose library wants the whole file
        assert image_size(half) == (123, 45)
    assert image_size(whole) == decoded(whole).size == (123, 45)
    with pytest.raises(ValueError, match="cannot be read"):
        decoded(half)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_nothing_is_decoded_for_the_size(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """PIL's own reader of a PNG's EXIF decodes the picture."""
    content = encoded(noise(30, 20), kind)
    loaded = list[object]()
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda image: loaded.append(image))
    assert image_size(content) == (30, 20) and loaded == []


def test_a_photograph_with_previews_of_itself_is_one_picture() -> None:
    photograph = encoded(noise(40, 30), "MPO", save_all=True, append_images=[noise(20, 15, 1)])
    assert image_size(photograph) == (40, 30)
    assert decoded(photograph).tobytes() == decoded(encoded(noise(40, 30), "JPEG")).tobytes()


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", [0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
def test_a_picture_stands_upright(kind: str, orientation: int) -> None:
    content = turned(noise(30, 20), orientation, kind)
    with Image.open(images.BytesIO(content)) as image:
        upright = ImageOps.exif_transpose(image).convert("RGB")
    assert decoded(content).tobytes() == upright.tobytes()
    assert image_size(content) == upright.size


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_what_is_transparent_is_on_white(kind: str) -> None:
    image = noise(20, 10, mode="RGBA")
    content = encoded(image, kind, **({"lossless": True, "exact": True} if kind == "WEBP" else {}))
    color, alpha = np.split(np.asarray(image).astype(float), [3], axis=2)
    by_hand = (color * alpha + 255 * (255 - alpha)) / 255
    assert np.abs(np.asarray(decoded(content)) - by_hand).max() <= 0.5 + 1e-9


def test_every_kind_of_pixel_becomes_rgb() -> None:
    grey = noise(20, 10, mode="L")
    expected = np.asarray(grey)[:, :, None].repeat(3, axis=2)
    assert (np.asarray(decoded(encoded(grey))) == expected).all()
    deep = Image.fromarray(np.asarray(grey).astype(np.uint16) * 257)  # 16 bits, which PIL would clip to white
    assert (np.asarray(decoded(encoded(deep))) == expected).all()
    palette = noise(20, 10).quantize(16)
    assert decoded(encoded(palette)).tobytes() == palette.convert("RGB").tobytes()
    clear = palette.copy()
    pixels = np.asarray(decoded(encoded(clear, transparency=int(np.asarray(palette)[0, 0]))))
    assert (pixels[0, 0] == 255).all()
    bit = noise(20, 10, mode="L").convert("1")
    assert decoded(encoded(bit)).tobytes() == bit.convert("RGB").tobytes()
    inks = noise(20, 10).convert("CMYK")
    assert decoded(encoded(inks, "JPEG")).mode == "RGB"
    assert decoded(encoded(noise(1, 1))).size == image_size(encoded(noise(1, 1))) == (1, 1)


def test_a_damaged_file_raises_nothing_else() -> None:
    draw = random.Random(0)
    files = [encoded(noise(16, 12), kind) for kind in ("PNG", "JPEG", "WEBP")] + [turned(noise(16, 12), 6)]
    refused = 0
    for content in files:
        for _ in range(150):
            damaged = bytearray(content)
            for _ in range(draw.randint(1, 8)):
                damaged[draw.randrange(len(damaged))] = draw.randrange(256)
            cut = bytes(damaged[: draw.randint(0, len(damaged))] if draw.random() < 0.3 else damaged)
            try:
                size = image_size(cut)
                assert decoded(cut).size == size
            except ValueError:  # nothing else is caught
                refused += 1
    assert refused > 100
