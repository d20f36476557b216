"""Runs an untrusted program in a process of its own, confined and limited; see ``confined_program``.

Input and output are files in memory, so nothing is left behind whatever happens.  The results that are expected of a
program are never in its process.  The process is killed when its time is over, when it has too many threads, and when
this process dies; it is gone when ``run_confined`` returns.
"""

from __future__ import annotations

import errno
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
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cache
from typing import Any

from mcore_rl.config.reward import CodeConfig
from mcore_rl.rewards import confined_program
from mcore_rl.rewards.plain_data import read_value
from mcore_rl.rewards.wire import UnjudgedError

LAYERS = ("landlock", "seccomp", "namespaces")
NEWEST_ABI = 99  # of Landlock: whichever the kernel has
STRONG = {"landlock", "seccomp"}
RESULT_BYTES = 4096  # of a file, beyond what the program may print, since the repr and JSON of values take extra bytes
MAX_THREADS = 64  # the kernel does not limit root's threads, and each takes memory outside of the address space
LOOK_S = 0.01  # seconds between two checks of the process
# Hashes are the same in every run.  One thread for linear algebra: each thread has buffers, and memory is limited.
ENVIRONMENT = {"PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "LANG": "C.UTF-8"}

START = (
    "import sys; from importlib.machinery import SourceFileLoader; "
    "module = type(sys)('confined_program'); module.__file__ = path = sys.argv[1]; "
    "SourceFileLoader(module.__name__, path).exec_module(module); module.main(sys.argv[2])"
)

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
    values: each value that the steps gave, up to where it failed, as plain data.
    layers: the layers of confinement that held.
    message: the last line that it wrote to stderr.
    lines: ``values`` as they were written.
    """

    ending: Ending
    stdout: str
    values: tuple[Any, ...]
    layers: tuple[str, ...]
    message: str
    lines: tuple[str, ...] = field(default=(), repr=False, compare=False)


class ConfinementError(RuntimeError):
    """A program could not be started, because of the machine or the limits, not because of the program."""


def run_confined(
    program: str,
    config: CodeConfig,
    *,
    stdin: str = "",
    steps: Sequence[Step] = (),
    inside: str | None = None,
    timeout_s: float | None = None,
    layers: Sequence[str] = LAYERS,
    landlock_abi: int = NEWEST_ABI,
) -> Outcome:
    """Runs ``program``, Python source, as a script that reads ``stdin``; with ``steps``, as a module before the steps.

    steps: ``("execute", source)``, ``("value", expression)`` or ``("call", (function, arguments))``; the latter two
    give a value each.  ``function`` may also be a method of a class ``Solution``; ``arguments`` are ``encode``d.
    inside: tests that are run with the program, in its process, which gives one value, whether they passed; a program
    could forge it.
    timeout_s: seconds; None is ``config.timeout_s``.
    layers: the layers of confinement to use; tests use fewer.
    landlock_abi: the newest version of Landlock to use; tests use older ones.

    Raises ConfinementError, with what the process wrote to stderr, if it ended before it was confined.
    """
    limit_s = config.timeout_s if timeout_s is None else timeout_s
    job = {"program": _encodable(program), "steps": list(steps)} | ({} if inside is None else {"tests": inside})
    with ExitStack() as stack:
        started = _Confined(
            stack, "program", job, config, limit_s, layers=layers, landlock_abi=landlock_abi, stdin=stdin
        )
        broken = _wait([started.process], limit_s)
        return started.outcome(broken)


def run_judged(
    program: str,
    tests: str,
    names: Sequence[str],
    config: CodeConfig,
    *,
    has_prelude: bool = True,
    timeout_s: float | None = None,
) -> Outcome:
    """Runs ``tests``, Python source, against ``program``, each in a confined process of its own; see ``judge``.

    names: the names among Python's built-in ones that are the program's in these tests.
    has_prelude: the tests may use what ``PRELUDE`` imports; without it they start faster.
    The other arguments and the errors are ``run_confined``'s.  ``values`` of the Outcome is (whether they passed,), or
    () if there is no verdict; ``message`` says why they did not.  UnjudgedError: these tests cannot be run outside of
    the program.
    """
    limit_s = config.timeout_s if timeout_s is None else timeout_s
    common = (config, limit_s)
    with ExitStack() as stack:
        questions, ask = os.pipe()
        answers, answer = os.pipe()
        ends = stack.enter_context(ExitStack())
        for end in (questions, ask, answers, answer):
            ends.callback(os.close, end)
        job = {"program": _encodable(program), "steps": []}
        work = {"tests": tests, "names": list(names), "prelude": has_prelude}
        judge = _Confined(stack, "judge", work, *common, wire=(answers, ask))
        served = _Confined(stack, "program", job, *common, wire=(questions, answer))
        ends.close()  # each end is in one process now, so that the other notices when it ends
        broken = _wait([judge.process, served.process], limit_s)
        outcome = judge.outcome(broken)
        of_program = served.outcome(broken)
    lines = outcome.lines
    verdict: dict[str, Any] = {"passed": False, "error": outcome.message or "the judge gave no verdict"}
    if lines:
        verdict = json.loads(lines[0])
    if verdict.get("unjudged"):
        raise UnjudgedError(verdict["error"])
    values = (verdict["passed"],) if lines else ()
    message = verdict["error"] if not of_program.message else f"{verdict['error']} ({of_program.message})"
    if of_program.ending is Ending.timeout and not verdict["passed"]:  # the judge saw only that the program had ended
        outcome = replace(outcome, ending=Ending.timeout)
    return replace(outcome, stdout=of_program.stdout, values=values, message=message)


class _Confined:
    """A process that confines itself, its files in memory, and what came of it."""

    def __init__(
        self,
        stack: ExitStack,
        role: str,
        job: dict[str, Any],
        config: CodeConfig,
        limit_s: float,
        *,
        layers: Sequence[str] = LAYERS,
        landlock_abi: int = NEWEST_ABI,
        stdin: str = "",
        wire: tuple[int, int] | None = None,
    ) -> None:
        work, source, self._stdout, self._stderr, self._status, self._result = (_memory_file(stack) for _ in range(6))
        _fill(work, json.dumps(job))
        _fill(source, _encodable(stdin))
        settings = {
            "role": role,
            "parent": os.getpid(),
            "job": work,
            "status": self._status,
            "result": self._result,
            "wire": wire,
            "libraries": libraries(),
            "layers": list(layers),
            "landlock_abi": landlock_abi,
            "cpu_s": math.ceil(limit_s),
            "memory_bytes": config.memory_mib << 20,
            "output_bytes": (config.output_kib << 10) + RESULT_BYTES,
        }
        self._num_bytes = config.output_kib << 10
        self.process = subprocess.Popen(
            [*_interpreter(), json.dumps(settings)],
            stdin=source,
            stdout=self._stdout,
            stderr=self._stderr,
            env=ENVIRONMENT,
            pass_fds=(work, self._status, self._result, *(wire or ())),
            start_new_session=True,
        )
        stack.callback(_end, self.process)

    def outcome(self, broken: Ending | None) -> Outcome:
        """What came of it.  broken: the limit that was broken, if any.

        ConfinementError: it ended before it was confined, and not because it was ended here, as a program is whose
        tests have ended.
        """
        ended_here = self.process.poll() is None
        _end(self.process)
        held = _content(self._status)
        errors = _content(self._stderr).strip()
        code = self.process.returncode
        if code == -signal.SIGXCPU:
            broken = Ending.timeout
        if not held and broken is None and not ended_here:
            raise ConfinementError(f"no program can be run here (exit code {code}): {errors[-1000:]}")
        lines = tuple(_content(self._result).splitlines())
        return Outcome(
            ending=broken or (Ending.failed if code else Ending.finished),
            stdout=_content(self._stdout)[: self._num_bytes],
            values=tuple(map(read_value, lines)),
            lines=lines,
            layers=tuple(json.loads(held)) if held else (),
            message=errors.rpartition("\n")[2][-500:],
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
    """The command of ``confined_program``: no site module, user packages, current folder on the path, or .pyc files.

    Python compiles a script each time, but not what a loader loads and this process has imported already.
    """
    return (sys.executable, "-s", "-S", "-P", "-B", "-X", "utf8=1", "-c", START, confined_program.__file__)


def _memory_file(stack: ExitStack) -> int:
    try:
        descriptor = os.memfd_create("reward")
    except OSError as error:
        raise _refused_by_container("memfd_create", error) from error
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


def _wait(processes: Sequence[subprocess.Popen[bytes]], limit_s: float) -> Ending | None:
    """Waits for the first of ``processes`` to end.  None: it ended by itself; else the limit that was broken."""
    deadline = time.monotonic() + limit_s
    watched = _watch(processes[0].pid)  # its end wakes poll at once; Popen.wait would sleep and check
    try:
        poller = select.poll()
        poller.register(watched, select.POLLIN)
        while not poller.poll(max(0.0, min(LOOK_S, deadline - time.monotonic())) * 1000):
            if time.monotonic() >= deadline:
                return Ending.timeout
            if any(_num_threads(each.pid) > MAX_THREADS for each in processes):
                return Ending.failed
        return None
    finally:
        os.close(watched)


def _watch(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        raise _refused_by_container("pidfd_open", error) from error


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kills the process's group and waits for the process; idempotent."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # before wait: after it, the group's id may belong to others
        process.wait()


def _refused_by_container(call: str, error: OSError) -> ConfinementError:
    reason = errno.errorcode.get(error.errno or 0, "refused")
    return ConfinementError(
        f"{call} is refused here ({reason}), probably by the seccomp profile of a container; programs of a model "
        f"cannot be "
        f"run without it. Allow {call} in that profile (Docker, Podman: --security-opt seccomp=PROFILE.json), or grade "
        "code on another machine"
    )


def _num_threads(pid: int) -> int:
    """Threads of a child that was not waited for; the link count of a folder, which is fast for many threads, too."""
    return os.stat(f"/proc/{pid}/task").st_nlink - 2
