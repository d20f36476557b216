"""The script that runs an untrusted program; ``confinement`` starts it in a process of its own, it is never imported.

It first confines its own process, layer after layer, and only then executes the program:

- resource limits: CPU time, address space, bytes of a file, open files, no core dump, no queued signals of timers
- capabilities: none, even if it runs as root; no new privileges
- Landlock (Linux 5.13 and later): nothing can be opened but Python's own libraries, read-only; no TCP; no signals out
- seccomp (x86-64 and aarch64): no process is started, no program executed, no socket opened but a pair of streams, no
  other process signalled, traced or renumbered, no file's mode, owner, times, locks or flags changed, none truncated or
  watched, no disk made to wait, no memory outside the limits asked for
- if Landlock or seccomp is missing: namespaces of its own for network and IPC if allowed, and a Python audit hook,
  which stops Python code but not C

It uses the standard library only and imports nothing of the package, whose files it can no longer open by then.
Landlock's first version is enough: what later versions add, seccomp refuses as well.  ``confinement`` limits threads.

Protocol: argv[1] is JSON (see ``main``).  The script writes the layers that hold to the status file, and closes it
before the program begins, so that no program can write there.  It writes each value that a step gives as a line of the
result file.
Linux header files: landlock.h, seccomp.h, bpf_common.h, audit.h, capability.h, prctl.h, sched.h.
"""

from __future__ import annotations

import builtins
import ctypes
import errno
import json
import os
import platform
import resource
import signal
import struct
import sys
import types
from contextlib import suppress
from typing import Any

PRELUDE = (  # names that answers to call-based problems use without importing them
    "import bisect, collections, functools, heapq, itertools, math, random, re, string, sys\n"
    "from collections import *\nfrom functools import *\nfrom heapq import *\nfrom itertools import *\n"
    "from typing import *\n"
)
MAX_OPEN_FILES = 64
KEPT_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
SYSTEM_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache")

PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 22, 38
CLONE_NEWUSER, CLONE_NEWNET, CLONE_NEWIPC, CLONE_THREAD = 0x10000000, 0x40000000, 0x08000000, 0x10000

# System calls: numbers on (x86-64, aarch64); None where there is no such call.
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
DENIED = {
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281),
    "socket": (41, 198), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "tkill": (200, 130), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424), "pidfd_open": (434, 434), "pidfd_getfd": (438, 438),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "process_madvise": (440, 440), "perf_event_open": (298, 241), "bpf": (321, 280), "userfaultfd": (323, 282),
    "connect": (42, 203), "bind": (49, 200), "syslog": (103, 116), "modify_ldt": (154, None),
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "open_by_handle_at": (304, 265),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "shmctl": (31, 195),
    # Pages in a pipe or a ring count in no address space; the number of rings is limited for the whole machine.
    "vmsplice": (278, 75), "io_setup": (206, 0),
    "shmat": (30, 196), "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180),
    "setpriority": (141, 140), "sched_setparam": (142, 118), "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274), "ioprio_set": (251, 30),
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452),
    "chown": (92, None), "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54),
    "utime": (132, None), "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88),
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "setxattrat": (463, 463),
    "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16), "removexattrat": (466, 466),
    "file_setattr": (469, 469), "truncate": (76, 45), "flock": (73, 32),
    # Watches what other processes do with files; the kernel limits the number of watches per user.
    "inotify_init": (253, None), "inotify_init1": (294, 26), "inotify_add_watch": (254, 27),
    "fanotify_init": (300, 262), "fanotify_mark": (301, 263), "statmount": (457, 457), "listmount": (458, 458),
    # They wait for the disk, also for what others write, and the process could not be ended meanwhile.
    "sync": (162, 81), "syncfs": (306, 267), "fsync": (74, 82), "fdatasync": (75, 83), "msync": (26, 227),
    "sync_file_range": (277, 84),
}  # fmt: skip
CLONE, CLONE3 = (56, 220), (435, 435)
OWN = -1  # a placeholder for this process's id
AF_UNIX, SOCK_STREAM, SOCK_NONBLOCK, SOCK_CLOEXEC = 1, 1, 0o4000, 0o2000000
# Allowed only if the argument of each index has one of the values: (numbers, {index: values}).
ALLOWED_FOR: dict[str, tuple[tuple[int, int], dict[int, tuple[int, ...]]]] = {
    "kill": ((62, 129), {0: (OWN,)}),
    "tgkill": ((234, 131), {0: (OWN,)}),
    "prlimit64": ((302, 261), {0: (0,)}),
    "sched_setaffinity": ((203, 122), {0: (0,)}),
    # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC, F_GETPIPE_SZ; refused: signal owners, leases, sizes
    "fcntl": ((72, 25), {1: (0, 1, 2, 3, 4, 1030, 1032)}),
    # TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX; refused: flags of files, terminals' input, signal owners
    "ioctl": ((16, 29), {1: (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)}),
    # PR_SET_NAME, PR_GET_NAME, PR_SET_VMA; refused: PR_SET_PDEATHSIG, which could make it outlive the grader
    "prctl": ((157, 167), {0: (15, 16, 0x53564D41)}),
    # Event loops wake themselves by one.  Only streams: a datagram socket could send to any address.
    "socketpair": (
        (53, 199),
        {
            0: (AF_UNIX,),
            1: tuple(SOCK_STREAM | more for more in (0, SOCK_NONBLOCK, SOCK_CLOEXEC, SOCK_NONBLOCK | SOCK_CLOEXEC)),
        },
    ),
}

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


