"""Programs that mean harm: what each may not do is tried, by Python and past Python, and the machine is looked at."""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path

import psutil
import pytest

from mcore_rl.config.reward import CodeConfig
from mcore_rl.rewards import confinement
from mcore_rl.rewards.confinement import (
    STRONG,
    ConfinementError,
    Ending,
    Outcome,
    libraries,
    run_confined,
    run_judged,
    weaknesses,
)
from tests.support.skips import KERNEL

CONFIG = CodeConfig(timeout_s=20.0, memory_mib=512, output_kib=4)
SHORT = CodeConfig(timeout_s=0.5, memory_mib=512, output_kib=4)
needs_kernel = pytest.mark.skipif(bool(weaknesses()), reason=KERNEL + "; ".join(weaknesses()))
# Tries each line of `tries` and prints those that were not refused.
TRY = """
import ctypes, fcntl, os, signal, socket, struct, sys, threading
libc = ctypes.CDLL(None, use_errno=True)
PARENT = os.getppid()
def ok(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused")
for line in {tries!r}:
    try:
        exec(line)
    except (OSError, ValueError) as error:
        continue
    print("NOT REFUSED:", line)
print("all tried")
"""


def attempt(*tries: str, **kwargs: object) -> Outcome:
    return run_confined(TRY.format(tries=tries), CONFIG, **kwargs)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def nothing_left() -> object:
    """No test leaves a process behind."""
    before = set(psutil.Process().children(recursive=True))  # of other tests: multiprocessing's resource tracker
    yield
    assert set(psutil.Process().children(recursive=True)) <= before


def test_a_script_reads_and_prints() -> None:
    outcome = run_confined("print(int(input()) + 1)", CONFIG, stdin="4\n")
    assert (outcome.ending, outcome.stdout, outcome.values, outcome.message) == (Ending.finished, "5\n", (), "")


def test_steps_give_values_as_far_as_they_come() -> None:
    steps = [("execute", "y = f(1)"), ("value", "[y, 'ü']"), ("call", ("f", [2])), ("value", "1 / 0"), ("value", "3")]
    outcome = run_confined("def f(x):\n    print('noise')\n    return x + 1", CONFIG, steps=steps)
    assert outcome.ending is Ending.failed
    assert outcome.values == ([2, "ü"], 3)
    assert outcome.message == "ZeroDivisionError: division by zero"


def test_scripts_are_main_and_modules_are_not() -> None:
    program = "print(__name__)"
    assert run_confined(program, CONFIG).stdout == "__main__\n"
    assert run_confined(program, CONFIG, steps=[("value", "1")]).stdout == "solution\n"


@pytest.mark.parametrize(
    "program",
    [
        "import dataclasses, typing\n@dataclasses.dataclass\nclass A:\n    x: 'int' = 3\nprint(A().x)",
        "import threading\nt = threading.Thread(target=print, args=(3,)); t.start(); t.join()",
        "import asyncio\nasync def f(): print(3)\nasyncio.run(f())",
        "import numpy\nprint(int(numpy.ones((3, 3)).sum()) // 3)",
        "import sys\nfor line in sys.stdin: print(int(line))",
        "import os\nwith open(os.devnull, 'w') as f: print(5, file=f)\nprint(3)",
        "print(open(0).read().strip())",
        "import random, tempfile, datetime, decimal, fractions, heapq, bisect, math, re\nprint(3)",
        "import sys\nsys.setrecursionlimit(10**6)\ndef f(n): return n and f(n - 1)\nf(20000)\nprint(3)",
        "print(3)\nexit()",
    ],
)
def test_what_honest_programs_do_works(program: str) -> None:
    outcome = run_confined(program, CONFIG, stdin="3\n")
    assert (outcome.ending, outcome.stdout, outcome.message) == (Ending.finished, "3\n", "")


@pytest.mark.parametrize("program", ["while True: pass", "import time; time.sleep(600)", "input()\nwhile True: pass"])
def test_a_loop_and_a_sleep_end_at_the_limit(program: str) -> None:
    assert run_confined(program, SHORT, stdin="1").ending is Ending.timeout


def test_processor_time_is_limited_by_the_kernel_too() -> None:
    """Also where nobody waits for the process: by itself, at a limit that tells why and one that ends it."""
    program = "import resource\nprint(resource.getrlimit(resource.RLIMIT_CPU))"
    assert run_confined(program, CodeConfig(timeout_s=2.5)).stdout == "(3, 4)\n"


@pytest.mark.parametrize(
    "program",
    [
        "x = bytearray(10**9)",
        "x = []\nwhile True: x.append(bytes(10**7))",
        "import mmap\nmmap.mmap(-1, 10**9)",
        "x = 'x' * 10**9",
    ],
)
def test_memory_is_limited(program: str) -> None:
    outcome = run_confined(program, CONFIG)
    assert outcome.ending is Ending.failed
    assert "Memory" in outcome.message or "Cannot allocate" in outcome.message


