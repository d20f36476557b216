"""Runs an untrusted program, or the tests that judge one; ``confinement`` starts it in a process of its own.

It first confines its own process, layer after layer, and only then executes what it was given:

- resource limits: CPU time, address space, bytes of a file, open files, no core dump, no queued signals of timers
- capabilities: none, even if it runs as root; no new privileges
- Landlock (Linux 5.13 and later): nothing can be opened but Python's own libraries, read-only; no TCP; no signals out
- seccomp (x86-64 and aarch64): the system calls of ``system_calls`` and no other
- if Landlock or seccomp is missing, weak confinement: namespaces of its own for network and IPC if allowed, and a
  Python audit hook, which stops Python code but not C

It uses the standard library only and imports nothing of the package, whose files it can no longer open by then; the
files ``system_calls``, ``plain_data``, ``wire`` and ``judge`` beside it are loaded by their paths before.  Landlock's
first version is enough: what later versions add, seccomp refuses as well.  ``confinement`` limits threads.

Protocol: one argument, JSON (see ``main``).  The process writes the layers that hold to the status file, and closes it
before the program begins, so that no program can write there.  It writes each value that a step gives as a line of the
result file (``plain_data``).  A judge writes its verdict there, in its own process, which no program enters.
Linux header files: landlock.h, seccomp.h, capability.h, prctl.h.
"""

from __future__ import annotations

import builtins
import ctypes
import json
import os
import resource
import signal
import struct
import sys
import types
from contextlib import suppress
from functools import cache
from importlib.machinery import SourceFileLoader

TYPE_CHECKING = False  # typing takes longer to import than the rest
if TYPE_CHECKING:
    from typing import Any

PRELUDE = (  # names that answers to call-based problems use without importing them
    "import bisect, collections, functools, heapq, itertools, math, random, re, string, sys\n"
    "from collections import *\nfrom functools import *\nfrom heapq import *\nfrom itertools import *\n"
    "from typing import *\n"
)
MAX_OPEN_FILES = 64
KEPT_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
SYSTEM_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache")

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_SET_NO_NEW_PRIVS = 38
CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000
CLONE_NEWIPC = 0x08000000

libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> int:
    """Returns ``result``, of a C call.  Raises the OSError of ``errno`` if it is negative; ``what``: the call."""
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
    return result


def limit_resources(cpu_s: int, memory_bytes: int, output_bytes: int) -> None:
    """Sets the kernel's resource limits, soft and hard, so that the program cannot raise them."""
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))  # first SIGXCPU, which shows the reason; then SIGKILL
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (output_bytes, output_bytes))
    resource.setrlimit(resource.RLIMIT_NOFILE, (MAX_OPEN_FILES, MAX_OPEN_FILES))
    for none in (resource.RLIMIT_MEMLOCK, resource.RLIMIT_MSGQUEUE, resource.RLIMIT_SIGPENDING):
        resource.setrlimit(none, (0, 0))
    # Not 0: with 0 the kernel still starts the program that core_pattern may name (fs/coredump.c).
    resource.setrlimit(resource.RLIMIT_CORE, (1, 1))
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # if memory runs out, the kernel kills this process instead of a trainer


def drop_capabilities() -> None:
    """Drops all capabilities for good, so that running as root allows nothing."""
    header = struct.pack("Ii", 0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
    check(libc.capset(header, bytes(24)), "capset")
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")


def restrict_files(readable: list[str], newest_abi: int, executable: tuple[str, ...] = ()) -> bool:
    """Landlock: allows to open only files beneath ``readable``, for reading.  False if the kernel lacks Landlock.

    newest_abi: the newest version of Landlock to use.
    executable: files that may be run, too.
    """
    create = 444
    add_rule = 445
    restrict = 446
    abi = min(libc.syscall(create, None, ctypes.c_size_t(0), 1), newest_abi)
    if abi < 1:
        return False
    execute = 1 << 0
    write_file = 1 << 1
    read_file = 1 << 2
    read_dir = 1 << 3
    handled = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(abi, 16)) - 1
    attributes = struct.pack("QQQ", handled, 0b11, 0b11)[: 8 if abi < 4 else 16 if abi < 6 else 24]
    ruleset = check(libc.syscall(create, attributes, ctypes.c_size_t(len(attributes)), 0), "landlock_create_ruleset")
    for path in [*readable, *executable, *KEPT_DEVICES]:
        try:
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue  # not on this machine
        access = read_file | read_dir if os.path.isdir(path) else read_file
        access |= write_file if path in KEPT_DEVICES else 0
        access |= execute if path in executable else 0
        check(libc.syscall(add_rule, ruleset, 1, struct.pack("=Qi", access, place), 0), f"landlock_add_rule {path}")
        os.close(place)
    check(libc.syscall(restrict, ruleset, 0), "landlock_restrict_self")
    os.close(ruleset)
    return True


