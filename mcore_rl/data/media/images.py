"""The files of pictures: from the values that people publish in a column of pictures, to the size and the pixels.

A picture is PNG, JPEG or WEBP.  Rows come from strangers: what is said of a picture is read without decoding it, and
whatever is wrong with one is a ValueError that says it with the remedy, and never another exception.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
from PIL import Image, UnidentifiedImageError

FORMATS = ("PNG", "JPEG", "WEBP")
MAX_BYTES = 64 << 20  # of a file
MAX_DECODED_PIXELS = 64_000_000  # 192 MB as RGB; no photograph for a model of a million pixels has more
ORIENTATION = 0x0112  # the tag of EXIF
# What brings a picture with each orientation upright (EXIF 2.32, table 6), as PIL names it.
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
ON_ITS_SIDE = (5, 6, 7, 8)  # orientations of files whose height is the picture's width
FORMS = "Write {bytes, path}, bytes, a path, or a data: URI"
# Fields of a picture with which qwen_vl_utils gives it a size of its own.
OWN_SIZE = ("min_pixels", "max_pixels", "resized_height", "resized_width")
MAX_SHOWN = 80  # characters of a value
# PIL's, of bombs, which are refused here, and of what files say of themselves.  Threads decode, and would leave
# ``catch_warnings``, a filter for the time of a call, behind.
warnings.filterwarnings("ignore", module=r"PIL\.")
_ADDRESS = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+://")
_DATA_URI = re.compile(r"data:[^,]{0,200}?;base64,", re.IGNORECASE)


@dataclass(frozen=True)
class ImageFile:
    """A picture's file, as its row holds or names it.

    content: its bytes.  path: where it was read, as an absolute path; "": the row holds it.
    """

    content: bytes
    path: str = ""

    @property
    def sha256(self) -> str:
        """The digest of its bytes, in hex."""
        return hashlib.sha256(self.content).hexdigest()


def values_of(column: Any) -> list[Any]:
    """The pictures of a row, by its value in the column: a list of them, one alone, or none."""
    if column is None:
        return []
    return list(column) if isinstance(column, list | tuple) else [column]


def read_image(value: Any, folder: Path) -> ImageFile:
    """The file of one picture.

    value: {bytes, path} as ``datasets`` writes it, of which bytes count if there are some; {image}, verl's; bytes; a
    path or a file:// address; a data: URI.  folder: of the file of rows, to which relative paths are relative.

    ValueError, with the remedy: it is none of these, has to be fetched, is missing or too large.
    """
    if isinstance(value, dict):
        value = _member(value)
    if isinstance(value, bytes | bytearray | memoryview):
        content = bytes(value)
        if not content:
            raise ValueError(f"has no bytes. {FORMS}")
        _check_length(len(content))
        return ImageFile(content)
    if not isinstance(value, str) or not value:
        raise ValueError(f"is {'null' if value is None else type(value).__name__}, and no picture. {FORMS}")
    if value[:5].lower() == "data:":
        return ImageFile(_from_data_uri(value))
    return _from_path(value, folder)


def image_size(content: bytes) -> tuple[int, int]:
    """(width, height) of the picture in a file, upright, read from its header.  ValueError: see ``decoded``."""
    with _opened(content) as image:
        width, height = image.size
        return (height, width) if _orientation(image) in ON_ITS_SIDE else (width, height)


def decoded(content: bytes) -> Image.Image:
    """The picture in a file as RGB: upright, and on white where it is transparent.

    ValueError, with the remedy: it is no PNG, JPEG or WEBP, is animated, damaged or of too many pixels.
    """
    with _opened(content) as image:
        orientation = _orientation(image)  # before the pixels: a PNG may say another one behind them
        image.load()
        picture = _on_white(image)
    return picture.transpose(UPRIGHT[orientation]) if orientation in UPRIGHT else picture


@contextmanager
def _opened(content: bytes) -> Iterator[Image.Image]:
    """The picture, of which the header is read; what goes wrong with it, here or in the body, is a ValueError."""
    try:
        with Image.open(BytesIO(content), formats=FORMATS) as image:
            width, height = image.size
            if width * height > MAX_DECODED_PIXELS:
                raise Image.DecompressionBombError
            # A JPEG with several frames is a photograph with previews of itself.
            if image.format in ("PNG", "WEBP") and hasattr(image, "is_animated") and image.is_animated:
                raise _RefusedError("is animated. Take one of its frames, or leave the row out")
            yield image
    except _RefusedError:
        raise
    except Image.DecompressionBombError as error:
        limit = f"has more than {MAX_DECODED_PIXELS:,} pixels"
        raise ValueError(f"{limit}. Make it smaller, or leave the row out") from error
    except UnidentifiedImageError as error:
        raise ValueError(f"is no {', '.join(FORMATS[:-1])} or {FORMATS[-1]}. Write it as one of them") from error
    except Exception as error:
        said = f"{type(error).__name__}: {error}"[:MAX_SHOWN]
        raise ValueError(f"cannot be read ({said}). Write the file again, or leave the row out") from error


class _RefusedError(ValueError):
    """A picture that can be read and is refused; the message is for the user."""


def _orientation(image: Image.Image) -> int:
    """EXIF's orientation, by what stands before the pixels; 1 where none, or none that exists, is said."""
    try:
        exif = Image.Image.getexif(image)  # a PNG's own method decodes the picture
    except Exception:  # noqa: BLE001 - damaged EXIF says nothing, and the picture is there all the same
        return 1
    orientation = exif.get(ORIENTATION)
    return orientation if orientation in UPRIGHT else 1