@pytest.mark.parametrize(
    "program",
    [
        "while True: print('x')",
        "print('x' * 10**8)",
        "import os\nwhile True: os.write(1, b'x' * 1000)",
        "import sys\nsys.stdout.write('x' * 10**6)",
        "import os\nos.pwrite(1, b'x', 10**12)",
    ],
)
def test_output_is_limited(program: str) -> None:
    outcome = run_confined(program, CONFIG)
    assert outcome.ending is Ending.failed
    assert len(outcome.stdout) <= 4096
    assert "File too large" in outcome.message


def test_a_program_that_swallows_its_errors_and_goes_on_ends_at_the_limit() -> None:
    program = "while True:\n    try: print('x' * 1000, flush=True)\n    except BaseException: pass"
    outcome = run_confined(program, SHORT)
    assert outcome.ending is Ending.timeout
    assert len(outcome.stdout) <= 4096


@needs_kernel
def test_no_process_is_started() -> None:
    outcome = attempt(
        "os.fork()",
        "ok(libc.fork())",
        "ok(libc.vfork())",
        "ok(libc.syscall(57 if sys.maxsize and os.uname().machine == 'x86_64' else 435, 0, 0))",
        "os.system('true') and ok(-1)",
        "os.execv('/bin/true', ['true'])",
        "os.posix_spawn('/bin/true', ['true'], {})",
        "__import__('subprocess').run(['true'])",
        "__import__('multiprocessing').Pool(2)",
        "os.openpty() and os.forkpty()",
    )
    assert outcome.stdout == "all tried\n"


@needs_kernel
def test_a_fork_bomb_gets_nowhere() -> None:
    outcome = run_confined("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", SHORT)
    assert outcome.ending is Ending.timeout


@needs_kernel
def test_no_other_process_is_touched() -> None:
    outcome = attempt(
        "os.kill(PARENT, 0)",
        "os.kill(PARENT, signal.SIGCONT)",
        "ok(libc.kill(PARENT, 0))",
        "os.kill(-1, signal.SIGCONT)",
        "os.killpg(os.getpgid(PARENT), 0)",
        "os.pidfd_open(PARENT)",
        "fcntl.fcntl(0, fcntl.F_SETOWN, PARENT)",
        "ok(libc.ptrace(16, PARENT, 0, 0))",
        "ok(libc.process_vm_readv(PARENT, bytes(16), 1, bytes(16), 1, 0))",
        "open(f'/proc/{PARENT}/mem', 'rb')",
        "open(f'/proc/{PARENT}/cmdline', 'rb')",
        "os.setpriority(os.PRIO_PROCESS, PARENT, 5)",
        "os.sched_setaffinity(PARENT, {0})",
        "__import__('resource').prlimit(PARENT, 7, (64, 64))",
        "ok(libc.prctl(1, 0, 0, 0, 0))",  # to outlive the grader
    )
    assert outcome.stdout == "all tried\n"
    assert run_confined("import os\nos.kill(os.getpid(), 0)\nos.abort()", CONFIG).ending is Ending.failed


@needs_kernel
def test_no_file_is_opened_written_or_changed(tmp_path: Path) -> None:
    secret, target = tmp_path / "secret", tmp_path / "target"
    secret.write_text("outputs")
    before = secret.stat()
    outcome = attempt(
        f"open({str(secret)!r})",
        f"open({str(secret)!r}, 'w')",
        f"open({str(target)!r}, 'w')",
        f"ok(libc.open({str(secret).encode()!r}, 0))",
        f"ok(libc.creat({str(target).encode()!r}, 0o600))",
        f"os.listdir({str(tmp_path)!r})",
        f"os.remove({str(secret)!r})",
        f"os.rename({str(secret)!r}, {str(target)!r})",
        f"os.link({str(secret)!r}, {str(target)!r})",
        f"os.symlink('x', {str(target)!r})",
        f"os.mkdir({str(target)!r})",
        f"os.mkfifo({str(target)!r})",
        f"os.truncate({str(secret)!r}, 0)",
        f"os.chmod({str(secret)!r}, 0o777)",
        f"os.utime({str(secret)!r}, (0, 0))",
        f"os.chown({str(secret)!r}, -1, -1)",
        f"os.setxattr({str(secret)!r}, 'user.x', b'1')",
        "open('x', 'w')",
        "open('/tmp/x', 'w')",
        "open('/dev/shm/x', 'w')",
        "os.memfd_create('x')",
        "open('/etc/passwd')",
        f"open({__file__!r})",
        f"open({str(Path(libraries()[0]) / 'x.py')!r}, 'w')",
        "os.chroot('/tmp')",
        "ok(libc.unshare(0x10000000))",
        "ok(libc.mount(b'none', b'/tmp', b'tmpfs', 0, 0))",
    )
    assert outcome.stdout == "all tried\n"
    assert (secret.read_text(), target.exists(), secret.stat().st_mode) == ("outputs", False, before.st_mode)
    assert secret.stat().st_mtime == before.st_mtime
    assert run_confined("import mcore_rl", CONFIG).message.startswith("ModuleNotFoundError")