def filter_system_calls() -> bool:
    """Installs the seccomp filter.  False if the kernel lacks it or the processor is neither x86-64 nor aarch64."""
    tables = sibling("system_calls")
    if os.uname().machine not in tables.ARCHITECTURES:
        return False
    return install_filter(tables.system_call_filter(*tables.ARCHITECTURES[os.uname().machine], os.getpid()))


def install_filter(code: bytes) -> bool:
    """Installs a seccomp filter, classic BPF.  False if the kernel lacks them."""
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxQ", len(code) // 8, ctypes.addressof(buffer))
    return bool(libc.prctl(PR_SET_SECCOMP, 2, program, 0, 0) == 0)


def refuse_in_python(readable: list[str]) -> None:
    """Installs an audit hook for kernels without Landlock or seccomp.  It cannot be removed, but C code bypasses it."""
    refused = (
        "socket.",
        "subprocess.",
        "ctypes.",
        "shutil.",
        "os.fork",
        "os.exec",
        "os.spawn",
        "os.posix_spawn",
        "os.kill",
        "os.ch",
        "os.link",
        "os.symlink",
        "os.mk",
        "os.remove",
        "os.rename",
        "os.rmdir",
        "os.truncate",
        "os.utime",
        "os.setxattr",
        "os.removexattr",
        "os.system",
        "os.forkpty",
        "os.startfile",
        "signal.pthread_kill",
        "resource.prlimit",
    )
    roots = tuple(f"{path.rstrip('/')}/" for path in readable)
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event.startswith(refused):
            raise PermissionError(f"{event} is not allowed here")
        if event == "open" and not isinstance(arguments[0], int):
            path, flags = os.path.realpath(os.fsdecode(arguments[0])), arguments[2]  # type: ignore[arg-type]
            if (not isinstance(flags, int)) or flags & writing or not path.startswith((*roots, *KEPT_DEVICES)):
                raise PermissionError(f"{path} is not open to programs")
        if event in ("os.listdir", "os.scandir") and not os.path.realpath(str(arguments[0] or ".")).startswith(roots):
            raise PermissionError(f"{event} is not allowed here")

    sys.addaudithook(hook)


def confine(settings: dict[str, object], readable: list[str]) -> list[str]:
    """Applies every layer of ``settings["layers"]`` that the machine has; returns the names of the layers that hold."""
    wanted = settings["layers"]
    assert isinstance(wanted, list)
    holds = []
    limit_resources(int(settings["cpu_s"]), int(settings["memory_bytes"]), int(settings["output_bytes"]))  # type: ignore[call-overload]
    if not {"landlock", "seccomp"} <= set(wanted):
        weak = True
    else:
        known = sibling("system_calls").ARCHITECTURES
        weak = os.uname().machine not in known or libc.syscall(444, None, ctypes.c_size_t(0), 1) < 1
    if weak and "namespaces" in wanted and libc.unshare(CLONE_NEWUSER | CLONE_NEWNET | CLONE_NEWIPC) == 0:
        holds.append("namespaces")
    drop_capabilities()
    if settings["role"] == "judge":
        check(
            libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "PR_SET_DUMPABLE"
        )  # no memory of it for the same user's programs
    # Only now: a change of credentials would unset it.
    check(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "PR_SET_PDEATHSIG")
    if os.getppid() != settings["parent"]:
        os._exit(1)
    if "landlock" in wanted and restrict_files(readable, int(settings["landlock_abi"])):  # type: ignore[call-overload]
        holds.append("landlock")
    if "seccomp" in wanted and filter_system_calls():
        holds.append("seccomp")
    if not {"landlock", "seccomp"} <= set(holds):
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
        holds.append("audit")
    return holds


