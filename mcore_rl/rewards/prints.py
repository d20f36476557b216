"""Shows what a user's reward function prints: its beginning, and nothing that commands a terminal."""

from __future__ import annotations

import sys
import threading
from typing import IO

from mcore_rl.tracking.messages import harmless

MAX_SHOWN = 1 << 20  # bytes of all processes of a run
PIECE = 1 << 16


class Prints:
    """Relays what grading processes print to the standard error of this one, up to ``MAX_SHOWN`` in all."""

    def __init__(self) -> None:
        self._left, self._told, self._lock = MAX_SHOWN, False, threading.Lock()

    def relay(self, stream: IO[bytes]) -> None:
        """Reads ``stream`` to its end in a thread: a process never waits for a reader."""
        threading.Thread(target=self._read, args=(stream,), name="prints", daemon=True).start()

    def _read(self, stream: IO[bytes]) -> None:
        with stream:
            while piece := stream.read(PIECE):
                self._show(piece)

    def _show(self, piece: bytes) -> None:
        with self._lock:
            shown = piece[: self._left]
            self._left -= len(shown)
            tells = len(shown) < len(piece) and not self._told
            self._told = self._told or tells
        if shown:
            sys.stderr.write(harmless(shown.decode(errors="replace")))
        if tells:
            sys.stderr.write(f"\n(reward functions have printed {MAX_SHOWN >> 20} MiB; what follows is not shown)\n")


PRINTS = Prints()
