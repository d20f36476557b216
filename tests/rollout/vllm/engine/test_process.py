"""The child process: an engine that cannot start says why, and none outlives the program that started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file, save_file

from mcore_rl.ground.errors import RolloutError
from mcore_rl.processes import guard
from mcore_rl.rollout.vllm.engine.process import start_engine
from mcore_rl.rollout.vllm.engine.process_group import group_of
from tests.support import rollouts
from tests.support.guards import tell_to_end
from tests.support.rollouts import wait_until_gone

PROGRAM = """
import sys, time
from pathlib import Path
from mcore_rl.rollout.vllm.engine.process import start_engine
from tests.support import rollouts
engine = start_engine("rollout-0", Path(sys.argv[1]), rollouts.config(), log=Path(sys.argv[2]), wait=False)
print(engine.pid, flush=True)
if sys.argv[3] == "stay":
    time.sleep(60)
"""


def program(directory: Path, log: Path, mode: str, temporary: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM, str(directory), str(log), mode]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(temporary)})


def guards_of(leader: int) -> list[psutil.Process]:
    each_with_words = [(each, each.info["cmdline"] or []) for each in psutil.process_iter(["cmdline"])]
    return [each for each, words in each_with_words if guard.__file__ in words and f'"group": {leader},' in words[-1]]


@pytest.mark.parametrize("mode", ["stay", "stopped", "end"])
def test_no_process_outlives_the_program(mode: str, tmp_path: Path, processes: None) -> None:
    """Killed, or at its end without a word, while the engine is still starting; nor is a temporary file left.

    An engine that is stopped does not notice its program's end; its guard does, though it was told to end: Slurm tells
    all processes of a job before it kills those that it finds, and a guard's parent may have ended by then.
    """
    rollouts.write("llama", tmp_path)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    with program(tmp_path, tmp_path / "log", "end" if mode == "end" else "stay", temporary) as parent:
        assert parent.stdout is not None
        leader = int(parent.stdout.readline())
        if mode != "end":
            deadline = time.monotonic() + 30
            while not group_of(leader):  # it leads a group once it runs
                assert time.monotonic() < deadline and psutil.pid_exists(leader)
                time.sleep(0.05)
            assert [each.name for each in temporary.iterdir() if each.name.startswith("mcore-rl-engine-")]
            while len(psutil.Process(leader).threads()) < 2:  # that which ends it with its parent
                assert time.monotonic() < deadline
                time.sleep(0.05)
            if mode == "stopped":
                while not guards_of(leader):
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
                os.kill(leader, signal.SIGSTOP)
                (its_guard,) = guards_of(leader)
                tell_to_end(its_guard.pid)
            parent.send_signal(signal.SIGKILL)
        parent.wait(30)
        wait_until_gone(leader)
        assert not psutil.pid_exists(leader) or psutil.Process(leader).status() == psutil.STATUS_ZOMBIE
    deadline = time.monotonic() + 30
    while list(temporary.iterdir()):  # the guard's last deed
        assert time.monotonic() < deadline, list(temporary.iterdir())
        time.sleep(0.05)


def test_what_the_engine_s_process_started_ends_with_it(tmp_path: Path, processes: None) -> None:
    """vLLM's core runs in a process below, which waits for ever where the one above it is killed."""
    rollouts.write("llama", tmp_path)
    engine = start_engine("rollout-0", tmp_path, rollouts.config(), log=tmp_path / "log")
    group = group_of(engine.pid)
    assert len(group) > 1
    scratch = Path(engine._scratch)
    assert scratch.is_dir()
    os.kill(engine.pid, signal.SIGKILL)
    try:
        deadline = time.monotonic() + 60
        while running(group) or scratch.exists():
            assert time.monotonic() < deadline, running(group)
            time.sleep(0.05)
    finally:
        engine.close()


def running(processes: list[psutil.Process]) -> list[psutil.Process]:
    alive = []
    for each in processes:
        with suppress(psutil.NoSuchProcess):
            alive += [each] if each.is_running() and each.status() != psutil.STATUS_ZOMBIE else []
    return alive


def test_an_engine_that_does_not_start_says_why_and_leaves_its_output(tmp_path: Path, processes: None) -> None:
    rollouts.write("llama", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:64].clone()
    save_file(tensors, path, metadata={"format": "pt"})
    log = tmp_path / "engine.log"
    with pytest.raises(RolloutError) as error:
        start_engine("rollout-0", tmp_path, rollouts.config(), log=log)
    said = str(error.value)
    assert said.startswith(f"rollout-0: vLLM does not start with {tmp_path}: ") and "64" in said
    assert str(log) in said and "Traceback" in log.read_text()
