"""Pictures of a report: thumbnails in ``media/`` of the run directory, which its page holds as ``data:`` addresses."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mcore_rl.json_text import read_json

SIDE = 256  # pixels of the longer side
MAX_SHOWN = 64  # of a report, different ones
MAX_BYTES = 64 << 10  # of a file
_SHA256 = re.compile(r"[0-9a-f]{64}")


def thumbnail_file(run_dir: Path, sha256: str) -> Path:
    """The file of the thumbnail of a picture."""
    return run_dir / "media" / f"{sha256}.webp"


class ShownPictures:
    """The pictures of a page by number: each is on it once, and at most ``MAX_SHOWN`` with a thumbnail."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._numbers = dict[str, int]()
        self._names: list[str] = []

    def numbers_of(self, images: object) -> list[int]:
        """The numbers of a sample's pictures.

        images: the value of its column ``images``; [] where that is none, as of a run of text.
        """
        try:
            read: Any = read_json(images) if isinstance(images, str) else images
            pictures = [(str(each["sha256"]), str(each["source"])) for each in read or ()]
        except (ValueError, TypeError, LookupError):
            return []
        for sha256, source in pictures:
            if sha256 not in self._numbers:
                self._numbers[sha256] = len(self._names)
                self._names.append(source.rpartition("/")[2])
        return [self._numbers[sha256] for sha256, _ in pictures]

    def plain(self, order: Sequence[int]) -> list[list[Any]]:
        """[name, address] of each picture as the page's script reads it; the address of one that is not shown is "".

        order: numbers of those to show, the first ``MAX_SHOWN`` that have a thumbnail.
        """
        hashes = list(self._numbers)
        addresses = dict[int, str]()
        for number in dict.fromkeys(order):
            if len(addresses) == MAX_SHOWN:
                break
            if address := _address(self._run_dir, hashes[number]):
                addresses[number] = address
        return [[name, addresses.get(number, "")] for number, name in enumerate(self._names)]


def _address(run_dir: Path, sha256: str) -> str:
    """The ``data:`` address of a thumbnail; "" if there is none."""
    if not _SHA256.fullmatch(sha256):
        return ""
    try:
        with thumbnail_file(run_dir, sha256).open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError:
        return ""
    is_webp = content[:4] == b"RIFF" and content[8:12] == b"WEBP"
    return f"data:image/webp;base64,{b64encode(content).decode()}" if is_webp and len(content) <= MAX_BYTES else ""
