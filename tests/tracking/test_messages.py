"""Messages to the terminal: text of strangers commands nothing there."""

from __future__ import annotations

import logging

import pytest

from mcore_rl.controller.lifecycle.messages import note, outcome, warn
from mcore_rl.tracking.messages import HarmlessFormatter, harmless


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain text\nin lines, é 漢 🙂", "plain text\nin lines, é 漢 🙂"),
        ("\x1b[2J\x1b]0;owned\x07", "\\x1b[2J\\x1b]0;owned\\x07"),
        ("right\rwrong", "right\\rwrong"),
        ("\x9b31m", "\\x9b31m"),
        ("a\u202eb\ud800", "a\\u202eb\\ud800"),
    ],
)
def test_control_characters_are_spelled(text: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert harmless(text) == shown
    for say in (warn, note, outcome):
        say(text)
    record = logging.LogRecord("mcore_rl", logging.WARNING, "", 0, "%s", (text,), None)
    said = capsys.readouterr()
    for written in (said.err, said.out, HarmlessFormatter().format(record)):
        assert not any(each in written for each in ("\x1b", "\x07", "\r", "\x9b", "\u202e", "\ud800"))
        assert shown in written