def _on_white(image: Image.Image) -> Image.Image:
    """``image`` as RGB."""
    if image.mode.startswith("I"):  # 16 bits of grey, which PIL would clip
        return Image.fromarray((np.asarray(image).astype(np.int64) // 256).clip(0, 255).astype(np.uint8)).convert("RGB")
    if not image.has_transparency_data:
        return image.convert("RGB")
    rgba = image.convert("RGBA")
    white = Image.new("RGB", rgba.size, "white")
    white.paste(rgba, mask=rgba.getchannel("A"))
    return white


def _member(value: dict[str, Any]) -> Any:
    """The bytes or the path of a picture that is written with fields."""
    sized = [key for key in OWN_SIZE if value.get(key) is not None]
    if sized:
        raise ValueError(f"has {', '.join(sized)}, which is not read of a single picture. Leave it out")
    for key in ("bytes", "image", "path"):
        if value.get(key) is not None:
            return value[key]
    raise ValueError(f"has neither bytes nor a path; it has {', '.join(map(str, value)) or 'no field'}. {FORMS}")


def _from_data_uri(uri: str) -> bytes:
    head = _DATA_URI.match(uri)
    if head is None:
        raise ValueError("is a data: URI without ;base64,. Write data:image/png;base64,...")
    _check_length((len(uri) - head.end()) * 3 // 4)
    try:
        return base64.b64decode(uri[head.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError("is a data: URI whose base64 is broken. Encode the file again") from error


def _from_path(value: str, folder: Path) -> ImageFile:
    shown = value if len(value) <= MAX_SHOWN else f"{value[:MAX_SHOWN]}..."
    if value.startswith("file://"):
        value = unquote(urlsplit(value).path)
    elif _ADDRESS.match(value):
        remedy = "Download the pictures, and write their paths or bytes"
        raise ValueError(f"is an address, and a run fetches no picture: {shown}. {remedy}")
    path = folder / Path(value)
    try:
        if not path.is_file():
            where = "" if Path(value).is_absolute() else ", seen from the file of rows"
            raise ValueError(f"is no file{where}: {shown}. Mend the path, or leave the row out")
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        _check_length(len(content))
        return ImageFile(content, str(path.absolute()))
    except OSError as error:
        raise ValueError(f"cannot be read: {shown}: {error.strerror}. Mend that, or leave the row out") from error


def _check_length(length: int) -> None:
    if length > MAX_BYTES:
        raise ValueError(f"is a file of more than {MAX_BYTES >> 20} MiB. Make it smaller, or leave the row out")
