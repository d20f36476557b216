"""Messages for the person at the screen, shown above the live line whatever the loggers are."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from mcore_rl.controller.lifecycle.run_checkpoints import how_to_go_on
from mcore_rl.tracking.messages import harmless, say, warn

__all__ = ["note", "outcome", "stop_explained", "warn"]


def note(text: str) -> None:
    """Shows a note: nothing is wrong, but the user should know it."""
    say(f"note: {text}", "cyan")


def outcome(text: str) -> None:
    """Shows the result of the run."""
    Console(emoji=False).print(harmless(text), markup=False, highlight=False, soft_wrap=True)


@contextmanager
def stop_explained(run_dir: Path) -> Iterator[None]:
    """While active: Ctrl-C shows how to continue the run, before its exception goes on."""
    try:
        yield
    except (asyncio.CancelledError, KeyboardInterrupt):
        say(how_to_go_on(run_dir))
        raise
