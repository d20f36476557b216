"""Messages for the person at the terminal, above the live line, whatever the loggers are.

What programs, servers and models wrote may be part of a message.  Invariant: none of it commands the terminal.
"""

from __future__ import annotations

import logging
import re

# All but tab and line feed: escape sequences move the cursor, set titles and colours, or write into the input.
_COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def harmless(text: str) -> str:
    """``text`` with control characters as they are spelled: ``\\x1b`` for an escape."""
    return _COMMANDS.sub(lambda each: each[0].encode("unicode_escape").decode(), text)


def warn(text: str) -> None:
    """Shows a warning: something is wrong, but the run goes on."""
    say(f"warning: {text}", "bold yellow")


def say(text: str, style: str | None = None) -> None:
    """Shows ``text`` on the standard error."""
    from rich.console import Console  # where there is something to say

    Console(stderr=True, emoji=False).print(harmless(text), style=style, markup=False, highlight=False, soft_wrap=True)


class HarmlessFormatter(logging.Formatter):
    """Formats what is logged as Python does without a configuration: the message alone, here without commands."""

    def format(self, record: logging.LogRecord) -> str:
        """See ``logging.Formatter``."""
        return harmless(super().format(record))
