"""The answers that a judge gave, in a file, so that a run that goes on asks for none of them again.

A line has the hash of the request, the judge's text and its tokens.  In memory are places in the file alone.

Invariant: a line that a kill or a full disk cut short is skipped, and never takes the next one with it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import msgspec

from mcore_rl.ground.secrets import redacted

Tokens = Annotated[int, msgspec.Meta(ge=0, le=2**40)]

logger = logging.getLogger(__name__)


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    """What a judge answered.

    truncated: whether it was cut off at ``max_tokens``.
    prompt_tokens, completion_tokens: as its server counted them, 0 where it did not.
    """

    text: str
    truncated: bool = False
    prompt_tokens: Tokens = 0
    completion_tokens: Tokens = 0


class _Line(Judgement, frozen=True, kw_only=True):
    """A line of the file."""

    key: str


class Judgements:
    """Open judgements.  path: their file; None: one that is gone in the end.  OSError: it cannot be opened.

    prompt_tokens, completion_tokens: of all that are there, also from before.
    """

    def __init__(self, path: Path | None) -> None:
        self._stack = ExitStack()
        if path is None:
            path = Path(self._stack.enter_context(tempfile.TemporaryDirectory())) / "judgements"
        self._writer = self._stack.enter_context(path.open("ab", buffering=0))
        self._reader = self._stack.enter_context(path.open("rb"))
        self._places: dict[str, int] = {}
        self._is_torn = False
        self.prompt_tokens = self.completion_tokens = place = 0
        for line in self._reader:
            if (read := _read(line)) is not None:
                self._places[read.key] = place
                self._count(read)
            self._is_torn = not line.endswith(b"\n")
            place += len(line)

    def get(self, key: str) -> Judgement | None:
        """The answer to the request with this ``key_of``; None: there is none."""
        if key not in self._places:
            return None
        self._reader.seek(self._places[key])
        return _read(self._reader.readline())

    def add(self, key: str, judgement: Judgement) -> None:
        """Notes an answer.  A disk that is full costs the note alone, with a warning."""
        self._count(judgement)
        said = {"key": key, **msgspec.structs.asdict(judgement), "text": redacted(judgement.text)}
        line = json.dumps(said).encode() + b"\n"
        start = b"\n" if self._is_torn else b""
        self._is_torn = True
        try:
            if self._writer.write(start + line) != len(start + line):
                raise OSError("the disk has no room for it")
        except OSError as error:
            logger.warning("a judgement is not kept: %s", error)
        else:
            self._is_torn = False
            self._places[key] = os.fstat(self._writer.fileno()).st_size - len(line)

    def _count(self, judgement: Judgement) -> None:
        self.prompt_tokens += judgement.prompt_tokens
        self.completion_tokens += judgement.completion_tokens

    def close(self) -> None:
        """Closes the file."""
        self._stack.close()


def key_of(request: Mapping[str, Any]) -> str:
    """The hash of all that is asked: model, messages and settings."""
    return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()


def _read(line: bytes) -> _Line | None:
    """A line of the file; None if it is not whole."""
    try:
        return msgspec.json.decode(line, type=_Line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
