"""The process group of an engine: which of its processes are alive, and how to end all of them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

from mcore_rl.processes import guard

SHARED_MEMORY = "/dev/shm/vllm_"  # files of vLLM's CPU kernels to communicate, removed at a regular end only


def is_tracker(process: psutil.Process) -> bool:
    """True for Python's resource trackers, which clean up after other processes and then end by themselves."""
    with suppress(psutil.Error):
        return any("resource_tracker" in word for word in process.cmdline())
    return False


def is_helper(process: psutil.Process) -> bool:
    """True for trackers and for the engine's guard: they end by themselves, once the engine has."""
    with suppress(psutil.Error):
        return is_tracker(process) or guard.__file__ in process.cmdline()
    return False


def is_alive(process: psutil.Process) -> bool:
    """False for a process that has ended, zombies included."""
    with suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def group_of(leader: int) -> list[psutil.Process]:
    """Every process of the group that ``leader`` leads, or led before it ended, except resource trackers."""
    processes = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, PermissionError):
            if os.getpgid(process.pid) == leader and not is_tracker(process):
                processes.append(process)
    return processes


def shared_memory_of(processes: Iterable[psutil.Process]) -> set[Path]:
    """The files of shared memory that vLLM's workers among ``processes`` have mapped."""
    files = set()
    for process in processes:
        with suppress(psutil.Error):
            files |= {Path(part.path) for part in process.memory_maps() if part.path.startswith(SHARED_MEMORY)}
    return files


def end_group(leader: int) -> None:
    """Kills ``group_of(leader)``, and removes the shared memory that vLLM mapped there."""
    processes = group_of(leader)
    mapped = shared_memory_of(processes)
    for process in processes:
        with suppress(psutil.Error):
            process.send_signal(signal.SIGKILL)
    remove(mapped)


def remove(files: Iterable[Path]) -> None:
    """Removes ``files``; some may be gone already."""
    for file in files:
        file.unlink(missing_ok=True)
