"""The system calls that an untrusted program may make, and the seccomp filter made from them.

The filter is an allowlist: a call that stands in none of these tables is refused with EPERM, and a call that is newer
than the tables is answered with ENOSYS, as an older kernel answers it.  Arguments are checked where they are values;
what a pointer points to, no filter can see, so calls that take their flags by pointer are answered with ENOSYS.

- ALLOWED: with any arguments.  CHECKED: with certain arguments only.  ABSENT: ENOSYS, so that libraries take an older
  call.
- REFUSED: every other call, by what it could do.  No table of numbers is needed for these; docs/system_calls.md lists
  them.

``confined_program`` loads this file by its path, before it confines itself; it imports almost nothing, for speed.
Sources: the kernel's unistd_64.h and asm-generic/unistd.h, seccomp.h, bpf_common.h, audit.h, sched.h, fcntl.h.
"""

from __future__ import annotations

import errno
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

Numbers = tuple[int | None, int | None]  # on (x86-64, aarch64); None: the processor has no such call
# Column in these tables, and AUDIT_ARCH number.
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
NEWEST = 469  # the newest call that these tables know: file_setattr, Linux 6.17
X32 = 0x40000000  # the bit of x32's numbers

ALLOWED: dict[str, dict[str, Numbers]] = {
    "reads and writes what is open": {
        "read": (0, 63), "readv": (19, 65), "pread64": (17, 67), "preadv": (295, 69),
        "write": (1, 64), "writev": (20, 66), "pwrite64": (18, 68), "pwritev": (296, 70),
        "lseek": (8, 62), "close": (3, 57), "close_range": (436, 436), "fstat": (5, 80), "getdents64": (217, 61),
    },
    "sees names; Landlock says what can be opened": {
        "stat": (4, None), "lstat": (6, None), "newfstatat": (262, 79), "statx": (332, 291),
        "access": (21, None), "faccessat": (269, 48), "faccessat2": (439, 439),
        "readlink": (89, None), "readlinkat": (267, 78), "getcwd": (79, 17),
    },
    "its own memory, which RLIMIT_AS limits": {
        "brk": (12, 214), "mmap": (9, 222), "munmap": (11, 215), "mremap": (25, 216), "mprotect": (10, 226),
    },
    "its own descriptors, pipes and waiting for them": {
        "dup": (32, 23), "dup2": (33, None), "dup3": (292, 24), "pipe": (22, None), "pipe2": (293, 59),
        "poll": (7, None), "ppoll": (271, 73), "select": (23, None), "pselect6": (270, 72),
        "epoll_create": (213, None), "epoll_create1": (291, 20), "epoll_ctl": (233, 21), "epoll_wait": (232, None),
        "epoll_pwait": (281, 22), "eventfd2": (290, 19),
        "recvfrom": (45, 207), "shutdown": (48, 210), "getsockname": (51, 204), "getsockopt": (55, 209),
    },
    "its own threads": {
        "futex": (202, 98), "set_robust_list": (273, 99), "rseq": (334, 293), "set_tid_address": (218, 96),
        "sched_yield": (24, 124), "exit": (60, 93), "exit_group": (231, 94), "restart_syscall": (219, 128),
    },
    "its own signals": {
        "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "sigaltstack": (131, 132),
        "rt_sigsuspend": (130, 133), "rt_sigpending": (127, 136), "rt_sigtimedwait": (128, 137),
        "pause": (34, None), "alarm": (37, None), "getitimer": (36, 102), "setitimer": (38, 103),
    },
    "clocks, randomness, and facts about itself and the machine": {
        "clock_gettime": (228, 113), "clock_getres": (229, 114), "clock_nanosleep": (230, 115), "nanosleep": (35, 101),
        "gettimeofday": (96, 169), "time": (201, None), "times": (100, 153), "getrusage": (98, 165),
        "getrandom": (318, 278), "getpid": (39, 172), "gettid": (186, 178), "getppid": (110, 173),
        "getpgrp": (111, None), "getuid": (102, 174), "geteuid": (107, 175), "getgid": (104, 176),
        "getegid": (108, 177),
        "getgroups": (115, 158), "uname": (63, 160), "sysinfo": (99, 179), "getcpu": (309, 168),
        "getrlimit": (97, 163), "setrlimit": (160, 164),
    },
}  # fmt: skip

