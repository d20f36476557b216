"""A process of Ray's that is stopped, which nothing else notices, is lost as one that died."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time

import pytest

from mcore_rl.runtime import cluster


def test_a_process_that_is_stopped_is_lost_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "LOOK_S", 0.05)
    monkeypatch.setattr(cluster, "STOPPED_S", 0.5)
    reading, writing = os.pipe()
    with subprocess.Popen(["sleep", "100"]) as process:
        handle = os.pidfd_open(process.pid)
        held = cluster.Held("raylet", process.pid, handle)
        try:
            threading.Timer(0.2, os.kill, (process.pid, signal.SIGSTOP)).start()
            threading.Timer(0.4, os.kill, (process.pid, signal.SIGCONT)).start()
            threading.Timer(1.0, os.kill, (process.pid, signal.SIGSTOP)).start()
            begun = time.monotonic()
            assert cluster.lost_of([held], reading) == (held, "has been stopped (SIGSTOP) for 0 s")
            assert time.monotonic() - begun >= 1.4  # not of the first, short stop
            process.kill()
            assert cluster.lost_of([held], reading) == (held, "died")
            os.close(writing)
            assert cluster.lost_of([], reading) is None
        finally:
            process.kill()
            os.close(handle)
            os.close(reading)
