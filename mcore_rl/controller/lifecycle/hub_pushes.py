"""Uploads a run's exports to the Hub while the run goes on: the best to the branch ``best``, the last to the main one.

A thread uploads one after the other, each from links to its files, because the run replaces an export by a newer one.
An upload that fails is a warning, and is tried once more at the end; no step waits for one.  A resumed run repeats
uploads that were cut off.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

from mcore_rl.controller.lifecycle.run_checkpoints import Exported, exported
from mcore_rl.ground.errors import ConfigError
from mcore_rl.hub.push import MAIN, Target
from mcore_rl.tracking.model_card import model_card

BEST, FINAL = "best", "final"  # exports, in ``RUN/hf``
WORDS = {BEST: "the best", FINAL: "the last"}
SO_FAR = {BEST: "the best so far by validation", FINAL: "the last"}  # while the run goes on
AGAIN = "the newest is tried again at the end"
ENDED = "it is not tried again"
CARD = "README.md"
LOOK_S = 0.1  # between two looks whether all is uploaded
CLOSE_S = 2.0  # for the upload under way


@dataclass(frozen=True)
class _Staged:
    """An export to upload.  name: of the export.  links: to its files, as they were."""

    name: str
    links: Path
    version: Exported


class HubPushes:
    """The uploads of a run in ``directory`` to ``target``.  note, warn: tell the user."""

    def __init__(
        self, target: Target, directory: Path, *, note: Callable[[str], None], warn: Callable[[str], None]
    ) -> None:
        self._target = target
        self._exports = directory / "hf"
        self._note = note
        self._warn = warn
        self._asked = dict[str, Exported]()  # export -> the newest that was to be uploaded
        self._pushed = dict[str, tuple[Exported, str]]()  # export -> what is there, its address
        self._queue = Queue[_Staged | None]()  # None: no more follow
        self._closed = False
        self._after_failure = AGAIN
        for left in self._exports.glob(".*.push"):  # of a run that was killed
            shutil.rmtree(left, ignore_errors=True)
        self._thread = threading.Thread(target=self._work, name="pushes to the Hub", daemon=True)
        self._thread.start()

    async def add(self, *names: str) -> None:
        """Begins to upload the exports named, if they are there and are others than before."""
        for name in names:
            version = exported(self._exports / name)
            if version is None or self._asked.get(name) == version:
                continue
            self._asked[name] = version
            try:
                self._queue.put(await asyncio.to_thread(self._staged, name, version))
            except OSError as error:
                self._warn(f"step {version.step} is not pushed to {self._target.name}: {error}")

    async def conclude(self) -> None:
        """Waits for all uploads, and tries once more what failed."""
        if self._queue.unfinished_tasks:
            self._note(f"waiting for the uploads to {self._target.name}; Ctrl-C leaves without them")
        await self._settle()
        self._after_failure = ENDED
        await self.add(*self._forget_failed())
        await self._settle()

    def outcomes(self) -> list[str]:
        """A line for each export that was to be uploaded: its address, or how to upload it by hand."""
        return [self._outcome(name, version) for name, version in self._asked.items()]

    def close(self) -> None:
        """Ends the thread.  What waits is dropped, and what is under way after ``CLOSE_S`` loses its files."""
        self._closed = True
        self._queue.put(None)
        self._thread.join(CLOSE_S)
        for left in self._exports.glob(".*.push"):
            shutil.rmtree(left, ignore_errors=True)

    def _forget_failed(self) -> list[str]:
        """The exports that were asked for and are not there, which may now be asked for again."""
        failed = [name for name, version in self._asked.items() if self._address(name, version) is None]
        for name in failed:
            del self._asked[name]
        return failed

    async def _settle(self) -> None:
        while self._queue.unfinished_tasks:
            await asyncio.sleep(LOOK_S)

    def _address(self, name: str, version: Exported) -> str | None:
        pushed, address = self._pushed.get(name, (None, ""))
        return address if pushed == version else None

    def _outcome(self, name: str, version: Exported) -> str:
        said = f"pushed: step {version.step}, {WORDS[name]}"
        if (address := self._address(name, version)) is not None:
            return f"{said}: {address}"
        return f"not {said}; {self._target.by_hand(self._exports / name, _branch(name))}"

    def _staged(self, name: str, version: Exported) -> _Staged:
        links = self._exports / f".{name}-{version.step}-{version.written_ns}.push"
        shutil.rmtree(links, ignore_errors=True)
        shutil.copytree(self._exports / name, links, copy_function=_link)
        return _Staged(name, links, version)

    def _work(self) -> None:
        while (staged := self._queue.get()) is not None:
            try:
                if not self._closed and self._asked.get(staged.name) == staged.version:
                    self._push(staged)
            except ConfigError as error:
                (told,) = error.violations
                self._failed(staged, told.problem)
            except Exception as error:  # noqa: BLE001  whatever the client raises; the run goes on
                self._failed(staged, f"{type(error).__name__}; {self._after_failure}")
            finally:
                shutil.rmtree(staged.links, ignore_errors=True)
                self._queue.task_done()

    def _failed(self, staged: _Staged, problem: str) -> None:
        if not self._closed:
            self._warn(f"step {staged.version.step} is not pushed to {self._target.name}: {problem}")

    def _push(self, staged: _Staged) -> None:
        name = staged.name
        step = staged.version.step
        card = model_card(self._target.name, self._exports / name)
        (staged.links / CARD).write_text(card, encoding="utf-8")
        message = f"Step {step}, {SO_FAR[name]}"
        with _without_bars():
            address = self._target.push(staged.links, self._after_failure, _branch(name), message)
        self._pushed[name] = staged.version, address
        self._note(f"pushed: step {step}, {SO_FAR[name]}: {address}")


def _branch(name: str) -> str:
    return MAIN if name == FINAL else name


@contextmanager
def _without_bars() -> Iterator[None]:
    """Within: the client of the Hub draws no bars, which would be among the lines of the run."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    shown = not are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            enable_progress_bars()


def _link(source: str, target: str) -> None:
    """A hard link, or a copy where the file system has none."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
