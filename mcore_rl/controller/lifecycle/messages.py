"""What a person at the screen must see, above the live line and whatever the loggers are."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from mcore_rl.controller.lifecycle.run_checkpoints import how_to_go_on


def warn(text: str) -> None:
    """Something is wrong, and the run goes on."""
    _say(f"warning: {text}", "bold yellow")


def note(text: str) -> None:
    """Nothing is wrong, but it is better known."""
    _say(f"note: {text}", "cyan")


def outcome(text: str) -> None:
    """What came out of the run."""
    Console().print(text, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def stop_explained(run_dir: Path) -> Iterator[None]:
    """Within: Ctrl-C says how to go on, and goes on itself as what it raised."""
    try:
        yield
    except (asyncio.CancelledError, KeyboardInterrupt):
        _say(how_to_go_on(run_dir))
        raise


def _say(text: str, style: str | None = None) -> None:
    Console(stderr=True).print(text, style=style, markup=False, highlight=False, soft_wrap=True)
