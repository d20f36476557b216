"""Unpacks a kit, all archives at once, with nothing but Python's own lzma."""

from __future__ import annotations

import tarfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path


def unpack(kit: Path, site: Path) -> None:
    """Unpack all archives of ``kit`` beside one another into ``site``, which is there only when it is whole.

    FileNotFoundError: ``kit`` has no archive.
    """
    archives = sorted(kit.glob("*.tar.xz"))
    if not archives:
        raise FileNotFoundError(f"{kit} has no *.tar.xz: make gpu-kit builds it")
    new = site.with_name(site.name + ".new")
    new.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor() as pool:
        list(pool.map(partial(_unpack_one, to=new), archives))
    new.rename(site)


def _unpack_one(archive: Path, to: Path) -> None:
    with tarfile.open(archive, "r:xz") as file:
        file.extractall(to, filter="data")
