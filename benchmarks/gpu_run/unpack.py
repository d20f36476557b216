"""Unpacks a kit, all archives at once, with nothing but Python's own lzma."""

from __future__ import annotations

import tarfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

ARCHIVE = ".tar.xz"


class KitError(Exception):
    """Why there is no kit, in one message."""


def unpack(kit: Path, site: Path) -> None:
    """Unpack all archives of ``kit`` beside one another into ``site``, which is there only when it is whole.

    KitError: ``kit`` has no archive, or ``site`` is there.
    """
    archives = sorted(kit.glob(f"*{ARCHIVE}"))
    if not archives:
        raise KitError(f"{kit} has no *{ARCHIVE}: make gpu-kit builds it")
    if site.exists():
        raise KitError(f"{site} is there already: remove it, or name another folder")
    new = site.with_name(site.name + ".new")
    new.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor() as pool:
        list(pool.map(partial(_unpack_one, to=new), archives))
    new.rename(site)


def _unpack_one(archive: Path, to: Path) -> None:
    with tarfile.open(archive, "r:xz") as file:
        file.extractall(to, filter="data")
