"""A program whose Ray dies ends at once with a word, and one that is killed leaves nothing of Ray."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from mcore_rl.runtime.cluster import VITAL
from tests.support.run_task import still_alive

PROGRAM = """
import sys
from mcore_rl.config.trainer import RayInitConfig
from mcore_rl.runtime.cluster import ray_cluster

with ray_cluster(RayInitConfig(num_cpus=1), lambda: "The remedy."):
    print("up", flush=True)
    sys.stdin.read()
"""

pytestmark = pytest.mark.usefixtures("processes")


@contextmanager
def program() -> Iterator[tuple[subprocess.Popen[str], set[psutil.Process]]]:
    """One that has started Ray, and all processes below it."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        yield process, set(psutil.Process(process.pid).children(recursive=True))


@pytest.mark.parametrize("name", ["gcs_server", pytest.param("raylet", marks=pytest.mark.tier("full"))])
def test_the_death_of_ray_ends_the_program_with_a_word(name: str) -> None:
    with program() as (process, below):
        (victim,) = (each for each in below if each.name() == name)
        victim.kill()
        assert process.stderr is not None
        said = process.stderr.read()
        assert process.wait() == os.EX_TEMPFAIL
        assert f"error: {VITAL[name]} ({name}, process {victim.pid}) died. The remedy." in said
        assert not still_alive(below)


def test_nothing_of_ray_outlives_a_program_that_is_killed() -> None:
    with program() as (process, below):
        assert {"gcs_server", "raylet"} <= {each.name() for each in below}
        process.send_signal(signal.SIGKILL)
        assert not still_alive(below)
