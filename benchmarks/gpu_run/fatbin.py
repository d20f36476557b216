"""Device code inside shared libraries: the code of other GPUs is zeroed, so that a library of 300 MB compresses to 20.

The file keeps its size and its layout.  The driver loads the image that fits the device, and reads no other.  Where
none fits, it compiles PTX for an older device, which is kept while it is small.

A container of the section .nv_fatbin begins with u32 magic, u16 version, u16 bytes of this header, u64 bytes of its
entries.  An entry: u16 kind (1 PTX, 2 machine code), u16 version, u32 bytes of this header, u64 bytes of its code; u32
at 28: sm.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

MAGIC = 0xBA55ED50
SECTIONS = (b".nv_fatbin", b"__nv_relfatbin")
MACHINE_CODE = 2
SM_OFFSET = 28
SMALLEST_ENTRY = 32
PTX = 1
KEPT_PTX_BYTES = 64 << 10  # vLLM 0.32's larger ones are FlashAttention 2's and those of quantised products


@dataclass
class Zeroed:
    """What became of a library's device code.

    kept, zeroed: bytes.  containers: of device code.  emptied: those of them in which nothing is left.
    """

    kept: int = 0
    zeroed: int = 0
    containers: int = 0
    emptied: int = 0


@dataclass(frozen=True)
class Entry:
    """An image.  sm: that it is for.  begin, size: of its code."""

    kind: int
    sm: int
    begin: int
    size: int


def keep_device(path: Path, sm: int) -> Zeroed:
    """Zero, in the library ``path``, all device code but the machine code of ``sm`` (90: sm_90 and sm_90a).

    A container without any keeps the newest PTX that ``sm`` can take, if it is no longer than ``KEPT_PTX_BYTES``.
    """
    result = Zeroed()
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        for begin, end in device_sections(data):
            for container, container_end in containers(data, begin, end):
                images = list(entries(data, container, container_end))
                kept = [image for image in images if image.kind == MACHINE_CODE and image.sm == sm] or small_ptx(
                    images, sm
                )
                for image in images:
                    if image in kept:
                        result.kept += image.size
                    else:
                        data[image.begin : image.begin + image.size] = bytes(image.size)
                        result.zeroed += image.size
                result.containers += 1
                result.emptied += not kept
        data.flush()
    return result


def device_sections(data: mmap.mmap | bytes) -> Iterator[tuple[int, int]]:
    """(begin, end) of each section of device code in ``data``, a 64-bit little-endian ELF file."""
    if data[:6] != b"\x7fELF\x02\x01":
        return
    (table,) = struct.unpack_from("<Q", data, 0x28)
    entry_bytes, count, index_of_names = struct.unpack_from("<HHH", data, 0x3A)
    (names,) = struct.unpack_from("<Q", data, table + index_of_names * entry_bytes + 0x18)
    for index in range(count):
        header = table + index * entry_bytes
        (name,) = struct.unpack_from("<I", data, header)
        offset, size = struct.unpack_from("<QQ", data, header + 0x18)
        begin = names + name
        if data[begin : data.find(b"\0", begin)] in SECTIONS:
            yield offset, offset + size


def containers(data: mmap.mmap | bytes, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """(first entry, end) of each container between ``begin`` and ``end``; padding between them is passed over."""
    at = begin
    while at + 16 <= end:
        magic, _, header, size = struct.unpack_from("<IHHQ", data, at)
        if magic != MAGIC:
            at += 8
            continue
        yield at + header, at + header + size
        at += header + size


def entries(data: mmap.mmap | bytes, begin: int, end: int) -> Iterator[Entry]:
    """The images of the container whose first entry is at ``begin``."""
    at = begin
    while at + SMALLEST_ENTRY <= end:
        kind, _, header, size = struct.unpack_from("<HHIQ", data, at)
        if header == 0:
            return
        (sm,) = struct.unpack_from("<I", data, at + SM_OFFSET)
        yield Entry(kind, sm, at + header, size)
        at += header + size


def small_ptx(images: Sequence[Entry], sm: int) -> list[Entry]:
    """The newest PTX that a device ``sm`` can take, if it is small."""
    fitting = [image for image in images if image.kind == PTX and image.sm <= sm]
    newest = max(fitting, key=lambda image: image.sm, default=None)
    return [newest] if newest is not None and newest.size <= KEPT_PTX_BYTES else []
