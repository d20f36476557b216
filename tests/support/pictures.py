"""Pictures as files, made with Pillow: every format and kind that rows may hold, right and hostile."""

from __future__ import annotations

import struct
import zlib
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image


def noise(width: int, height: int, seed: int = 0, mode: str = "RGB") -> Image.Image:
    """A picture of random pixels."""
    channels = {"RGB": 3, "RGBA": 4, "L": 1, "LA": 2}[mode]
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)
    return Image.fromarray(pixels[:, :, 0] if channels == 1 else pixels)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """The file of a picture."""
    file = BytesIO()
    image.save(file, format=kind, **options)
    return file.getvalue()


def picture(width: int = 56, height: int = 56, seed: int = 0) -> bytes:
    """A small PNG."""
    return encoded(noise(width, height, seed))


def turned(image: Image.Image, orientation: int, kind: str = "JPEG") -> bytes:
    """A file whose EXIF says ``orientation``."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(image, kind, exif=exif.tobytes())


def animated(kind: str = "PNG") -> bytes:
    """A file of two frames."""
    return encoded(noise(32, 32), kind, save_all=True, append_images=[noise(32, 32, 1)])


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes whose header says that it is ``width`` x ``height``."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = chunk(b"IDAT", zlib.compress(bytes(1000)))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + pixels + chunk(b"IEND", b"")
