"""The guard of Ray's processes: they end with the program, though the guard was told to end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from mcore_rl.runtime import ray_guard
from tests.support.guards import tell_to_end


def test_what_is_left_is_killed_once_the_program_has_ended(processes: None) -> None:
    reading, writing = os.pipe()
    with subprocess.Popen(["sleep", "600"]) as left:
        handles = [reading, os.pidfd_open(left.pid)]
        command = [sys.executable, "-I", "-S", ray_guard.__file__, *map(str, handles)]
        with subprocess.Popen(command, pass_fds=handles) as guard:
            tell_to_end(guard.pid)
            assert left.poll() is None
            os.close(writing)  # as when the program ends
            assert guard.wait(60) == 0
        assert left.wait(60) == -signal.SIGKILL
    for handle in handles:
        os.close(handle)
