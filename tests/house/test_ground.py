"""What a test's own programs inherit is what ``tests/support/ground.py`` says, whoever started pytest."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.support import ground, hostile

PROBE = """
import json, os, signal, sys
ignored = [number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN]
mask = os.umask(0)
json.dump({"ignored": ignored, "blocked": len(signal.pthread_sigmask(signal.SIG_BLOCK, ())), "umask": mask,
           "encoding": sys.getfilesystemencoding(), "environ": dict(os.environ)}, sys.stdout)
"""


def test_a_program_of_a_test_is_started_from_the_ground() -> None:
    state = json.loads(subprocess.run([sys.executable, "-c", PROBE], capture_output=True, check=True).stdout)
    assert set(state["ignored"]) == {signal.SIGPIPE, signal.SIGXFSZ}, "as Python itself has it"
    assert state["blocked"] == 0
    assert state["umask"] == ground.UMASK
    assert state["encoding"] == "utf-8"
    assert state["environ"] | ground.OWN == state["environ"]


@pytest.mark.parametrize("name", sorted(hostile.VARIABLES))
def test_nothing_of_a_hostile_parent_is_left(name: str) -> None:
    """But where it is no matter: device masks, and what a machine's owner may set."""
    if name not in hostile.HARMLESS:
        assert os.environ.get(name) == ground.OWN.get(name)
