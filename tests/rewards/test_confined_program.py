"""The system call filter, run here by a reader of classic BPF, for both processors; its numbers, by Linux's headers."""

from __future__ import annotations

import errno
import re
import struct
from pathlib import Path

import pytest

from mcore_rl.rewards.confined_program import (
    ALLOWED_FOR,
    ARCHITECTURES,
    CLONE,
    CLONE3,
    CLONE_THREAD,
    DENIED,
    OWN,
    system_call_filter,
)

ALLOW, KILL, EPERM, ENOSYS = 0x7FFF0000, 0x80000000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
PID = 4321
HEADERS = {  # as far as this machine has them
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}
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
            case 0x35:
                place += if_true if loaded >= value else if_false
            case 0x45:
                place += if_true if loaded & value else if_false
            case _:
                raise AssertionError(kind)


@both
def test_denied_calls_are_refused_and_others_are_not(machine: str) -> None:
    column = ARCHITECTURES[machine][0]
    for name, numbers in DENIED.items():
        if numbers[column] is not None:
            assert verdict(machine, numbers[column]) == EPERM, name
    for number in {"x86_64": (0, 1, 3, 9, 12, 202, 257), "aarch64": (63, 64, 57, 222, 214, 98, 56)}[machine]:
        assert verdict(machine, number) == ALLOW  # read, write, close, mmap, brk, futex, openat


@both
def test_clone_makes_threads_only(machine: str) -> None:
    column = ARCHITECTURES[machine][0]
    assert verdict(machine, CLONE[column], CLONE_THREAD | 0x100) == ALLOW
    assert verdict(machine, CLONE[column], 17) == EPERM
    assert verdict(machine, CLONE3[column], CLONE_THREAD) == ENOSYS


@both
def test_calls_are_allowed_for_these_arguments_only(machine: str) -> None:
    column = ARCHITECTURES[machine][0]
    for name, (numbers, conditions) in ALLOWED_FOR.items():
        good = [0] * 6
        for index, values in conditions.items():
            good[index] = PID if values[0] == OWN else values[0]
        for index, values in conditions.items():
            own = [PID if value == OWN else value for value in values]
            for value in (*own, PID + 1, 5000, 8, 0x5412, 0xFFFFFFFF, 1 << 20):
                answer = verdict(machine, numbers[column], *good[:index], value, *good[index + 1 :])
                assert answer == (ALLOW if value in own else EPERM), (name, value)


@both
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("kill", (0, 9)),  # the group
        ("kill", (1, 9)),
        ("tgkill", (PID + 1, PID + 1, 9)),
        ("prlimit64", (PID, 7)),
        ("fcntl", (0, 8, 1)),  # F_SETOWN
        ("fcntl", (0, 10, 1)),  # F_SETSIG
        ("fcntl", (0, 1024, 1)),  # F_SETLEASE
        ("fcntl", (0, 1026, 1)),  # F_NOTIFY
        ("fcntl", (0, 1031, 1 << 20)),  # F_SETPIPE_SZ
        ("ioctl", (0, 0x5412)),  # TIOCSTI
        ("ioctl", (0, 0x40086602)),  # FS_IOC_SETFLAGS
        ("ioctl", (0, 0x40806685)),  # FS_IOC_ENABLE_VERITY
        ("prctl", (1, 0)),  # PR_SET_PDEATHSIG
        ("prctl", (4, 1)),  # PR_SET_DUMPABLE
        ("prctl", (62, 1)),  # PR_SCHED_CORE
        ("socketpair", (1, 2)),  # datagrams
        ("socketpair", (30, 1)),  # TIPC
    ],
)
def test_what_these_calls_could_do_to_others(machine: str, name: str, arguments: tuple[int, ...]) -> None:
    assert verdict(machine, ALLOWED_FOR[name][0][ARCHITECTURES[machine][0]], *arguments) == EPERM


@both
def test_other_ways_to_call_the_kernel_are_closed(machine: str) -> None:
    assert verdict(machine, 0, architecture=0x40000003) == KILL  # 32-bit x86, with numbers of its own
    if machine == "x86_64":
        assert verdict(machine, 0x40000000 | 41) == EPERM  # x32


@both
def test_the_numbers_are_those_of_linux(machine: str) -> None:
    if not HEADERS[machine].exists():
        pytest.skip(f"{HEADERS[machine]} is not on this machine")
    definitions = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", HEADERS[machine].read_text())
    known = {name: int(number) for name, number in definitions}
    column = ARCHITECTURES[machine][0]
    table = {name: numbers[column] for name, numbers in DENIED.items()}
    table |= {name: numbers[column] for name, (numbers, _) in ALLOWED_FOR.items()}
    table |= {"clone": CLONE[column], "clone3": CLONE3[column]}
    newer = {"setxattrat", "removexattrat", "file_setattr", "fchmodat2", "memfd_secret"}
    newer |= {"statmount", "listmount"}  # than some headers
    wrong = {name: number for name, number in table.items() if number != known.get(name) and name not in newer}
    assert wrong == {}
    assert all(known.get(name, table[name]) == table[name] for name in newer)