def open_file(file: Any, mode: str = "r", *others: Any, **more: Any) -> Any:
    """``open``, also for ``open(os.devnull, "w")``: the filter lets no call empty a file, whatever the kernel has."""
    return open(file, mode.replace("w", "a") if file == os.devnull else mode, *others, **more)


def load(source: str, name: str) -> dict[str, Any]:
    """Executes the program as the module ``name``; returns its namespace."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    namespace = module.__dict__
    # exit and quit: site, which defines them, is left out
    namespace |= {"__builtins__": builtins, "exit": sys.exit, "quit": sys.exit, "open": open_file}
    sys.argv[:] = ["program.py"]
    if name != "__main__":
        exec(PRELUDE, namespace)
    exec(compile(source, "program.py", "exec"), namespace)
    return namespace


def run(job: dict[str, Any], result: int, wire: tuple[int, int] | None) -> None:
    """Executes the program, and then the steps: writes each value, as JSON, as a line of the descriptor ``result``.

    With ``wire`` it answers the judge instead.  With ``tests`` in the job it is judged here.
    """
    steps = job["steps"]
    tests = job.get("tests")
    data = sibling("plain_data")
    module = sibling("wire") if wire is not None else sibling("judge") if tests is not None else None
    namespace = load(str(job["program"]), "solution" if steps or module else "__main__")
    if module is not None and wire is not None:
        return module.serve(module.Wire(*wire), namespace)  # type: ignore[no-any-return]
    if module is not None:
        steps = [("verdict", tests)]
    for verb, argument in steps:
        if verb == "execute":
            exec(argument, namespace)
            continue
        if verb == "call":
            name, arguments = argument
            function = namespace[name] if name in namespace else getattr(namespace["Solution"](), name)
            value = function(*data.decode(arguments))
        elif verb == "verdict":
            assert module is not None
            value = module.judge(argument, None, namespace)["passed"]
        else:
            value = eval(argument, namespace)
        os.write(result, json.dumps(data.encode(value)).encode() + b"\n")


def judge(job: dict[str, Any], result: int, wire: tuple[int, int]) -> None:
    """Runs the tests against the program at the other end of ``wire``, and writes the verdict as JSON."""
    module = sibling("judge")
    known: dict[str, Any] = {}
    exec((PRELUDE if job["prelude"] else "") + "import math\nfrom math import isclose\n", known)
    known |= {name: value for name, value in vars(builtins).items() if name not in job["names"]}
    for name in job["names"]:
        known.pop(name, None)
    verdict = module.judge(job["tests"], module.ServedProgram(module.Wire(*wire)), known)
    os.write(result, json.dumps(verdict).encode() + b"\n")


@cache
def sibling(name: str) -> Any:
    """The file ``name`` beside this one, as a module; loaded before anything is confined."""
    path = os.path.join(os.path.dirname(__file__), f"{name}.py")
    module = sys.modules[f"confined_{name}"] = types.ModuleType(f"confined_{name}")
    SourceFileLoader(module.__name__, path).exec_module(module)
    return module


def main(words: str) -> None:
    """Confines this process and runs the job.

    words: a JSON object: role ("program" or "judge"); parent (process id); job, status, result (file descriptors); wire
    (descriptors to read from and to write to, or null); libraries (folders); layers, landlock_abi; cpu_s, memory_bytes,
    output_bytes (the limits).
    """
    settings = json.loads(words)
    with open(settings["job"], "rb") as file:
        job = json.load(file)
    used = ["wire", *(["judge"] if "tests" in job else [])] if settings["wire"] or "tests" in job else []
    for name in ("system_calls", "plain_data", *used):
        sibling(name)
    libraries = [os.path.realpath(path) for path in settings["libraries"]]
    sys.path.extend(path for path in settings["libraries"] if path not in sys.path)
    sys.stdin, sys.stdout  # noqa: B018  created now, while they still can be
    sys.set_int_max_str_digits(0)
    os.chdir("/")
    readable = [*libraries, *SYSTEM_LIBRARIES]
    holds = confine(settings, readable)
    os.write(settings["status"], json.dumps(holds).encode())
    os.close(settings["status"])
    if "audit" in holds:
        refuse_in_python([os.path.realpath(path) for path in readable])
    (judge if settings["role"] == "judge" else run)(job, settings["result"], settings["wire"])
