"""What reward functions print: its beginning is shown, and none of it commands the terminal."""

from __future__ import annotations

import os
import time

import pytest

from mcore_rl.rewards import scorer
from mcore_rl.rewards.scorer import Prints


@pytest.mark.parametrize("size", [100, 3 << 20])
def test_the_beginning_is_shown_and_all_is_read(
    size: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scorer, "MAX_SHOWN", 1 << 20)
    reading, writing = os.pipe()
    Prints().relay(os.fdopen(reading, "rb", buffering=0))
    left = b"\x1b]0;owned\x07" + b"x" * size
    while left:
        left = left[os.write(writing, left) :]  # which a pipe that nobody reads would block
    os.close(writing)
    begun, said = time.monotonic(), ""
    while said.count("x") < min(size, (1 << 20) - 20) and time.monotonic() < begun + 20:
        time.sleep(0.02)
        said += capsys.readouterr().err
    time.sleep(0.1)
    said += capsys.readouterr().err
    assert said.startswith("\\x1b]0;owned\\x07xxx") and "\x1b" not in said
    assert ("what follows is not shown" in said) == (size > 1 << 20) and len(said) < (1 << 20) + 200
