"""What a program may try against other processes, files and the machine, one attack at a time.

Each is tried by a process that nobody confines first, to show that it is one, and then by a confined one; with all that
this kernel has, and with no more of Landlock than its first version, as older kernels have it.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from mcore_rl.config.reward import CodeConfig
from mcore_rl.rewards.confinement import libraries, run_confined, weaknesses

CONFIG = CodeConfig(timeout_s=60.0, memory_mib=512, output_kib=64)
pytestmark = pytest.mark.skipif(bool(weaknesses()), reason="; ".join(weaknesses()))
SECRET = "sk-the-value-of-a-key"

# Name -> statements that raise where they are refused.  PLACE: a folder of another sample's.  PARENT: who grades.
ATTACKS = {
    # Other processes
    "fork": "pid = os.fork()\nif pid == 0: os._exit(0)\nos.waitpid(pid, 0)",
    "double fork, which nobody would wait for": "if os.fork() == 0:\n    os.setsid(); os.fork(); os._exit(0)\n"
    "os.wait()",
    "vfork by number": "pid = ok(libc.syscall(FORK, 17, 0, 0, 0, 0))\nif pid == 0: os._exit(0)",
    "clone3": "pid = ok(libc.syscall(435, struct.pack('11Q', 0, 0, 0, 0, 17, 0, 0, 0, 0, 0, 0), 88))\n"
    "if pid == 0: os._exit(0)",
    "subprocess": "subprocess.run(['true'], check=True)",
    "shell": "assert_zero(os.system('true'))",
    "a set-uid program": "subprocess.run(['/bin/su', '--version'], check=True, stdout=subprocess.DEVNULL)",
    "multiprocessing": "import multiprocessing\np = multiprocessing.get_context('fork').Process(target=int)\n"
    "p.start(); p.join(); assert_zero(p.exitcode)",
    "signal to the parent": "os.kill(PARENT, 0)",
    "signal to all": "os.kill(-1, 0)",
    "signal to the group of the parent": "os.killpg(os.getpgid(PARENT), 0)",
    "signal by a descriptor of the parent": "signal.pidfd_send_signal(os.pidfd_open(PARENT), 0)",
    "signal by the end of a pipe": "fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, PARENT)",
    "limits of the parent": "resource.prlimit(PARENT, resource.RLIMIT_NOFILE)",
    "cores of the parent": "os.sched_setaffinity(PARENT, os.sched_getaffinity(PARENT))",
    "priority of the parent": "os.setpriority(os.PRIO_PROCESS, PARENT, os.getpriority(os.PRIO_PROCESS, PARENT))",
    "to outlive the grader": "ok(libc.prctl(1, 0, 0, 0, 0))",
    # Secrets
    "environment of the parent": "open(f'/proc/{PARENT}/environ', 'rb').read()",
    "environment of its own process": "open('/proc/self/environ', 'rb').read()",
    "key in its environment": "os.environ['SOME_API_KEY']",
    "command line of the parent": "open(f'/proc/{PARENT}/cmdline', 'rb').read()",
    "memory of the parent": "open(f'/proc/{PARENT}/mem', 'rb')",
    "memory of the parent by address": "mine = ctypes.create_string_buffer(8)\n"
    "ours = struct.pack('QQ', ctypes.addressof(mine), 8)\nthere = struct.pack('QQ', {address}, 8)\n"
    "ok(libc.process_vm_readv(PARENT, ours, 1, there, 1, 0))",
    "files that the parent has open": "os.readlink(f'/proc/{PARENT}/fd/0')",
    "a descriptor of the parent": "ok(libc.syscall(438, ok(libc.syscall(434, PARENT, 0)), 0, 0))",
    "comparing with the parent": "ok(libc.syscall(KCMP, PARENT, os.getpid(), 0, 0, 0))",
    "every process": "os.listdir('/proc')",
    "/etc/passwd": "open('/etc/passwd').read()",
    "a home": "os.listdir(os.path.expanduser('~'))",
    "the repository": "open({repository!r}).read()",
    "log of the kernel": "ok(libc.klogctl(3, ctypes.create_string_buffer(100), 100))",
    "keys of the kernel": "ok(libc.syscall(ADD_KEY, b'user', b'x', b'x', 1, -2))",
    # Files
    "reading another sample's file": "open(PLACE + '/theirs').read()",
    "reading it by way of ..": "open('/usr/lib/../..' + PLACE + '/theirs').read()",
    "reading it by an open folder": "os.open('theirs', os.O_RDONLY, dir_fd=os.open(PLACE, os.O_PATH))",
    "changing it": "open(PLACE + '/theirs', 'a').write('x')",
    "emptying it": "os.truncate(PLACE + '/theirs', 0)",
    "removing it": "os.remove(PLACE + '/remove')",
    "renaming it": "os.rename(PLACE + '/rename', PLACE + '/renamed')",
    "a new file": "open(PLACE + '/new', 'w')",
    "a sparse file": "os.truncate(os.open(PLACE + '/sparse', os.O_CREAT | os.O_RDWR), 2**40)",
    "a folder": "os.mkdir(PLACE + '/folder')",
    "a symbolic link": "os.symlink('/etc/passwd', PLACE + '/symlink')",
    "a hard link": "os.link(PLACE + '/theirs', PLACE + '/link')",
    "a named pipe": "os.mkfifo(PLACE + '/pipe')",
    "a file in shared memory": "os.close(os.open(SHARED, os.O_CREAT | os.O_RDWR)); os.remove(SHARED)",
    "a file in memory": "os.memfd_create('x')",
    "a file without a name": "os.open(PLACE, os.O_TMPFILE | os.O_RDWR)",
    "a temporary file": "import tempfile\ntempfile.TemporaryFile(dir=PLACE)",
    "a file among libraries": "open({library!r}, 'w').close(); os.remove({library!r})",
    "mode of a file": "os.chmod(PLACE + '/theirs', 0o600)",
    "times of a file": "os.utime(PLACE + '/theirs')",
    "flags of a file": "fcntl.ioctl(os.open(os.__file__, 0), 0x80086601, bytes(8))",
    "a lock that others wait for": "fcntl.flock(os.open(os.__file__, 0), fcntl.LOCK_SH)",
    "a lease that others wait for": "fcntl.fcntl(os.open(os.__file__, 0), fcntl.F_SETLEASE, fcntl.F_RDLCK)",
    "watching others' files": "ok(libc.inotify_add_watch(ok(libc.inotify_init1(0)), PLACE.encode(), 2))",
    "keystrokes to a terminal": "fcntl.ioctl(os.openpty()[1], 0x5412, b'x')",
    # Network
    "TCP": "socket.create_connection({tcp!r})",
    "UDP": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', {tcp!r})",
    "netlink": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
    "a socket in the file system, as vLLM has": "socket.socket(socket.AF_UNIX).connect(PLACE + '/stream')",
    "an abstract socket": "socket.socket(socket.AF_UNIX).connect({abstract!r})",
    "a datagram from one of a pair": "one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
    "one.sendto(b'x', PLACE + '/mail')",
    "a connection of one of a pair": "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].connect(PLACE + '/mail')",
    "an address for one of a pair": "socket.socketpair(socket.AF_UNIX)[0].bind({abstract!r} + '2')",
    # The machine
    "a ring of io_uring": "ok(libc.syscall(425, 8, bytes(120)))",
    "a ring of asynchronous reads": "ok(libc.syscall(IO_SETUP, 8, ctypes.byref(ctypes.c_ulong(0))))",
    "counters of the processor": "ok(libc.syscall(PERF, bytes([1, 0, 0, 0, 112]) + bytes(107), 0, -1, -1, 0))",
    "faults in its own hands": "ok(libc.syscall(USERFAULTFD, 1))",
    "a program for the kernel": "ok(libc.syscall(BPF, 0, struct.pack('IIIII28x', 2, 4, 4, 1, 0), 48))",
    "shared memory that stays": "ok(libc.shmctl(ok(libc.shmget(0, 4096, 0o1600)), 0, 0))",
    "pages that a pipe holds": "page = ctypes.create_string_buffer(8)\n"
    "ok(libc.vmsplice(os.pipe()[1], struct.pack('QQ', ctypes.addressof(page), 8), 1, 0))",
    "a larger pipe": "fcntl.fcntl(os.pipe()[1], 1031, 1 << 18)",
    "timers, which queue signals": "ok(libc.syscall(TIMER_CREATE, 0, 0, ctypes.byref(ctypes.c_int(0))))",
    "waiting for the disk": "fd = os.open(os.__file__, 0); os.fsync(fd)",
    "waiting for all disks": "ok(libc.syncfs(os.open(os.__file__, 0)))",
    "priority of its own": "os.nice(1)",
    "locked memory": "ok(libc.mlock(ctypes.create_string_buffer(8), 8))",
    "the machine's name": "socket.sethostname(socket.gethostname())",
    "namespaces of its own": "ok(libc.unshare(0x10000000))",  # from here on it has no rights outside
    "a mount": "ok(libc.unshare(0x20000)); ok(libc.mount(b'none', PLACE.encode(), b'tmpfs', 0, 0))",
    "another root": "os.chroot(PLACE)",
}
PROGRAM = """
import ctypes, fcntl, os, resource, signal, socket, struct, subprocess, sys
libc = ctypes.CDLL(None, use_errno=True)
PARENT, PLACE, SHARED = os.getppid(), {place!r}, f"/dev/shm/attack-{{os.getpid()}}"
X86 = os.uname().machine == "x86_64"
FORK, KCMP, ADD_KEY, IO_SETUP, PERF, USERFAULTFD, BPF, TIMER_CREATE = (
    (57, 312, 248, 206, 298, 323, 321, 222) if X86 else (220, 272, 217, 0, 241, 282, 280, 107))
