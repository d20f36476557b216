"""The patches of pictures under way, each once in a file of the engine's scratch folder, which its workers read.

vLLM copies a picture's pixels with every sample of its prompt, to its core and from there to each worker, where they
stay until the sample is finished.  Here a sample brings the picture's name; the model reads the file when it encodes
the picture (``picture_models.py``).  An engine on several nodes has no such folder, and sends patches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mcore_rl.rollout.protocol import PromptPicture

NAME_BYTES = 32  # of a sha256; no patch is so small


def name_of(sha256: str, height: int, width: int) -> str:
    """The name of a picture and its size in patches, by which its features are known, too."""
    return f"{sha256}:{height}x{width}"


class PatchFiles:
    """The files of the pictures of all open calls."""

    def __init__(self, folder: Path) -> None:
        """folder: is made."""
        self._folder = folder
        self._folder.mkdir(exist_ok=True)
        self._calls = Counter[str]()  # name -> the calls that have the picture
        self._left = set[str]()  # of calls that were given up: a worker may be at them still

    def open(self, pictures: Sequence[PromptPicture]) -> list[str]:
        """Writes the files that are not there; returns the names, for ``close``."""
        names = []
        for picture in pictures:
            grid = picture.placed.grid
            name = name_of(picture.placed.image.sha256, grid.h, grid.w)
            if not self._calls[name] and name not in self._left:
                picture.read().tofile(_path(self._folder, name))
            self._calls[name] += 1
            names.append(name)
        return names

    def close(self, names: Sequence[str], *, is_finished: bool) -> None:
        """Lets the pictures of a call go.  is_finished: every sample ended by itself, so that no worker needs them."""
        for name in names:
            self._calls[name] -= 1
            if not is_finished:
                self._left.add(name)
            if self._calls[name]:
                continue
            del self._calls[name]
            if name not in self._left:
                _path(self._folder, name).unlink()

    def clear(self) -> None:
        """Removes the files of calls that were given up, when the engine's workers stand still."""
        for name in self._left:
            if not self._calls[name]:
                _path(self._folder, name).unlink()
        self._left.clear()


def named(picture: PromptPicture) -> Tensor:
    """[1, ``NAME_BYTES``] uint8: the picture's name in the place of its patches."""
    return torch.frombuffer(bytearray.fromhex(picture.placed.image.sha256), dtype=torch.uint8)[None]


def patches_of_names(folder: Path, names: Tensor, grids: Tensor) -> Tensor:
    """The patches of pictures, one behind another: [patches, width] uint8.

    names: [pictures, ``NAME_BYTES``].  grids: [pictures, 3], in patches.
    """
    patches = []
    for name, (frames, height, width) in zip(names.cpu(), grids.tolist(), strict=True):
        read = np.fromfile(_path(folder, name_of(bytes(name.tolist()).hex(), height, width)), dtype=np.uint8)
        patches.append(torch.from_numpy(read).view(frames * height * width, -1))
    return torch.cat(patches)


def _path(folder: Path, name: str) -> Path:
    return folder / name.replace(":", "-")