OWN = -1  # stands for this process's id


class OneOf(tuple[int, ...]):
    """The argument has one of these values."""


class Bits(tuple[tuple[int, int], int]):
    """(allowed on (x86-64, aarch64), required): the argument has no bit that is not allowed, and all required ones."""


class Null:
    """The argument is a null pointer."""


class Pretended(tuple[int, bool]):
    """(a value, whether it is bits): where the argument is the value, or has any of the bits, the call is pretended.

    It is not made, and gives 0: a descriptor that is open, or success.
    """


ArgumentCondition = OneOf | Bits | Null | Pretended


AF_UNIX = 1
SOCK_STREAM = 1
SOCK_NONBLOCK = 0o4000
SOCK_CLOEXEC = 0o2000000
STREAMS = OneOf(SOCK_STREAM | more for more in (0, SOCK_NONBLOCK, SOCK_CLOEXEC, SOCK_NONBLOCK | SOCK_CLOEXEC))
CLONE_THREAD = 0x10000
# CLONE_VM, FS, FILES, SIGHAND, THREAD, SYSVSEM, SETTLS, PARENT_SETTID, CHILD_CLEARTID, DETACHED (musl)
THREAD_FLAGS = 0x100 | 0x200 | 0x400 | 0x800 | CLONE_THREAD | 0x40000 | 0x80000 | 0x100000 | 0x200000 | 0x400000
# access mode, CREAT, EXCL, NOCTTY, APPEND, NONBLOCK, CLOEXEC; LARGEFILE, DIRECTORY, NOFOLLOW
OPEN_FLAGS = 3 | 0o100 | 0o200 | 0o400 | 0o2000 | 0o4000 | 0o2000000
OPENING = Bits(((OPEN_FLAGS | 0o700000, OPEN_FLAGS | 0o540000), 0))
# Name -> (numbers, {index of an argument: what it must be}, the same in words).
CHECKED: dict[str, tuple[Numbers, dict[int, ArgumentCondition], str]] = {
    "open": ((2, None), {1: OPENING}, "without O_TRUNC, O_TMPFILE, O_PATH, O_ASYNC, O_DIRECT, O_SYNC, O_NOATIME"),
    "openat": ((257, 56), {2: OPENING}, "as open"),
    "clone": ((56, 220), {0: Bits(((THREAD_FLAGS, THREAD_FLAGS), CLONE_THREAD))}, "threads only, in no namespace of "
                                                                                  "their own"),
    "kill": ((62, 129), {0: OneOf((OWN,))}, "to itself"),
    "tgkill": ((234, 131), {0: OneOf((OWN,))}, "to its own threads"),
    "getpgid": ((121, 155), {0: OneOf((0, OWN))}, "of itself"),
    "getsid": ((124, 156), {0: OneOf((0, OWN))}, "of itself"),
    "prlimit64": ((302, 261), {0: OneOf((0,))}, "its own limits, which can only fall"),
    "sched_getaffinity": ((204, 123), {0: OneOf((0, OWN))}, "of itself"),
    "madvise": ((28, 233), {2: OneOf((0, 1, 2, 3, 4, 8, 14, 15, 16, 17))},
        "NORMAL, RANDOM, SEQUENTIAL, WILLNEED, DONTNEED, FREE, HUGEPAGE, NOHUGEPAGE, DONTDUMP, DODUMP"),
    "fcntl": ((72, 25), {1: OneOf((0, 1, 2, 3, 4, 1030, 1032))},
        "F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC, F_GETPIPE_SZ: no locks, leases, owners, "
        "sizes, seals"),
    "ioctl": ((16, 29), {1: OneOf((0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451))},
        "TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX: no flags of files, no terminal's input"),
    "prctl": ((157, 167), {0: OneOf((15, 16, 0x53564D41))}, "PR_SET_NAME, PR_GET_NAME, PR_SET_VMA: it cannot "
                                                            "outlive the grader"),
    "socketpair": ((53, 199), {0: OneOf((AF_UNIX,)), 1: STREAMS}, "AF_UNIX streams: a datagram could go to any "
                                                                  "address"),
    "sendto": ((44, 206), {4: Null()}, "without an address"),
}  # fmt: skip
ABSENT: dict[str, tuple[Numbers, str]] = {
    "clone3": ((435, 435), "its flags are in memory; libc then takes clone"),
    "openat2": ((437, 437), "its flags are in memory; libc then takes openat"),
}
REFUSED: dict[str, str] = {
    "starts processes and programs, or waits for them": "fork vfork execve execveat wait4 waitid uselib",
    "other processes: traces, reads, signals, limits, renumbers, moves them":
        "ptrace process_vm_readv process_vm_writev process_madvise process_mrelease kcmp pidfd_open pidfd_getfd "
        "pidfd_send_signal tkill rt_sigqueueinfo rt_tgsigqueueinfo setpriority getpriority sched_setparam "
        "sched_getparam "
        "sched_setscheduler sched_getscheduler sched_setattr sched_getattr sched_setaffinity sched_rr_get_interval "
        "sched_get_priority_max sched_get_priority_min ioprio_set ioprio_get setpgid setsid get_robust_list "
        "migrate_pages "
        "move_pages vhangup",
    "messages, semaphores and memory that processes share":
        "msgget msgsnd msgrcv msgctl semget semop semtimedop semctl shmget shmat shmdt shmctl mq_open mq_unlink "
        "mq_timedsend mq_timedreceive mq_notify mq_getsetattr memfd_create memfd_secret",
    "sockets and what they carry":
        "socket connect bind listen accept accept4 sendmsg recvmsg sendmmsg recvmmsg setsockopt getpeername",
    "files: creates, empties, removes, renames, links, changes or locks them":
        "creat truncate ftruncate fallocate mkdir mkdirat mknod mknodat rmdir unlink unlinkat rename renameat "
        "renameat2 link "
        "linkat symlink symlinkat chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat umask utime utimes "
        "futimesat "
        "utimensat setxattr lsetxattr fsetxattr setxattrat getxattr lgetxattr fgetxattr getxattrat listxattr "
        "llistxattr "
        "flistxattr listxattrat removexattr lremovexattr fremovexattr removexattrat file_getattr file_setattr flock "
        "copy_file_range sendfile readahead fadvise64 cachestat ustat",
    "folders, roots and mounts":
        "chdir fchdir chroot pivot_root mount umount2 open_tree open_tree_attr move_mount fsopen fsconfig fsmount "
        "fspick "
        "mount_setattr statmount listmount statfs fstatfs name_to_handle_at open_by_handle_at getdents swapon swapoff "
        "quotactl quotactl_fd",
    "watches what others do with files": "inotify_init inotify_init1 inotify_add_watch inotify_rm_watch fanotify_init "
        "fanotify_mark",
    "waits for the disk, also for what others write": "sync syncfs fsync fdatasync msync sync_file_range",
    "memory outside of the limits, or shared with the kernel":
        "io_setup io_destroy io_submit io_cancel io_getevents io_pgetevents io_uring_setup io_uring_enter "
        "io_uring_register vmsplice splice tee mlock mlock2 munlock mlockall munlockall remap_file_pages userfaultfd "
        "mbind get_mempolicy set_mempolicy set_mempolicy_home_node mincore mseal map_shadow_stack pkey_mprotect "
        "pkey_alloc "
        "pkey_free",
    "timers and descriptors that queue signals or wake others":
        "timer_create timer_settime timer_gettime timer_getoverrun timer_delete timerfd_create timerfd_settime "
        "timerfd_gettime signalfd signalfd4 eventfd epoll_pwait2 epoll_ctl_old epoll_wait_old futex_waitv futex_wake "
        "futex_wait futex_requeue membarrier preadv2 pwritev2",
    "namespaces, rights and identities":
        "unshare setns seccomp landlock_create_ruleset landlock_add_rule landlock_restrict_self capget capset "
        "setuid setgid "
        "setreuid setregid setresuid setresgid getresuid getresgid setfsuid setfsgid setgroups personality arch_prctl "
        "modify_ldt set_thread_area get_thread_area iopl ioperm lsm_get_self_attr lsm_set_self_attr lsm_list_modules",
    "the kernel and the machine":
        "bpf perf_event_open add_key request_key keyctl init_module finit_module delete_module create_module "
        "query_module "
        "get_kernel_syms kexec_load kexec_file_load reboot syslog acct sethostname setdomainname settimeofday "
        "clock_settime "
        "adjtimex clock_adjtime lookup_dcookie nfsservctl _sysctl sysfs getpmsg putpmsg afs_syscall tuxcall "
        "security vserver "
        "uretprobe uprobe",
}  # fmt: skip