def ok(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
def assert_zero(code):
    if code:
        raise OSError(code, "ended with this code")
for name, attack in {attacks!r}.items():
    try:
        exec(attack)
    except (OSError, ValueError, KeyError, subprocess.SubprocessError) as error:
        os.write(1, f"{{name}}: {{type(error).__name__}} {{error}}\\n".encode())
    else:
        os.write(1, f"{{name}}: DONE\\n".encode())
"""


@dataclass
class Ground:
    """A folder and sockets of somebody else's, and a program that attacks them."""

    place: Path
    program: str
    servers: list[socket.socket]


def ground(place: Path, stack: ExitStack) -> Ground:
    place.mkdir()
    for name in ("theirs", "remove", "rename"):
        (place / name).write_text(name)
    tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    abstract = f"\0mcore-rl-attack-{os.getpid()}-{place.name}"
    servers = [tcp]
    for kind, address in (
        (socket.SOCK_STREAM, str(place / "stream")),
        (socket.SOCK_STREAM, abstract),
        (socket.SOCK_DGRAM, str(place / "mail")),
    ):
        server = stack.enter_context(socket.socket(socket.AF_UNIX, kind))
        server.bind(address)
        if kind is socket.SOCK_STREAM:
            server.listen()
        servers.append(server)
    targets = {
        "address": id(servers),
        "repository": __file__,
        "library": str(Path(libraries()[0]) / f"attack_{os.getpid()}.py"),
        "tcp": tcp.getsockname(),
        "abstract": abstract,
    }
    attacks = {name: _filled(attack, targets) for name, attack in ATTACKS.items()}
    return Ground(place, PROGRAM.format(place=str(place), attacks=attacks), servers)


def _filled(attack: str, targets: dict[str, object]) -> str:
    for name, value in targets.items():
        attack = attack.replace(f"{{{name}!r}}", repr(value)).replace(f"{{{name}}}", repr(value))
    return attack


def read(printed: str) -> dict[str, str]:
    """Attack -> "DONE", or why it did not succeed."""
    answers = dict(line.split(": ", 1) for line in printed.splitlines())
    assert list(answers) == list(ATTACKS), "every attack was tried"
    return answers


@pytest.fixture(scope="module")
def unconfined(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What happens without confinement, in an environment with a key."""
    with ExitStack() as stack:
        field = ground(tmp_path_factory.mktemp("free") / "place", stack)
        answer = subprocess.run(
            [sys.executable, "-c", field.program],
            stdout=subprocess.PIPE,
            env={**os.environ, "SOME_API_KEY": SECRET},
            check=True,
            text=True,
            timeout=120,
        )
    return read(answer.stdout)


@pytest.fixture(scope="module", params=[99, 1], ids=["this Landlock", "the first Landlock"])
def confined(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The same in confinement; and that the ground is as it was."""
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOME_API_KEY", SECRET)
        field = ground(tmp_path_factory.mktemp("confined") / "place", stack)
        before = {path.name: path.lstat() for path in field.place.iterdir()}
        outcome = run_confined(field.program, CONFIG, landlock_abi=request.param)
        after = {path.name: path.lstat() for path in field.place.iterdir()}
        for stat in (*before.values(), *after.values()):
            assert stat.st_nlink == 1
        assert {n: (s.st_mode, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for n, s in before.items()} == {
            n: (s.st_mode, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for n, s in after.items()
        }
        for server in field.servers:
            server.setblocking(False)
            with pytest.raises(BlockingIOError):
                server.recv(1) if server.type is socket.SOCK_DGRAM else server.accept()
        assert SECRET not in outcome.stdout
        yield read(outcome.stdout)


@pytest.mark.parametrize("name", ATTACKS)
def test_it_is_refused(name: str, unconfined: dict[str, str], confined: dict[str, str]) -> None:
    assert confined[name] != "DONE"
    if unconfined[name] != "DONE":
        pytest.skip(f"this machine refuses it to everybody: {unconfined[name]}")
