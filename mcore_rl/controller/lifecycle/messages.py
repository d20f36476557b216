"""Messages for the person at the screen, shown above the live line whatever the loggers are."""

from __future__ import annotations

from rich.console import Console

from mcore_rl.tracking.messages import harmless, say, warn

__all__ = ["note", "outcome", "warn"]


def note(text: str) -> None:
    """Shows a note: nothing is wrong, but the user should know it."""
    say(f"note: {text}", "cyan")


def outcome(text: str) -> None:
    """Shows the result of the run."""
    Console(emoji=False).print(harmless(text), markup=False, highlight=False, soft_wrap=True)
