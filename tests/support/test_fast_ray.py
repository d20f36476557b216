"""A process that stands for a forked one is as good as Python itself, to whoever started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray

from mcore_rl.config.trainer import RayInitConfig
from mcore_rl.runtime.cluster import ray_cluster
from tests.support.fast_python import ENGINE, WORKER, kind_of
from tests.support.fast_ray import forked_ray

FORKED = "--multiprocessing-fork"
ENVIRON = {"VLLM_NO_USAGE_STATS": "1"}
IMPORTED = "vllm.v1.engine.core"
# What a program can see of how it was started.
SEEN = f"""
import os, sys, torch
assert ({IMPORTED!r} in sys.modules) == (sys.argv[-1] == "forked")
umask = os.umask(0)
names = {{"PATH", "PYTHONPATH", "OWN", "LANG", "HF_HUB_OFFLINE", "OMP_NUM_THREADS"}}
print(sys.argv[:-1], os.getcwd(), umask, {{name: os.environ.get(name) for name in sorted(names)}})
print(torch.get_num_threads(), sys.executable, __name__)
number = int(os.environ["OWN"])
os.write(number, b"x" + os.read(number, 3))
sys.exit(3)
"""
WAITS = """
import os, signal, time
signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
print(os.getpid(), flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory, processes: None) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("program")
    with forked_ray(directory):
        yield directory / "python"


def test_workers_and_engines_are_told_from_other_programs() -> None:
    assert kind_of(["/ray/default_worker.py", "--node-ip-address=1"], {}) == WORKER
    assert kind_of(["/ray/setup_worker.py", "--language=PYTHON", "/ray/default_worker.py"], {}) == WORKER
    assert kind_of(["/ray/setup_worker.py", "-m", "ray.util.client.server"], {}) is None
    assert kind_of(["-c", "from multiprocessing.spawn import spawn_main", FORKED], ENVIRON) == ENGINE
    assert kind_of(["-c", "from multiprocessing.spawn import spawn_main", FORKED], {}) is None
    assert kind_of(["-c", "from multiprocessing.resource_tracker import main"], ENVIRON) is None
    assert kind_of([], ENVIRON) is None


def test_it_gets_what_python_would(program: Path, tmp_path: Path) -> None:
    def run(executable: str, last: str) -> tuple[int, bytes, bytes]:
        file = os.open(tmp_path / "both", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        theirs = os.dup2(file, 150)
        os.write(theirs, b"abc")
        os.lseek(theirs, 0, os.SEEK_SET)
        done = subprocess.run(
            [executable, "-c", SEEN, FORKED, last],
            cwd=tmp_path,
            env=os.environ | ENVIRON | {"OWN": str(theirs), "OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "0"},
            stdout=subprocess.PIPE,
            pass_fds=[theirs],
            umask=0o27,
            check=False,
        )
        os.close(theirs)
        os.close(file)
        return done.returncode, done.stdout, (tmp_path / "both").read_bytes()

    forked = run(str(program), "forked")
    assert forked == run(sys.executable, "fresh")
    assert forked[0] == 3 and forked[2] == b"abcxabc" and b"'OMP_NUM_THREADS': '2'" in forked[1]


def waiting(program: Path) -> tuple[subprocess.Popen[bytes], psutil.Process]:
    """One that stands for another, and the other, which sleeps."""
    command = [program, "-c", WAITS, FORKED]
    stand_in = subprocess.Popen(command, env=os.environ | ENVIRON, stdout=subprocess.PIPE)
    assert stand_in.stdout is not None
    return stand_in, psutil.Process(int(stand_in.stdout.readline()))


def test_they_end_together(program: Path) -> None:
    stand_in, process = waiting(program)
    assert process.pid != stand_in.pid
    stand_in.terminate()
    assert stand_in.wait() == 7
    stand_in, process = waiting(program)
    process.send_signal(signal.SIGABRT)
    assert stand_in.wait() == -signal.SIGABRT
    stand_in, process = waiting(program)
    stand_in.kill()
    assert stand_in.wait() == -signal.SIGKILL
    process.wait(60)  # its parent reaps it


def test_anything_else_is_left_to_python(program: Path) -> None:
    code = f"import os, sys; print({IMPORTED!r} in sys.modules, sys.executable, os.getpid())"
    started = subprocess.Popen([program, "-c", code], env=os.environ | ENVIRON, stdout=subprocess.PIPE, text=True)
    assert started.communicate()[0] == f"False {sys.executable} {started.pid}\n"


def test_workers_of_ray_have_imported_already(program: Path) -> None:
    @ray.remote
    def seen() -> tuple[bool, bool, int, str | None, str]:
        import torch

        imported = "megatron.core" in sys.modules, "vllm" in sys.modules
        return *imported, torch.get_num_threads(), os.environ.get("OWN"), sys.executable

    environment = {"env_vars": {"OMP_NUM_THREADS": "2", "OWN": "x"}}
    with ray_cluster(RayInitConfig(num_cpus=1)):
        assert ray.get(seen.remote()) == (True, False, 1, None, sys.executable)
        answer = ray.get(seen.options(runtime_env=environment).remote())
        assert answer == (True, False, 2, "x", sys.executable)
