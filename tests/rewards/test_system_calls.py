"""The system call filter, run here by a reader of classic BPF, for both processors; its numbers, by Linux's headers."""

from __future__ import annotations

import errno
import re
import struct
from pathlib import Path

import pytest

from mcore_rl.rewards.system_calls import (
    ABSENT,
    ALLOWED,
    ARCHITECTURES,
    CHECKED,
    CLONE_THREAD,
    NEWEST,
    OWN,
    REFUSED,
    THREAD_FLAGS,
    Bits,
    Null,
    Numbers,
    OneOf,
    system_call_filter,
)
from tests.support.skips import not_installed
from tools.system_calls import document

ALLOW, KILL, EPERM, ENOSYS = 0x7FFF0000, 0x80000000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
PID = 4321
HEADERS = {  # as far as this machine has them
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}
PAGE = Path(__file__).parents[2] / "docs" / "system_calls.md"
ALLOWED_CALLS: dict[str, Numbers] = {name: numbers for family in ALLOWED.values() for name, numbers in family.items()}
TABLE: dict[str, Numbers] = (
    ALLOWED_CALLS
    | {name: numbers for name, (numbers, *_) in CHECKED.items()}
    | {name: numbers for name, (numbers, _) in ABSENT.items()}
)
O_TRUNC, O_PATH, O_TMPFILE, O_ASYNC = 0o1000, 0o10000000, 0o20000000, 0o20000
both = pytest.mark.parametrize("machine", ["x86_64", "aarch64"])


def verdict(machine: str, number: int | None, *arguments: int, architecture: int | None = None) -> int:
    """What the filter answers to a system call (``struct seccomp_data`` of seccomp.h)."""
    column, own = ARCHITECTURES[machine]
    assert number is not None
    padded = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack("IIQ6Q", number, architecture or own, 0, *padded)
    code = list(struct.iter_unpack("HBBI", system_call_filter(column, own, PID)))
    place, loaded = 0, 0
    while True:
        kind, if_true, if_false, value = code[place]
        place += 1
        match kind:
            case 0x20:
                (loaded,) = struct.unpack_from("I", data, value)
            case 0x06:
                return int(value)
            case 0x15:
                place += if_true if loaded == value else if_false
            case 0x25:
                place += if_true if loaded > value else if_false
            case 0x45:
                place += if_true if loaded & value else if_false
            case 0x54:
                loaded &= value
            case _:
                raise AssertionError(kind)


def number_of(name: str, machine: str) -> int | None:
    return TABLE[name][ARCHITECTURES[machine][0]]


def headers(machine: str) -> dict[str, int]:
    if not HEADERS[machine].exists():
        pytest.skip(not_installed(f"{HEADERS[machine]} on a machine of that kind"))
    definitions = re.findall(r"#define (__NR(?:3264)?_\w+)\s+(\d+)", HEADERS[machine].read_text())
    return {re.sub(r"^__NR(3264)?_", "", name): int(number) for name, number in definitions}


@both
def test_every_number_that_is_not_in_the_tables_is_refused(machine: str) -> None:
    """Of all numbers, with no arguments: those that are allowed stand in ALLOWED; new ones are not there at all."""
    column = ARCHITECTURES[machine][0]
    allowed = {numbers[column] for numbers in ALLOWED_CALLS.values()}
    checked = {numbers[column] for numbers, *_ in CHECKED.values()}
    absent = {numbers[column] for numbers, _ in ABSENT.values()}
    for number in range(NEWEST + 1):
        answer = verdict(machine, number)
        if number in allowed:
            assert answer == ALLOW, number
        elif number in absent:
            assert answer == ENOSYS, number
        elif number not in checked:
            assert answer == EPERM, number
    for number in (NEWEST + 1, NEWEST + 2, 500, 1000, 4096, 0x3FFFFFFF):
        assert verdict(machine, number) == ENOSYS, number


@both
def test_a_call_is_in_one_table_and_every_call_of_linux_in_one(machine: str) -> None:
    refused = [name for names in REFUSED.values() for name in names.split()]
    assert len(refused) == len(set(refused))
    assert TABLE.keys().isdisjoint(refused)
    assert len(ALLOWED_CALLS) + len(CHECKED) + len(ABSENT) == len(TABLE)
    # Names of 32-bit machines, of macros, and of calls that have another name on 64-bit ones.
    ours = {name.removesuffix("_time64").removesuffix("64") for name in (*TABLE, *refused)} | {*TABLE, *refused}
    macros = {"syscalls", "arch_specific_syscall", "fstatat", "sync_file_range2"}
    unknown = {
        name
        for name in headers(machine)
        if name not in ours and name.removesuffix("_time64").removesuffix("64") not in ours
    }
    assert unknown - macros == set()


@both
def test_clone_makes_threads_only(machine: str) -> None:
    clone = number_of("clone", machine)
    glibc = 0x100 | 0x200 | 0x400 | 0x800 | CLONE_THREAD | 0x40000 | 0x80000 | 0x100000 | 0x200000
    assert verdict(machine, clone, glibc) == ALLOW
    assert verdict(machine, clone, glibc | 0x400000) == ALLOW  # musl's
    assert verdict(machine, clone, 17) == EPERM
    for namespace in (0x20000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000):
        assert verdict(machine, clone, THREAD_FLAGS | namespace) == EPERM
    for tracing in (0x2000, 0x4000, 0x8000, 0x80000000):  # PTRACE, VFORK, PARENT, IO
        assert verdict(machine, clone, THREAD_FLAGS | tracing) == EPERM
    assert verdict(machine, number_of("clone3", machine), CLONE_THREAD) == ENOSYS


