"""Records of rollouts while the disk is full."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mcore_rl.controller.rollouts import recording
from tests.support.awaited import awaited


@awaited
async def test_a_record_that_the_disk_has_no_room_for_is_written_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full, written, told = True, list[int](), list[str]()

    def write(run_dir: Path, step: int, batch: Any, place: Any) -> None:
        if full:
            raise OSError(28, "No space left on device")
        written.append(step)

    monkeypatch.setattr(recording, "write_record", write)
    recorder = recording.Recorder(tmp_path, warn=told.append)
    for step in range(1, 7):
        recorder.begin(step, None, {})  # type: ignore[arg-type]  # what is written is not looked at
        await recorder.end(step)
    assert len(told) == 6 and "The next step tries again" in told[0]
    full = False
    await recorder.close()
    assert written == [*range(7 - recording.MAX_UNSENT, 7)] and len(told) == 6
    full = True
    recorder.begin(7, None, {})  # type: ignore[arg-type]
    await recorder.close()
    assert "The rollouts of steps 7 are not recorded: [Errno 28]" in told[-1]
