"""What a program may try against other processes, files and the machine, one attack at a time.

``tests/rewards/test_confinement_attacks.py`` tries them on this machine, and ``benchmarks/isolation.py`` as root, as a
user and in containers: first by a process that nobody confines, to show that it is an attack, and then by a confined
one.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

LIBC = ctypes.CDLL(None, use_errno=True)

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
    "emptying a library's file by reading it": "os.close(os.open({spare!r}, os.O_RDONLY | os.O_TRUNC))",
    "emptying it by appending": "os.close(os.open({spare!r}, os.O_RDWR | os.O_APPEND | os.O_TRUNC))",
    "emptying it as a new file": "ok(libc.creat({spare!r}.encode(), 0o600))",
    "emptying it with flags in memory": "ok(libc.syscall(437, -100, {spare!r}.encode(), struct.pack('3Q', "
    "os.O_TRUNC, 0, 0), 24))",
    "changing a library's file": "os.pwrite(os.open({spare!r}, os.O_WRONLY), b'x', 0)",
    "extended attributes of it": "os.setxattr({spare!r}, 'user.x', b'x')",
    "space on the disk of it": "os.posix_fallocate(os.open({spare!r}, os.O_RDWR), 0, 1 << 20)",
    "a path without opening it": "os.close(os.open(PLACE + '/theirs', os.O_PATH))",
    "a handle of a file": "ok(libc.name_to_handle_at(-100, PLACE.encode(), struct.pack('Ii', 120, 0) + bytes(120), "
    "bytes(4), 0))",
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
    "a descriptor for another process": "one, other = socket.socketpair()\n"
    "one.sendmsg([b'x'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack('i', 0))])",
    # Messages, semaphores and memory of others
    "a message of a queue": "ok(libc.msgrcv({queue}, ctypes.create_string_buffer(64), 16, 0, 0o4000))",
    "a message into a queue": "ok(libc.msgsnd({queue}, struct.pack('q', 1) + b'x' * 16, 16, 0o4000))",
    "removing a queue": "ok(libc.msgctl({queue}, 0, 0))",
    "a semaphore": "ok(libc.semop({semaphore}, struct.pack('3h', 0, 1, 0), 1))",
    "removing a semaphore": "ok(libc.semctl({semaphore}, 0, 0, 0))",
    "shared memory": "assert_zero(libc.shmat({memory}, 0, 0) in (-1, 0xFFFFFFFF))",
    "removing shared memory": "ok(libc.shmctl({memory}, 0, 0))",
    "a message of a POSIX queue": "ok(libc.mq_receive(ok(libc.mq_open({posix!r}.encode(), os.O_RDWR | os.O_NONBLOCK)), "
    "ctypes.create_string_buffer(64), 64, 0))",
    "a POSIX queue of its own": "own = {posix!r}.encode() + b'-own'\nok(libc.mq_open(own, 0o102, 0o600, 0)); "
    "libc.mq_unlink(own)",
    "removing a POSIX queue": "ok(libc.mq_unlink({posix!r}.encode()))",
    "a POSIX semaphore": "assert_zero(libc.sem_open({posix!r}.encode(), 0o100, 0o600, 1) == 0)",
    "removing a POSIX semaphore": "ok(libc.sem_unlink({posix!r}.encode()))",
    # The machine
    "a thread in namespaces of its own": "pid = ok(libc.syscall(CLONE, 0x10000000 | 17, 0, 0, 0, 0))\nif pid == 0: "
    "os._exit(0)",
    "a new session": "pid = os.fork()\nif pid == 0:\n    os.setsid(); os._exit(0)\nassert_zero(os.waitpid(pid, 0)[1])",
    "memory that no debugger sees": "ok(libc.syscall(447, 0))",
    "the core of its own at other places": "ok(libc.personality(0x0040000))",
    "a filter of system calls": "ok(libc.syscall(SECCOMP, 2, 0, struct.pack('I', 0)))",
    "rules of its own": "ok(libc.syscall(444, struct.pack('Q', 1), 8, 0))",
    "a timer as a descriptor": "ok(libc.timerfd_create(1, 0))",
    "signals as a descriptor": "ok(libc.signalfd(-1, bytes(8), 0))",
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
FORK, KCMP, ADD_KEY, IO_SETUP, PERF, USERFAULTFD, BPF, TIMER_CREATE, CLONE, SECCOMP = (
    (57, 312, 248, 206, 298, 323, 321, 222, 56, 317) if X86 else (220, 272, 217, 0, 241, 282, 280, 107, 220, 277))
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
    except (OSError, ValueError, KeyError, AttributeError, subprocess.SubprocessError) as error:
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
    spare: Path
    shared: SharedObjects

    def state(self) -> dict[str, object]:
        """What attacks could change, to be compared with what it was."""
        stats = {path.name: path.lstat() for path in (*self.place.iterdir(), self.spare)}
        objects: dict[str, object] = {
            name: (s.st_mode, s.st_size, s.st_nlink, s.st_mtime_ns, s.st_ctime_ns) for name, s in stats.items()
        }
        return objects | self.shared.state()


class SharedObjects:
    """A System V queue, semaphore and memory, and POSIX ones, with something in each; removed at the end."""

    def __init__(self, name: str, stack: ExitStack) -> None:
        self.posix = f"/{name}"
        self.queue = _checked(LIBC.msgget(0, 0o1600))
        stack.callback(LIBC.msgctl, self.queue, 0, 0)
        _checked(LIBC.msgsnd(self.queue, struct.pack("q", 1) + b"message".ljust(16), 16, 0))
        self.semaphore = _checked(LIBC.semget(0, 1, 0o1600))
        stack.callback(LIBC.semctl, self.semaphore, 0, 0, 0)
        self.memory = _checked(LIBC.shmget(0, 4096, 0o1600))
        stack.callback(LIBC.shmctl, self.memory, 0, 0)
        self._mail = LIBC.mq_open(self.posix.encode(), 0o4102, 0o600, struct.pack("8q", 0, 4, 64, 0, 0, 0, 0, 0))
        stack.callback(LIBC.mq_unlink, self.posix.encode())
        if self._mail >= 0:  # not every kernel has them
            stack.callback(os.close, self._mail)
            _checked(LIBC.mq_send(self._mail, b"message", 7, 0))
        LIBC.sem_open(self.posix.encode(), 0o102, 0o600, 1)
        stack.callback(LIBC.sem_unlink, self.posix.encode())

    def state(self) -> dict[str, object]:
        """How many messages there are, and so on; -1: it is gone."""
        buffer = ctypes.create_string_buffer(256)
        mail = struct.unpack("8q", buffer.raw[:64])[3] if LIBC.mq_getattr(self._mail, buffer) == 0 else -1
        attributes = ctypes.create_string_buffer(256)
        return {
            "queue": attributes.raw if LIBC.msgctl(self.queue, 2, attributes) == 0 else -1,
            "semaphore": LIBC.semctl(self.semaphore, 0, 12, 0),
            "memory": LIBC.shmctl(self.memory, 2, ctypes.create_string_buffer(256)),
            "mail": mail,
            "POSIX semaphore": Path(f"/dev/shm/sem.{self.posix[1:]}").exists(),
        }


def _checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def ground(place: Path, library: Path, stack: ExitStack) -> Ground:
    """A new folder ``place`` with what is attacked.  library: a folder from which programs may import."""
    place.mkdir()
    spare = library / f"spare_{os.getpid()}_{place.parent.name}.py"
    spare.write_text("spare = 1\n")
    stack.callback(spare.unlink)
    shared = SharedObjects(f"reward_attack_{os.getpid()}_{place.parent.name}", stack)
    for name in ("theirs", "remove", "rename"):
        (place / name).write_text(name)
    tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    abstract = f"\0mcore-rl-attack-{os.getpid()}-{place.parent.name}"
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
        "library": str(library / f"attack_{os.getpid()}.py"),
        "spare": str(spare),
        "queue": shared.queue,
        "semaphore": shared.semaphore,
        "memory": shared.memory,
        "posix": shared.posix,
        "tcp": tcp.getsockname(),
        "abstract": abstract,
    }
    attacks = {name: _filled(attack, targets) for name, attack in ATTACKS.items()}
    return Ground(place, PROGRAM.format(place=str(place), attacks=attacks), servers, spare, shared)


def _filled(attack: str, targets: dict[str, object]) -> str:
    for name, value in targets.items():
        attack = attack.replace(f"{{{name}!r}}", repr(value)).replace(f"{{{name}}}", repr(value))
    return attack


def read(printed: str) -> dict[str, str]:
    """Attack -> "DONE", or why it did not succeed."""
    answers = dict(line.split(": ", 1) for line in printed.splitlines())
    assert list(answers) == list(ATTACKS), "every attack was tried"
    return answers
