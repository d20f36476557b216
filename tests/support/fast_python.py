"""A Python for Ray's workers, and for the engines that they start, that has imported already.

Ray starts ``program`` where it would start Python.  For a worker or an engine, the program asks a server of ``forked``
for a process, gives it its own arguments, environment and descriptors, and then stands for it: it passes signals on,
ends as it ends, and takes it along when it is killed.  Anything else it leaves to the real Python.

The program imports nothing but this module and the standard library, so that it starts in a few hundredths of a second.
"""

from __future__ import annotations

import atexit
import fcntl
import multiprocessing
import os
import random
import resource
import runpy
import signal
import sys
import threading
import traceback
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import reduction
from pathlib import Path

ROOT = Path(__file__).parents[2]
WORKER, ENGINE = "worker", "engine"
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
ABOVE = 700  # descriptors of a new process are parked above this number while they get their own

SCRIPT = """#!{python} -IS
import sys
sys.path.insert(0, {root!r})
from tests.support.fast_python import main
main({python!r}, {servers!r})
"""


def write_program(path: Path, servers: Mapping[str, Sequence[str]]) -> None:
    """Writes the program.  servers: for each kind of process, the addresses of servers that may fork it."""
    path.write_text(SCRIPT.format(python=sys.executable, root=str(ROOT), servers=dict(servers)))
    path.chmod(0o700)


def kind_of(arguments: Sequence[str], environ: Mapping[str, str]) -> str | None:
    """What Python was asked for by ``arguments``; None: neither a worker of Ray nor an engine."""
    if arguments and Path(arguments[0]).name in ("setup_worker.py", "default_worker.py"):
        return WORKER if any(Path(each).name == "default_worker.py" for each in arguments) else None
    # Of all processes that the package starts, only engines get this variable.
    return ENGINE if "--multiprocessing-fork" in arguments and "VLLM_NO_USAGE_STATS" in environ else None


@dataclass(frozen=True)
class Program:
    """What a forked process is to run; ``multiprocessing`` calls it in the place of a Process.

    kind: see ``kind_of``.  python: the real one.  program: the one that stands for the process.  arguments: Python's.
    environ, cwd, umask: the process's.  numbers: its open descriptors, in the order in which they are sent.
    """

    kind: str
    python: str
    program: str
    arguments: Sequence[str]
    environ: Mapping[str, str]
    cwd: str
    umask: int
    numbers: Sequence[int]

    def _bootstrap(self, parent_sentinel: int) -> int:
        from tests.support import forked

        self._take_descriptors(parent_sentinel)
        os.chdir(self.cwd)
        os.umask(self.umask)
        forked.become_fresh(self.environ)
        random.seed()
        sys.executable = self.python
        resource_tracker._resource_tracker._fd = None  # this process starts one of its own when it needs it
        if self.kind == WORKER:
            multiprocessing.set_executable(self.program)  # for the engines that it starts
        else:
            forked.fork_what_vllm_spawns()
        try:
            self._run()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:  # noqa: BLE001  as the interpreter does at its top level
            traceback.print_exc()
            code = 1
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        return code

    def _take_descriptors(self, parent_sentinel: int) -> None:
        """Gives the received descriptors their numbers, and ends this process when its stand-in is gone."""
        received = [parent_sentinel, *forkserver._forkserver._inherited_fds]  # type: ignore[attr-defined]
        parked = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, ABOVE) for each in received]
        for each in received:
            os.close(each)
        for number, each in zip(self.numbers, parked[1:], strict=True):
            os.dup2(each, number)
            os.close(each)
        threading.Thread(target=_end_with, args=(parked[0],), daemon=True).start()

    def _run(self) -> None:
        if self.kind == ENGINE:
            at = self.arguments.index("-c")
            sys.argv = ["-c", *self.arguments[at + 2 :]]
            sys.modules["__main__"] = main = types.ModuleType("__main__")
            exec(self.arguments[at + 1], main.__dict__)
            return
        script, *arguments = self.arguments
        if Path(script).name == "setup_worker.py":
            from ray._private.utils import update_envs
            from ray._private.workers import setup_worker

            # As setup_worker.py does, but that this process goes on where it would start Python once more.
            asked, (script, *arguments) = setup_worker.parser.parse_known_args(arguments)
            context = setup_worker.RuntimeEnvContext.deserialize(asked.serialized_runtime_env_context or "{}")
            update_envs(context.env_vars)
            forked_threads(context.env_vars)
        sys.argv = [script, *arguments]
        sys.path.insert(0, str(Path(script).parent))
        runpy.run_path(script, run_name="__main__")


def forked_threads(environ: Mapping[str, str]) -> None:
    """Torch read the number of its threads when it was imported."""
    if "OMP_NUM_THREADS" in environ:
        import torch

        torch.set_num_threads(int(environ["OMP_NUM_THREADS"]))


def _end_with(sentinel: int) -> None:
    os.read(sentinel, 1)  # nothing is ever sent: it returns when the other end is gone
    os.kill(os.getpid(), signal.SIGKILL)


class _Running(forkserver.ForkServer):
    """A server that another process has started."""

    def __init__(self, address: str) -> None:
        super().__init__()
        self._forkserver_address = address
        self._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)  # the new process gets it, and has no use for it

    def ensure_running(self) -> None:
        pass


def main(python: str, servers: Mapping[str, Sequence[str]]) -> None:
    """Becomes the real Python, or stands for a process of a server.  Never returns."""
    program, *arguments = sys.argv
    kind = kind_of(arguments, os.environ)
    if kind is None:
        os.execv(python, [python, *arguments])
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    umask = os.umask(0)
    os.umask(umask)
    numbers = [number for number in map(int, os.listdir("/proc/self/fd")) if _open(number)]
    asked = Program(kind, python, program, arguments, dict(os.environ), os.getcwd(), umask, numbers)
    addresses = servers[kind]
    resource_tracker.getfd = lambda: 0  # none is needed
    status, data = _Running(addresses[os.getpid() % len(addresses)]).connect_to_new_process(numbers)
    with open(os.dup(data), "wb") as file:
        reduction.dump({}, file)
        reduction.dump(asked, file)
    pid = forkserver.read_signed(status)
    for each in PASSED_ON:
        signal.signal(each, lambda number, _: os.kill(pid, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    code = forkserver.read_signed(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True