def restrict_files(readable: list[str], newest_abi: int) -> bool:
    """Landlock: allows to open only files beneath ``readable``, for reading.  False if the kernel lacks Landlock.

    newest_abi: the newest version of Landlock to use.
    """
    create, add_rule, restrict = 444, 445, 446
    abi = min(libc.syscall(create, None, ctypes.c_size_t(0), 1), newest_abi)
    if abi < 1:
        return False
    read_file, read_dir, write_file = 1 << 2, 1 << 3, 1 << 1
    handled = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(abi, 16)) - 1
    attributes = struct.pack("QQQ", handled, 0b11, 0b11)[: 8 if abi < 4 else 16 if abi < 6 else 24]
    ruleset = check(libc.syscall(create, attributes, ctypes.c_size_t(len(attributes)), 0), "landlock_create_ruleset")
    for path in [*readable, *KEPT_DEVICES]:
        try:
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue  # not on this machine
        access = read_file | read_dir if os.path.isdir(path) else read_file
        access |= write_file if path in KEPT_DEVICES else 0
        check(libc.syscall(add_rule, ruleset, 1, struct.pack("=Qi", access, place), 0), f"landlock_add_rule {path}")
        os.close(place)
    check(libc.syscall(restrict, ruleset, 0), "landlock_restrict_self")
    os.close(ruleset)
    return True


def system_call_filter(column: int, architecture: int, pid: int) -> bytes:
    """The seccomp filter as classic BPF: refuses DENIED, restricts ALLOWED_FOR, lets clone make threads only.

    column: the architecture's column in these tables.  architecture: its AUDIT_ARCH number.  pid: this process.
    """
    load, jump_equal, jump_at_least, jump_bits, answer = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, kill, refuse = 0x7FFF0000, 0x80000000, 0x00050000 | errno.EPERM
    code: list[tuple[int, int, int, int]] = []

    def judge(numbers: tuple[int | None, int | None], block: list[tuple[int, int, int, int]]) -> None:
        number = numbers[column]
        if number is not None:
            code.extend([(jump_equal, 0, len(block), number), *block])

    code += [(load, 0, 0, 4), (jump_equal, 1, 0, architecture), (answer, 0, 0, kill), (load, 0, 0, 0)]
    if column == 0:  # x32, which has numbers of its own
        code += [(jump_at_least, 0, 1, 0x40000000), (answer, 0, 0, refuse)]
    for numbers in DENIED.values():
        judge(numbers, [(answer, 0, 0, refuse)])
    judge(CLONE3, [(answer, 0, 0, 0x00050000 | errno.ENOSYS)])  # its flags are in memory; libc then takes clone
    judge(CLONE, [(load, 0, 0, 16), (jump_bits, 1, 0, CLONE_THREAD), (answer, 0, 0, refuse), (answer, 0, 0, allow)])
    for some_numbers, conditions in ALLOWED_FOR.values():
        block: list[tuple[int, int, int, int]] = []
        for index, values in conditions.items():
            block.append((load, 0, 0, 16 + 8 * index))
            for left, value in zip(range(len(values), 0, -1), values, strict=True):
                block.append((jump_equal, left, 0, pid if value == OWN else value))
            block.append((answer, 0, 0, refuse))
        judge(some_numbers, [*block, (answer, 0, 0, allow)])
    code.append((answer, 0, 0, allow))
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)


