"""Run a program that nobody trusts: in a process of its own, confined, with limits; see ``confined_program``.

What goes in and out are files in memory, so nothing is left behind whatever happens, and what is expected of the
program never is in its process.  When ``run_confined`` returns the process is gone; it is killed when its time is over,
when it has too many threads and when this process dies.
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
RESULT_BYTES = 4096  # of a file, besides what the program may print: how values are written takes more than they do
MAX_THREADS = 64  # their number has no limit of the kernel's for root, and each takes memory beside the address space
LOOK_S = 0.01  # between two looks at it
# Hashing is the same in every run.  One thread for linear algebra: each has buffers, and memory is limited.
ENVIRONMENT = {"PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "LANG": "C.UTF-8"}

Step = tuple[str, Any]


class Ending(Enum):
    """How a program ended.  failed: it raised, exited with another code than 0, or broke a limit other than of time."""

    finished = "finished"
    failed = "failed"
    timeout = "timeout"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a program.

    stdout: what it printed.  values: ``repr`` of each value that the steps asked for, as far as it came.  layers: of
    confinement that held.  message: the last line of what it wrote to stderr.
    """

    ending: Ending
    stdout: str
    values: tuple[str, ...]
    layers: tuple[str, ...]
    message: str


class ConfinementError(RuntimeError):
    """A program was not even started: the machine's or the limits' fault, not the program's."""


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
    """Run ``program``, Python source, as a script that reads ``stdin``; with ``steps`` as a module, and then those.

    steps: ``("execute", source)``, ``("value", expression)`` or ``("call", (function, arguments))``, of which the
    latter two give a value each; a method of a class ``Solution`` is a function, too.  timeout_s: ``config``'s unless
    given.  layers: that may be used; landlock_abi: the newest version of it; fewer and older for tests only.

    Raises ConfinementError where the process ended before it was confined; it says what it wrote.
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
    """What confinement does not guarantee on this machine, a sentence each; none where every layer holds."""
    held = set(run_confined("", CodeConfig()).layers)
    found = []
    if "landlock" not in held:
        found.append("Landlock is missing (Linux 5.13 with it enabled): files are kept from Python code, not from C")
    if "seccomp" not in held:
        found.append(
            "seccomp is missing (x86-64 or aarch64): processes and signals are kept from Python code, not from C"
        )
        if "namespaces" not in held:
            found.append("network namespaces are not allowed: the network is kept from Python code, not from C")
    return tuple(found)


@cache
def libraries() -> tuple[str, ...]:
    """Where Python's own modules lie and those that are installed: what programs can import."""
    return tuple(dict.fromkeys(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")))


@cache
def _interpreter() -> tuple[str, ...]:
    """Without site (start-up files of what is installed), the user's packages, the current folder and .pyc files."""
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
    """``text`` without lone surrogates, which no program can hold or read."""
    return text.encode(errors="replace").decode()


def _wait(process: subprocess.Popen[bytes], limit_s: float) -> Ending | None:
    """None where ``process`` ended by itself, else the limit that it broke; its group is gone in any case."""
    deadline = time.monotonic() + limit_s
    watched = os.pidfd_open(process.pid)  # ends of processes wake a poll, where Popen.wait sleeps and looks
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
            os.killpg(process.pid, signal.SIGKILL)  # before it is waited for: until then the group's number is its own
        process.wait()
        os.close(watched)


def _num_threads(pid: int) -> int:
    """Of a child that was not waited for; by the links of a folder, so that counting many takes no longer."""
    return os.stat(f"/proc/{pid}/task").st_nlink - 2


def _read_values(result: str) -> tuple[str, ...]:
    """Of the result file, a JSON string in each line, which the program can have tampered with."""
    values: list[str] = []
    for line in result.splitlines():
        with suppress(ValueError, RecursionError):
            value = json.loads(line)
            values.append(value if isinstance(value, str) else line)
    return tuple(values)
