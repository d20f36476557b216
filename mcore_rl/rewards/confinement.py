"""Runs an untrusted program in a process of its own, confined and limited; see ``confined_program``.

Input and output are files in memory, so nothing is left behind whatever happens.  The results that are expected of a
program are never in its process.  The process is killed when its time is over, when it has too many threads, and when
this process dies; it is gone when ``run_confined`` returns.
"""

from __future__ import annotations

import json
import math
import os
import select
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

from mcore_rl.config.reward import CodeConfig

LAYERS = ("landlock", "seccomp", "namespaces")
STRONG = {"landlock", "seccomp"}
RESULT_BYTES = 4096  # of a file, beyond what the program may print, since the repr and JSON of values take extra bytes
MAX_THREADS = 64  # the kernel does not limit root's threads, and each takes memory outside of the address space
LOOK_S = 0.01  # seconds between two checks of the process
# Hashes are the same in every run.  One thread for linear algebra: each thread has buffers, and memory is limited.
ENVIRONMENT = {"PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "LANG": "C.UTF-8"}

Step = tuple[str, Any]


class Ending(Enum):
    """How a program ended.  failed: it raised, exited with a code other than 0, or broke a limit other than time."""

    finished = "finished"
    failed = "failed"
    timeout = "timeout"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of running a program.

    ending: how it ended.
    stdout: what it printed.
    values: ``repr`` of each value that the steps gave, up to where it failed.
    layers: the layers of confinement that held.
    message: the last line that it wrote to stderr.
    """

    ending: Ending
    stdout: str
    values: tuple[str, ...]
    layers: tuple[str, ...]
    message: str


class ConfinementError(RuntimeError):
    """A program could not be started, because of the machine or the limits, not because of the program."""


def run_confined(
    program: str,
    config: CodeConfig,
    *,
    stdin: str = "",
    steps: Sequence[Step] = (),
    timeout_s: float | None = None,
    layers: Sequence[str] = LAYERS,
    landlock_abi: int = 99,
) -> Outcome:
    """Runs ``program``, Python source, as a script that reads ``stdin``; with ``steps``, as a module before the steps.

    steps: ``("execute", source)``, ``("value", expression)`` or ``("call", (function, arguments))``; the latter two
    give a value each.  ``function`` may also be a method of a class ``Solution``.
    timeout_s: seconds; None is ``config.timeout_s``.
    layers: the layers of confinement to use; tests use fewer.
    landlock_abi: the newest version of Landlock to use; tests use older ones.

    Raises ConfinementError, with what the process wrote to stderr, if it ended before it was confined.
    """
    limit_s = config.timeout_s if timeout_s is None else timeout_s
    with ExitStack() as stack:
        job, source, stdout, stderr, status, result = (_memory_file(stack) for _ in range(6))
        _fill(job, json.dumps({"program": _encodable(program), "steps": list(steps)}))
        _fill(source, _encodable(stdin))
        settings = {
            "parent": os.getpid(),
            "job": job,
            "status": status,
            "result": result,
            "libraries": libraries(),
            "layers": list(layers),
            "landlock_abi": landlock_abi,
            "cpu_s": math.ceil(limit_s),
            "memory_bytes": config.memory_mib << 20,
            "output_bytes": (config.output_kib << 10) + RESULT_BYTES,
        }
        process = subprocess.Popen(
            [*_interpreter(), json.dumps(settings)],
            stdin=source,
            stdout=stdout,
            stderr=stderr,
            env=ENVIRONMENT,
            pass_fds=(job, status, result),
            start_new_session=True,
        )
        broken = _wait(process, limit_s)
        held = _content(status)
        errors = _content(stderr).strip()
        message = errors.rpartition("\n")[2][-500:]
        if process.returncode == -signal.SIGXCPU:
            broken = Ending.timeout
        if not held and broken is not Ending.timeout:
            raise ConfinementError(f"no program can be run here (exit code {process.returncode}): {errors[-1000:]}")
        return Outcome(
            ending=broken or (Ending.failed if process.returncode else Ending.finished),
            stdout=_content(stdout)[: config.output_kib << 10],
            values=_read_values(_content(result)),
            layers=tuple(json.loads(held)) if held else (),
            message=message,
        )


@cache
def weaknesses() -> tuple[str, ...]:
    """What confinement does not guarantee on this machine, one sentence each; empty if every layer holds."""
    held = set(run_confined("", CodeConfig()).layers)
    weak_points = []
    if "landlock" not in held:
        weak_points.append(
            "Landlock is missing (Linux 5.13 with it enabled): files are kept from Python code, not from C"
        )
    if "seccomp" not in held:
        weak_points.append(
            "seccomp is missing (x86-64 or aarch64): processes and signals are kept from Python code, not from C"
        )
        if "namespaces" not in held:
            weak_points.append("network namespaces are not allowed: the network is kept from Python code, not from C")
    return tuple(weak_points)


@cache
def libraries() -> tuple[str, ...]:
    """The folders of Python's own and of installed modules, which programs can import."""
    return tuple(dict.fromkeys(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")))


@cache
def _interpreter() -> tuple[str, ...]:
    """The command of ``confined_program``: no site module, user packages, current folder on the path, or .pyc files."""
    script = Path(__file__).with_name("confined_program.py")
    return (sys.executable, "-s", "-S", "-P", "-B", "-X", "utf8=1", str(script))


def _memory_file(stack: ExitStack) -> int:
    descriptor = os.memfd_create("reward")
    stack.callback(os.close, descriptor)
    return descriptor


def _fill(descriptor: int, text: str) -> None:
    with open(descriptor, "wb", closefd=False) as file:
        file.write(text.encode())
    os.lseek(descriptor, 0, os.SEEK_SET)


def _content(descriptor: int) -> str:
    size = os.fstat(descriptor).st_size
    return os.pread(descriptor, size, 0).decode(errors="replace")


def _encodable(text: str) -> str:
    """``text`` with "?" for lone surrogates, which cannot be encoded."""
    return text.encode(errors="replace").decode()


def _wait(process: subprocess.Popen[bytes], limit_s: float) -> Ending | None:
    """Waits for ``process`` and kills its process group.  None: it ended by itself; else the limit that it broke."""
    deadline = time.monotonic() + limit_s
    watched = os.pidfd_open(process.pid)  # the end of the process wakes poll at once; Popen.wait would sleep and check
    try:
        poller = select.poll()
        poller.register(watched, select.POLLIN)
        while not poller.poll(max(0.0, min(LOOK_S, deadline - time.monotonic())) * 1000):
            if time.monotonic() >= deadline:
                return Ending.timeout
            if _num_threads(process.pid) > MAX_THREADS:
                return Ending.failed
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # before wait: after it, the group's id may belong to others
        process.wait()
        os.close(watched)


def _num_threads(pid: int) -> int:
    """Threads of a child that was not waited for; the link count of a folder, which is fast for many threads, too."""
    return os.stat(f"/proc/{pid}/task").st_nlink - 2


def _read_values(result: str) -> tuple[str, ...]:
    """The values in the result file, a JSON string per line; the program may have written anything there."""
    values: list[str] = []
    for line in result.splitlines():
        with suppress(ValueError, RecursionError):
            value = json.loads(line)
            values.append(value if isinstance(value, str) else line)
    return tuple(values)