def filter_system_calls() -> bool:
    """Installs the seccomp filter.  False if the kernel lacks it or the processor is neither x86-64 nor aarch64."""
    if platform.machine() not in ARCHITECTURES:
        return False
    code = system_call_filter(*ARCHITECTURES[platform.machine()], os.getpid())
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxQ", len(code) // 8, ctypes.addressof(buffer))
    return bool(libc.prctl(PR_SET_SECCOMP, 2, program, 0, 0) == 0)


def refuse_in_python(readable: list[str]) -> None:
    """Installs an audit hook for kernels without Landlock or seccomp.  It cannot be removed, but C code bypasses it."""
    refused = ("socket.", "subprocess.", "ctypes.", "shutil.", "os.fork", "os.exec", "os.spawn", "os.posix_spawn",
               "os.kill", "os.ch", "os.link", "os.symlink", "os.mk", "os.remove", "os.rename", "os.rmdir",
               "os.truncate", "os.utime", "os.setxattr", "os.removexattr", "os.system", "os.forkpty", "os.startfile",
               "signal.pthread_kill", "resource.prlimit")  # fmt: skip
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
        weak = platform.machine() not in ARCHITECTURES or libc.syscall(444, None, ctypes.c_size_t(0), 1) < 1
    if weak and "namespaces" in wanted and libc.unshare(CLONE_NEWUSER | CLONE_NEWNET | CLONE_NEWIPC) == 0:
        holds.append("namespaces")
    drop_capabilities()
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


def plain(value: object) -> object:
    """``value`` with instances of subclasses as built-in types, so that its ``repr`` is that of the equal literal."""
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            items = kind(plain(item) for item in value)
            return set(items) if kind is frozenset else items
    scalars: tuple[Any, ...] = (bool, int, float, complex, str, bytes)
    for scalar in scalars:
        if isinstance(value, scalar):
            return scalar(value)
    if type(value).__module__ == "numpy" and hasattr(value, "item") and hasattr(value, "ndim") and value.ndim == 0:
        return value.item()
    return value


def run(job: dict[str, object], result: int) -> None:
    """Executes the program, then the steps; writes a line with the repr of each value to the descriptor ``result``."""
    steps = job["steps"]
    assert isinstance(steps, list)
    module = types.ModuleType("solution" if steps else "__main__")
    sys.modules[module.__name__] = module
    namespace = module.__dict__
    namespace |= {"__builtins__": builtins, "exit": sys.exit, "quit": sys.exit}  # site, which defines them, is left out
    sys.argv[:] = ["program.py"]
    if steps:
        exec(PRELUDE, namespace)
    exec(compile(str(job["program"]), "program.py", "exec"), namespace)
    for verb, argument in steps:
        if verb == "execute":
            exec(argument, namespace)
            continue
        if verb == "call":
            name, arguments = argument
            function = namespace[name] if name in namespace else getattr(namespace["Solution"](), name)
            value = function(*arguments)
        else:
            value = eval(argument, namespace)
        os.write(result, json.dumps(repr(plain(value))).encode() + b"\n")


def main() -> None:
    """Confines this process and runs the job.

    argv[1] is a JSON object: parent (process id); job, status, result (file descriptors); libraries (folders); layers,
    landlock_abi; cpu_s, memory_bytes, output_bytes (the limits).
    """
    settings = json.loads(sys.argv[1])
    with open(settings["job"], "rb") as file:
        job = json.load(file)
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
    run(job, settings["result"])


if __name__ == "__main__":
    main()