@both
def test_nothing_is_opened_to_be_emptied(machine: str) -> None:
    """Whatever Landlock can: its first two versions do not know of it."""
    places = {"open": 1, "openat": 2} if machine == "x86_64" else {"openat": 2}
    directory, no_follow, large = (
        (0o200000, 0o400000, 0o100000) if machine == "x86_64" else (0o40000, 0o100000, 0o400000)
    )
    for name, index in places.items():
        before = [0] * index
        for good in (0, 0o2000000, 0o2000000 | directory | 0o4000, 0o102, 0o3301 & ~O_TRUNC, no_follow, large):
            assert verdict(machine, number_of(name, machine), *before, good) == ALLOW, oct(good)
        for bad in (
            O_TRUNC,
            1 | O_TRUNC,
            0o102 | O_TRUNC,
            O_PATH,
            O_TMPFILE | directory,
            O_ASYNC,
            0o4010000,
            0o1000000,
            1 << 31,
        ):
            assert verdict(machine, number_of(name, machine), *before, bad) == EPERM, oct(bad)
    assert verdict(machine, number_of("openat2", machine)) == ENOSYS


@both
def test_calls_are_allowed_for_these_arguments_only(machine: str) -> None:
    column = ARCHITECTURES[machine][0]
    for name, (numbers, conditions, _) in CHECKED.items():
        if numbers[column] is None:
            continue
        good = [0] * 6
        for index, condition in conditions.items():
            if isinstance(condition, OneOf):
                good[index] = PID if condition[0] == OWN else condition[0]
            elif isinstance(condition, Bits):
                good[index] = condition[1]
        assert verdict(machine, numbers[column], *good) == ALLOW, name
        for index, condition in conditions.items():
            for value in (PID, PID + 1, 5000, 9, 0x5412, 0xFFFFFFFF, 1 << 21, 1 << 30, 1 << 32):
                if isinstance(condition, OneOf):
                    fits = value & 0xFFFFFFFF in [PID if each == OWN else each for each in condition]
                elif isinstance(condition, Bits):
                    fits = not value & 0xFFFFFFFF & ~condition[0][column] and value & condition[1] == condition[1]
                else:
                    assert isinstance(condition, Null)
                    fits = value == 0
                answer = verdict(machine, numbers[column], *good[:index], value, *good[index + 1 :])
                assert answer == (ALLOW if fits else EPERM), (name, value)


@both
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("kill", (0, 9)),  # the group
        ("kill", (1, 9)),
        ("kill", (0xFFFFFFFFFFFFFFFF, 9)),  # all
        ("tgkill", (PID + 1, PID + 1, 9)),
        ("prlimit64", (PID, 7)),
        ("fcntl", (0, 8, 1)),  # F_SETOWN
        ("fcntl", (0, 10, 1)),  # F_SETSIG
        ("fcntl", (0, 6, 1)),  # F_SETLK
        ("fcntl", (0, 1024, 1)),  # F_SETLEASE
        ("fcntl", (0, 1026, 1)),  # F_NOTIFY
        ("fcntl", (0, 1031, 1 << 20)),  # F_SETPIPE_SZ
        ("fcntl", (0, 1033, 1)),  # F_ADD_SEALS
        ("ioctl", (0, 0x5412)),  # TIOCSTI
        ("ioctl", (0, 0x40086602)),  # FS_IOC_SETFLAGS
        ("ioctl", (0, 0x40806685)),  # FS_IOC_ENABLE_VERITY
        ("prctl", (1, 0)),  # PR_SET_PDEATHSIG
        ("prctl", (4, 1)),  # PR_SET_DUMPABLE
        ("prctl", (62, 1)),  # PR_SCHED_CORE
        ("prctl", (0x59616D61, 1)),  # PR_SET_PTRACER
        ("madvise", (0, 4096, 100)),  # MADV_HWPOISON
        ("socketpair", (1, 2)),  # datagrams
        ("socketpair", (30, 1)),  # TIPC
        ("sendto", (0, 0, 0, 0, 4096)),
        ("sendto", (0, 0, 0, 0, 1 << 32)),
    ],
)
def test_what_these_calls_could_do_to_others(machine: str, name: str, arguments: tuple[int, ...]) -> None:
    assert verdict(machine, number_of(name, machine), *arguments) == EPERM


@both
def test_other_ways_to_call_the_kernel_are_closed(machine: str) -> None:
    assert verdict(machine, 0, architecture=0x40000003) == KILL  # 32-bit x86, with numbers of its own
    assert verdict(machine, 63, architecture=0x40000028) == KILL  # 32-bit ARM
    if machine == "x86_64":
        for number in (0, 41, 512, 520, 547):  # x32: read, socket, and its own, execve among them
            assert verdict(machine, 0x40000000 | number) == EPERM


@both
def test_the_numbers_are_those_of_linux(machine: str) -> None:
    known, column = headers(machine), ARCHITECTURES[machine][0]
    known |= {"newfstatat": known.get("newfstatat", known.get("fstatat", -1))}
    wrong = {name: numbers[column] for name, numbers in TABLE.items() if numbers[column] != known.get(name)}
    assert wrong == {}


def test_the_page_is_what_the_tables_say() -> None:
    assert PAGE.read_text() == document(), "write it anew: python tools/system_calls.py"
