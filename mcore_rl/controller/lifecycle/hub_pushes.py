"""Uploads a run's exports to the Hub while the run goes on: the best to the branch ``best``, the last to the main one.

A thread uploads one after the other, each from links to its files, because the run replaces an export by a newer one.
An upload that fails is a warning, and is tried once more at the end; no step waits for one.  What was under way when a
run is stopped is made again by the run that goes on.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

from mcore_rl.errors import ConfigError
from mcore_rl.hub.push import MAIN, Target
from mcore_rl.tracking.model_card import model_card

BEST, FINAL = "best", "final"  # exports, in ``RUN/hf``
WORDS = {BEST: "the best so far by validation", FINAL: "the last"}
CARD = "README.md"
LOOK_S = 0.1  # between two looks whether all is uploaded


@dataclass(frozen=True)
class _Staged:
    """An export to upload.  export: the run's.  links: to its files, as they were."""

    export: Path
    links: Path
    step: int


class HubPushes:
    """The uploads of a run in ``directory`` to ``target``.  note, warn: tell the user."""

    def __init__(
        self, target: Target, directory: Path, *, note: Callable[[str], None], warn: Callable[[str], None]
    ) -> None:
        self._target, self._exports = target, directory / "hf"
        self._note, self._warn = note, warn
        self._asked = dict[str, int]()  # export -> the newest step that was to be uploaded
        self._pushed = dict[str, tuple[int, str]]()  # export -> the step that is there, its address
        self._queue = Queue[_Staged | None]()  # None: no more follow
        for left in self._exports.glob(".*.push"):  # of a run that was killed
            shutil.rmtree(left, ignore_errors=True)
        threading.Thread(target=self._work, name="pushes to the Hub", daemon=True).start()

    async def add(self, steps: Mapping[str, int]) -> None:
        """Begins to upload the exports named, if they are there and are of another step than before.

        steps: export -> the step that its weights are of; 0 and less: there is none.
        """
        for name, step in steps.items():
            if step <= 0 or self._asked.get(name) == step or not (self._exports / name).is_dir():
                continue
            try:
                self._queue.put(await asyncio.to_thread(self._staged, name, step))
            except OSError as error:
                self._warn(f"step {step} is not pushed to {self._target.name}: {error}")
            self._asked[name] = step

    async def conclude(self) -> list[str]:
        """Waits for all uploads, tries once more what failed, and returns a line for each export."""
        if self._queue.unfinished_tasks:
            self._note(f"waiting for the uploads to {self._target.name}; Ctrl-C leaves without them")
        await self._settle()
        await self.add(self._forget_failed())
        await self._settle()
        self._queue.put(None)
        return [self._outcome(name, step) for name, step in self._asked.items()]

    def _forget_failed(self) -> dict[str, int]:
        """The exports that were asked for and are not there, which may now be asked for again."""
        failed = {name: step for name, step in self._asked.items() if self._pushed.get(name, (0, ""))[0] != step}
        for name in failed:
            del self._asked[name]
        return failed

    async def _settle(self) -> None:
        while self._queue.unfinished_tasks:
            await asyncio.sleep(LOOK_S)

    def _outcome(self, name: str, step: int) -> str:
        pushed, address = self._pushed.get(name, (0, ""))
        if pushed == step:
            return f"pushed: step {step}, {WORDS[name].partition(' so far')[0]}: {address}"
        branch = "" if name == FINAL else f" --revision {name}"
        by_hand = f"hf upload {self._target.name} {self._exports / name}{branch}"
        return f"not pushed: step {step}, {WORDS[name].partition(' so far')[0]}; upload it with: {by_hand}"

    def _staged(self, name: str, step: int) -> _Staged:
        links = self._exports / f".{name}-{step}.push"
        shutil.rmtree(links, ignore_errors=True)
        shutil.copytree(self._exports / name, links, copy_function=_link)
        return _Staged(self._exports / name, links, step)

    def _work(self) -> None:
        while (staged := self._queue.get()) is not None:
            try:
                if self._asked.get(staged.export.name, staged.step) <= staged.step:
                    self._push(staged)
            except ConfigError as error:
                (told,) = error.violations
                self._warn(f"step {staged.step} is not pushed to {told.value}: {told.problem}")
            except Exception as error:  # noqa: BLE001  whatever the client raises; the run goes on
                self._warn(f"step {staged.step} is not pushed to {self._target.name}: {type(error).__name__}")
            finally:
                shutil.rmtree(staged.links, ignore_errors=True)
                self._queue.task_done()

    def _push(self, staged: _Staged) -> None:
        name = staged.export.name
        card = model_card(self._target.name, staged.export)
        (staged.links / CARD).write_text(card, encoding="utf-8")
        message = f"Step {staged.step}, {WORDS[name]}"
        with _without_bars():
            address = self._target.push(staged.links, MAIN if name == FINAL else name, message)
        self._pushed[name] = staged.step, address
        self._note(f"pushed: step {staged.step}, {WORDS[name]}: {address}")


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
