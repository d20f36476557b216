"""Brings the pictures of rows to the engines that draw: into every prompt that begins with a row's tokens.

Whoever draws, one turn or an agent's many, asks a ``SampleSource`` with tokens; pictures stand at the row's places in
all of them, since what follows a prompt never moves it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from mcore_rl.data.prompts import PromptRow, PromptSet
from mcore_rl.rollout.protocol import Prompt, PromptPicture, Request, Sample, SampleSource, Sampling

KEPT_BYTES = 1 << 30  # of patches: 170 pictures of a megapixel


class PictureShelf:
    """Makes the patches of the pictures of ``sets`` by sha256; any thread may ask.

    Who asks for a picture that is being made waits for it.  The pictures that were asked for last are kept, as many as
    ``kept_bytes`` hold: other groups, an agent's next turn and the trainer need them again.
    """

    def __init__(self, sets: Sequence[PromptSet], kept_bytes: int = KEPT_BYTES) -> None:
        self._places: dict[str, tuple[PromptSet, int, int]] = {}
        for prompts in sets:
            for index, media in enumerate(prompts.media):
                for place, placed in enumerate(media):
                    self._places.setdefault(placed.image.sha256, (prompts, index, place))
        self._kept_bytes = kept_bytes
        self._lock = threading.Lock()  # of all below
        self._under_way: dict[str, Future[NDArray[np.uint8]]] = {}
        self._kept = OrderedDict[str, NDArray[np.uint8]]()  # the one that was asked for last is the last
        self._num_bytes = 0  # of ``_kept``

    def patches(self, sha256: str) -> NDArray[np.uint8]:
        """[patches, width] uint8.  DataError: the file is not what it was when the run began, or broken."""
        with self._lock:
            if (kept := self._kept.get(sha256)) is not None:
                self._kept.move_to_end(sha256)
                return kept
            waited_for = self._under_way.get(sha256)
            if waited_for is None:
                making = self._under_way[sha256] = Future()
        return self._made(sha256, making) if waited_for is None else waited_for.result()

    def _made(self, sha256: str, making: Future[NDArray[np.uint8]]) -> NDArray[np.uint8]:
        """The patches, which others wait for by ``making``."""
        try:
            prompts, index, place = self._places[sha256]
            made = prompts.patches(index, place)
        except BaseException as error:
            with self._lock:
                del self._under_way[sha256]
            making.set_exception(error)
            raise
        with self._lock:
            del self._under_way[sha256]
            self._kept[sha256] = made
            self._num_bytes += made.nbytes
            while self._num_bytes > self._kept_bytes:
                _, oldest = self._kept.popitem(last=False)
                self._num_bytes -= oldest.nbytes
        making.set_result(made)
        return made

    def of_row(self, row: PromptRow) -> tuple[PromptPicture, ...]:
        """The pictures of a prompt that begins with ``row``."""
        return tuple(PromptPicture(placed, partial(self.patches, placed.image.sha256)) for placed in row.media)


class SeeingSource:
    """Draws from ``source``, and shows it the pictures of ``rows``, which are by the ids of the prompts drawn from.

    A prompt is of the row that its conversation opened with.  One that does not begin with the row's tokens has none.
    """

    def __init__(self, source: SampleSource, rows: Mapping[str, PromptRow], shelf: PictureShelf) -> None:
        self._source = source
        self._rows = rows
        self._shelf = shelf
        self._pictures: dict[str, tuple[PromptPicture, ...]] = {}

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> AsyncIterator[Sample]:
        """See ``SampleSource.generate``."""
        shown: dict[int, Prompt] = {}  # by identity: samples of a prompt go on sharing it
        for request in requests:
            if id(request.prompt) not in shown:
                shown[id(request.prompt)] = self._shown(request.prompt)
        return self._source.generate(
            [replace(request, prompt=shown[id(request.prompt)]) for request in requests], sampling
        )

    def _shown(self, prompt: Prompt) -> Prompt:
        name = prompt.opening or prompt.id
        row = self._rows.get(name)
        if row is None or not row.media or prompt.tokens[: len(row.tokens)] != row.tokens:
            return prompt
        if name not in self._pictures:
            self._pictures[name] = self._shelf.of_row(row)
        return replace(prompt, pictures=self._pictures[name])