def system_call_filter(
    column: int,
    architecture: int,
    pid: int,
    allowed: Mapping[str, Mapping[str, Numbers]] = ALLOWED,
    checked: Mapping[str, tuple[Numbers, Mapping[int, ArgumentCondition], str]] = CHECKED,
) -> bytes:
    """The seccomp filter as classic BPF.

    column: the architecture's column in these tables.  architecture: its AUDIT_ARCH number.  pid: this process.
    allowed, checked: tables as those above, of another kind of program.
    """
    load = 0x20
    equal = 0x15
    above = 0x25
    bits = 0x45
    mask = 0x54
    answer = 0x06
    allow = 0x7FFF0000
    kill = 0x80000000
    refuse = 0x00050000 | errno.EPERM
    absent = 0x00050000 | errno.ENOSYS
    pretend = 0x00050000  # no error: the call gives 0, and nothing is done
    code: list[tuple[int, int, int, int]] = [
        (load, 0, 0, 4), (equal, 1, 0, architecture), (answer, 0, 0, kill), (load, 0, 0, 0),
    ]  # fmt: skip
    if column == 0:
        code += [(bits, 0, 1, X32), (answer, 0, 0, refuse)]
    code += [(above, 0, 1, NEWEST), (answer, 0, 0, absent)]
    for family in allowed.values():
        for numbers in family.values():
            if (number := numbers[column]) is not None:
                code += [(equal, 0, 1, number), (answer, 0, 0, allow)]
    for numbers, _ in ABSENT.values():
        if (number := numbers[column]) is not None:
            code += [(equal, 0, 1, number), (answer, 0, 0, absent)]
    for numbers, conditions, _ in checked.values():
        block: list[tuple[int, int, int, int]] = []
        for index, condition in conditions.items():
            low = (load, 0, 0, 16 + 8 * index)  # ids, flags and commands have 32 bits: the kernel ignores the rest
            if isinstance(condition, Null):
                block += [low, (equal, 1, 0, 0), (answer, 0, 0, refuse)]
                block += [(load, 0, 0, 20 + 8 * index), (equal, 1, 0, 0), (answer, 0, 0, refuse)]
            elif isinstance(condition, Pretended):
                value, has_bits = condition
                block += [low, (bits if has_bits else equal, 0, 1, value), (answer, 0, 0, pretend)]
            elif isinstance(condition, Bits):
                permitted = condition[0][column]
                required = condition[1]
                block += [low, (bits, 0, 1, ~permitted & 0xFFFFFFFF), (answer, 0, 0, refuse)]
                block += [(mask, 0, 0, required), (equal, 1, 0, required), (answer, 0, 0, refuse)]
            else:
                block.append(low)
                for left, value in zip(range(len(condition), 0, -1), condition, strict=True):
                    block.append((equal, left, 0, pid if value == OWN else value))
                block.append((answer, 0, 0, refuse))
        block.append((answer, 0, 0, allow))
        if (number := numbers[column]) is not None:
            code += [(equal, 0, len(block), number), *block]
    code.append((answer, 0, 0, refuse))
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)
