"""Becomes bash in a cage: a process that can start no program, reach no network, change no file and signal nobody.

The layers are those of programs that models write (``mcore_rl.rewards.confined_program``), with other tables of system
calls, since a shell forks.  Landlock lets it open bash's own libraries and the scripts that it was given, and run bash
alone.  A file that it opens for writing is pretended: the filter gives it descriptor 0, which is /dev/null and which no
call closes, so that ``python3 ... > logs/run.log 2>&1`` goes on and nothing is written.

The kernel limits the processes of a user, and not root's: a root becomes a user without a name first, who may read what
root may.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import struct
from contextlib import suppress
from pathlib import Path

from mcore_rl.rewards.confined_program import (
    PR_SET_NO_NEW_PRIVS,
    PR_SET_PDEATHSIG,
    SYSTEM_LIBRARIES,
    check,
    drop_capabilities,
    install_filter,
    libc,
    limit_resources,
    restrict_files,
)
from mcore_rl.rewards.system_calls import (
    ALLOWED,
    ARCHITECTURES,
    CHECKED,
    ArgumentCondition,
    Bits,
    Numbers,
    OneOf,
    Pretended,
    system_call_filter,
)

RECORDS = 60  # the descriptor that functions of prologue.sh write to
BASH = "/bin/bash"
LOADERS = ("/lib64/ld-linux-x86-64.so.2", "/lib/ld-linux-aarch64.so.1")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
FORK = 0x01300011  # SIGCHLD, CLONE_CHILD_SETTID, CLONE_CHILD_CLEARTID, CLONE_PARENT_SETTID: what fork sets
NOBODY = 60000  # the first of the users that a root becomes, each of one process alone; containers map 65536
PR_SET_KEEPCAPS = 8
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_RAISE = 2
CAP_DAC_READ_SEARCH = 2
OPEN = "reads and writes what is open"
SHELL_ALLOWED: dict[str, dict[str, Numbers]] = {
    **ALLOWED,
    OPEN: {name: numbers for name, numbers in ALLOWED[OPEN].items() if not name.startswith("close")},
    "starts processes, and programs, of which Landlock allows bash alone; waits for them": {
        "fork": (57, None),
        "execve": (59, 221),
        "wait4": (61, 260),
        "arch_prctl": (158, None),
    },
    "its own folder and mask": {"chdir": (80, 49), "umask": (95, 166)},
}
SHELL_CHECKED: dict[str, tuple[Numbers, dict[int, ArgumentCondition], str]] = {
    **CHECKED,
    "open": (CHECKED["open"][0], {1: Pretended((WRITING, True))}, "for reading; for writing it is /dev/null"),
    "openat": (CHECKED["openat"][0], {2: Pretended((WRITING, True))}, "as open"),
    "close": (ALLOWED[OPEN]["close"], {0: Pretended((0, False))}, "all but 0"),
    "clone": (CHECKED["clone"][0], {0: Bits(((FORK, FORK), 0))}, "as fork"),
    "kill": (CHECKED["kill"][0], {1: OneOf((0,))}, "without a signal"),
}


def main(descriptor: int) -> None:
    """Confines this process and becomes bash; says first, through the socket, its process id or what is missing here.

    The job is a line of JSON from the socket: script (what bash is given), words (its $0, $1, ...), environment,
    readable (files), seconds, memory_bytes, processes.
    """
    with socket.socket(fileno=os.dup(descriptor)).makefile("rb") as lines:
        job = json.loads(lines.readline())
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.dup2(descriptor, RECORDS)
    machine = os.uname().machine
    limit_resources(job["seconds"], job["memory_bytes"], 0)
    limit_processes(job["processes"])
    runnable = tuple(os.path.realpath(path) for path in (BASH, *LOADERS))
    missing = "" if restrict_files([*job["readable"], *SYSTEM_LIBRARIES], 99, runnable) else "Landlock"
    if not missing:
        tables = (SHELL_ALLOWED, SHELL_CHECKED)
        held = machine in ARCHITECTURES and install_filter(
            system_call_filter(*ARCHITECTURES[machine], os.getpid(), *tables)
        )
        missing = "" if held else "seccomp"
    os.write(RECORDS, f"{missing or os.getpid()}\0".encode())
    if missing:
        os._exit(1)
    os.execve(BASH, [BASH, "--norc", "--noprofile", "-c", job["script"], *job["words"]], job["environment"])


def limit_processes(more: int) -> None:
    """Lets this process's user have ``more`` processes than there are, and takes the capabilities away."""
    is_root = os.geteuid() == 0
    user = NOBODY + os.getpid() % 5000 if is_root else os.geteuid()
    limit = _threads_of(user) + more
    resource.setrlimit(resource.RLIMIT_NPROC, (limit, limit))
    if not is_root:
        drop_capabilities()
        return
    check(libc.prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0), "PR_SET_KEEPCAPS")
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    reads = 1 << CAP_DAC_READ_SEARCH  # Landlock says what, and no other call that it allows is let through
    header = struct.pack("Ii", 0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
    check(libc.capset(header, struct.pack("IIIIII", reads, reads, reads, 0, 0, 0)), "capset")
    check(libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, CAP_DAC_READ_SEARCH, 0, 0), "PR_CAP_AMBIENT")
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    check(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "PR_SET_PDEATHSIG")  # which the new user unset


def _threads_of(user: int) -> int:
    """The threads of a user's processes."""
    count = 0
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended
            count += path.joinpath("task").stat().st_nlink - 2 if path.stat().st_uid == user else 0
    return count
