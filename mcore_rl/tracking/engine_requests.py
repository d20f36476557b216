"""What somebody asks of a run about its engines, and what the run answers: files in ``RUN/engines``.

Nothing listens for it on a port.  A request is a file of its own, which appears complete; the controller looks for some
now and then, and answers in a file beside it, which is replaced while the work goes on.

A file is believed if it is a small regular file of this user, holds what ``EngineRequest`` says and nothing else, and
names the token of the run that goes on: what was asked of an earlier one is not done.
"""

from __future__ import annotations

import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from mcore_rl.ground.errors import ConfigError, RunDirectoryError, Violation
from mcore_rl.tracking.atomic import replaced
from mcore_rl.tracking.run_owner import OWNER, Owner, read_owner

T = TypeVar("T", bound=msgspec.Struct)
FOLDER = "engines"
ASKS = "ask-"
ANSWERS = "answer-"
MOST_BYTES = 65536
LOOK_S = 0.5  # between two looks at an answer
SILENT_S = 60.0  # how long a run may take to begin to answer: it may be starting, or busy


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """owner: the token of the run that is asked.  add: engines that join.  remove: names of those that leave.

    remove_last: how many leave, those that joined last.  None of them: the engines are listed.
    """

    owner: str
    add: int = 0
    remove: tuple[str, ...] = ()
    remove_last: int = 0


class EngineRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An engine.  version: of its weights; None: it has none.  requests, tokens: unfinished, the tokens as expected."""

    name: str
    state: str
    version: int | None
    requests: int
    tokens: int
    nodes: tuple[str, ...]


class EngineAnswer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What became of a request.  lines: for the screen, so far.  engines: all, when the answer was written."""

    state: Literal["working", "done", "refused"]
    lines: tuple[str, ...] = ()
    engines: tuple[EngineRow, ...] = ()


def ask(run_dir: Path, add: int = 0, remove: tuple[str, ...] = (), remove_last: int = 0) -> Iterator[EngineAnswer]:
    """Asks the run in ``run_dir``; yields its answer whenever it changes, until it is done.

    Raises ConfigError: there is no run of this user's that goes on.  RunDirectoryError: it ended or is silent.
    """
    owner = _running(run_dir)
    folder = run_dir / FOLDER
    name = f"{secrets.token_hex(8)}.json"
    asked = folder / f"{ASKS}{name}"
    answered = folder / f"{ANSWERS}{name}"
    with replaced(asked) as path:
        path.write_bytes(
            msgspec.json.encode(EngineRequest(owner=owner.token, add=add, remove=remove, remove_last=remove_last))
        )
    last: EngineAnswer | None = None
    is_done = False
    until = time.monotonic() + SILENT_S
    try:
        while not is_done:
            goes_on = (now := read_owner(run_dir / OWNER)) is not None and now.token == owner.token
            answer = _read(answered, EngineAnswer)
            if answer is not None and answer != last:
                last = answer
                is_done = answer.state != "working"
                yield answer
            elif not goes_on or owner.lives(Owner()) is False:
                raise RunDirectoryError(f"{run_dir}: the run ended before it had done what it was asked")
            elif last is None and time.monotonic() > until:
                why = "It may be starting, be one of mcore-rl sft, or of an earlier version"
                raise RunDirectoryError(f"{run_dir}: the run has not answered for {SILENT_S:.0f} s. {why}")
            else:
                time.sleep(LOOK_S)
    finally:
        if last is None or is_done:  # else the run is at it, and answers nobody
            asked.unlink(missing_ok=True)
            answered.unlink(missing_ok=True)


def _running(run_dir: Path) -> Owner:
    """The owner of the run that goes on in ``run_dir``.  Raises ConfigError if there is none, or another user's."""
    key = "run_dir"
    owner = read_owner(run_dir / OWNER)
    if run_dir.stat().st_uid != os.geteuid():
        raise ConfigError([Violation(key, run_dir, "is another user's", "Ask as the user who started the run")])
    if owner is None or owner.lives(Owner()) is False:
        remedy = "Name the trainer.default_local_dir of one; a start takes its engines from rollout.dp"
        raise ConfigError([Violation(key, run_dir, "no run goes on there", remedy)])
    return owner


class EngineMailbox:
    """The controller's side: requests to the run in ``run_dir``.  Answers of an earlier start are removed."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._folder = run_dir / FOLDER
        self._seen = set[str]()
        for path in self._folder.glob(f"{ANSWERS}*"):
            with suppress(OSError):
                path.unlink()

    def requests(self) -> Iterator[tuple[str, EngineRequest | str]]:
        """New ones, each once, by the name under which they are answered; or why one is not believed."""
        owner = read_owner(self._run_dir / OWNER)
        for path in sorted(self._folder.glob(f"{ASKS}*.json")):
            name = path.name.removeprefix(ASKS)
            if name in self._seen:  # it cannot be removed
                continue
            self._seen.add(name)
            try:
                request = _read(path, EngineRequest)
            except RunDirectoryError as error:
                yield name, str(error)
            else:
                if request is not None:
                    theirs = owner is not None and request.owner == owner.token
                    yield name, request if theirs else f"{path}: was asked of a run that has ended"
            with suppress(OSError):
                path.unlink()

    def answer(self, name: str, answer: EngineAnswer) -> None:
        """Answers the request ``name``; a later answer replaces it."""
        with suppress(OSError), replaced(self._folder / f"{ANSWERS}{name}") as path:
            path.write_bytes(msgspec.json.encode(answer))


def _read(path: Path, kind: type[T]) -> T | None:
    """What the file holds; None if there is none.  Raises RunDirectoryError if it is not to be believed."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunDirectoryError(f"{path}: is not read: {error.strerror}") from error
    with open(descriptor, "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise RunDirectoryError(f"{path}: is not read: it is no regular file of this user's")
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise RunDirectoryError(f"{path}: is not read: it has more than {MOST_BYTES} bytes")
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise RunDirectoryError(f"{path}: is not read: {error}") from error