@needs_kernel
def test_nothing_is_reached_over_the_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = server.getsockname()
        server.settimeout(0)
        outcome = attempt(
            f"socket.create_connection({place!r})",
            "socket.socket()",
            "socket.socket(socket.AF_INET, socket.SOCK_DGRAM)",
            "socket.socket(socket.AF_UNIX)",
            "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
            "ok(libc.socket(2, 1, 0))",
            "ok(libc.syscall(425, 8, bytes(120)))",  # io_uring, which has sockets of its own
        )
        with pytest.raises(BlockingIOError):
            server.accept()
    assert outcome.stdout == "all tried\n"


def test_limits_cannot_be_raised_and_nothing_of_ours_is_inherited() -> None:
    outcome = attempt(
        "__import__('resource').setrlimit(9, (-1, -1))",
        "__import__('resource').setrlimit(1, (10**9, 10**9))",
        "os.setuid(0) if os.getuid() else ok(-1)",
        'exec(\'assert set(os.environ) <= {"PYTHONHASHSEED", "OPENBLAS_NUM_THREADS", '
        '"OMP_NUM_THREADS", "LANG", "LC_CTYPE"}, list(os.environ)\\nraise OSError\')',
    )
    assert (outcome.ending, outcome.stdout) == (Ending.finished, "all tried\n")
    program = """
import os
found = []
for descriptor in range(3, 1024):
    try: os.fstat(descriptor)
    except OSError: continue
    found.append(descriptor)
print(len(found))
"""
    with open(__file__) as file:
        os.set_inheritable(file.fileno(), True)
        assert run_confined(program, CONFIG).stdout == "1\n", "where its result goes, and nothing else"


def test_a_program_that_tampers_with_the_result_harms_only_itself() -> None:
    program = """
import os
for descriptor in range(3, 64):
    try:
        os.write(descriptor, b'{"a": [\\xff\\n' + b"[" * 3000 + b"\\n")
    except OSError: pass
def f(): return 1
"""
    outcome = run_confined(program, CONFIG, steps=[("call", ("f", []))])
    assert isinstance(outcome, Outcome)


@needs_kernel
def test_a_program_cannot_speak_for_what_confines_it() -> None:
    """It can empty every file that it has, and say what it likes: what holds was said before it began."""
    program = """
import os
for descriptor in range(64):
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, b'["audit"]\\n', 0)
    except OSError: pass
os._exit(0)
"""
    outcome = run_confined(program, CONFIG)
    assert (outcome.ending, set(outcome.layers)) == (Ending.finished, STRONG)


def test_a_machine_where_nothing_can_be_run_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ending = (sys.executable, "-c", "raise MemoryError('before it was confined')")
    monkeypatch.setattr(confinement, "_interpreter", lambda: ending)
    with pytest.raises(ConfinementError, match=r"(?s)no program can be run here .*MemoryError: before it was confined"):
        run_confined("", CONFIG)
    with pytest.raises(ConfinementError, match=r"(?s)no program can be run here .*MemoryError: before it was confined"):
        run_judged("", "", (), CONFIG)


@pytest.mark.parametrize("layers", [["landlock"], ["seccomp"], ["namespaces"], []])
def test_without_the_kernel_python_code_is_still_refused(layers: list[str], tmp_path: Path) -> None:
    """The audit hook; what goes past Python is not claimed."""
    target = tmp_path / "target"
    outcome = run_confined("print(3)", CONFIG, layers=layers)
    assert outcome.stdout == "3\n"
    assert outcome.layers[-1] == "audit"
    assert not STRONG <= set(outcome.layers)
    tries = [
        "os.fork()",
        "os.kill(PARENT, 0)",
        "socket.create_connection(('127.0.0.1', 9))",
        "open('/etc/passwd')",
        f"open({str(target)!r}, 'w')",
        f"os.mkdir({str(target)!r})",
        "os.listdir('/')",
        "__import__('subprocess').run(['true'])",
        "os.system('true')",
    ]
    program = TRY.format(tries=tries).replace("libc = ctypes.CDLL(None, use_errno=True)", "")
    assert run_confined(program, CONFIG, layers=layers).stdout == "all tried\n"
    assert not target.exists()


def fields(status: Path) -> dict[str, str]:
    return dict(line.split(":\t", 1) for line in status.read_text().splitlines() if ":\t" in line)


@needs_kernel
def test_the_process_has_no_rights_and_dies_with_the_one_that_grades(tmp_path: Path) -> None:
    """A grader killed in the middle leaves no program running, although nobody waits for it any more."""
    pid = os.fork()
    if pid == 0:
        run_confined("import time; time.sleep(600)", CodeConfig(timeout_s=600.0))
        os._exit(0)
    try:
        while not (children := psutil.Process(pid).children()):
            time.sleep(0.01)
        status = Path(f"/proc/{children[0].pid}/status")
        while int(fields(status)["Seccomp_filters"]) <= int(fields(Path("/proc/self/status"))["Seccomp_filters"]):
            time.sleep(0.01)  # until the last layer is on
        said = fields(status)
        assert {said[name] for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {"0" * 16}, "also for root"
        assert said["NoNewPrivs"] == "1"
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    assert psutil.wait_procs(children, timeout=60)[1] == []
