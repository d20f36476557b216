"""The processes of an engine, which are one process group: who is alive, and how all of them are ended."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

SHARED_MEMORY = "/dev/shm/vllm_"  # what vLLM's CPU kernels map to talk to each other, and remove at an orderly end only


def is_tracker(process: psutil.Process) -> bool:
    """True for Python's resource trackers, which remove what other processes leave behind and end by themselves."""
    with suppress(psutil.Error):
        return any("resource_tracker" in word for word in process.cmdline())
    return False


def is_alive(process: psutil.Process) -> bool:
    """False for a process that has ended, zombies included."""
    with suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def group_of(leader: int) -> list[psutil.Process]:
    """Every process of the group that ``leader`` leads, or led, but for resource trackers."""
    found = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, PermissionError):
            if os.getpgid(process.pid) == leader and not is_tracker(process):
                found.append(process)
    return found


def shared_memory_of(processes: Iterable[psutil.Process]) -> set[Path]:
    """The files of shared memory that vLLM's workers among ``processes`` have mapped."""
    found = set()
    for process in processes:
        with suppress(psutil.Error):
            found |= {Path(part.path) for part in process.memory_maps() if part.path.startswith(SHARED_MEMORY)}
    return found


def end_group(leader: int) -> None:
    """Kill ``group_of(leader)``, and remove the shared memory that vLLM mapped there."""
    processes = group_of(leader)
    mapped = shared_memory_of(processes)
    for process in processes:
        with suppress(psutil.Error):
            process.send_signal(signal.SIGKILL)
    remove(mapped)


def remove(files: Iterable[Path]) -> None:
    """Remove ``files``, of which some may be gone already."""
    for file in files:
        file.unlink(missing_ok=True)
