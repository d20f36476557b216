"""The attacks of benchmarks/attacks.py as root, as an ordinary user and in containers: what holds where.

    python -m benchmarks.isolation                   # the table, as docs/security.md has it; as root, to become the
    others python -m benchmarks.isolation --write           # writes it there python -m benchmarks.isolation --as user
    -- COMMAND ...    # runs a command in one of the situations

Each situation is made for real, in a process of its own: another user, a user namespace without any rights outside, a
seccomp filter as container runtimes install it around everything.  In each, every attack is tried by a process that
nobody confines, and by a confined one, with this kernel's Landlock and with no more than versions 1 to 6 have.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import json
import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.attacks import ATTACKS, ground, read
from mcore_rl.config.reward import CodeConfig
from mcore_rl.rewards import confinement
from mcore_rl.rewards.confinement import ConfinementError, run_confined, weaknesses
from mcore_rl.rewards.system_calls import ARCHITECTURES

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "security.md"
BEGIN = "<!-- made by benchmarks/isolation.py -->"
END = "<!-- end -->"
NOBODY = 65534
CLONE_NEWNS = 0x20000
CLONE_NEWUSER = 0x10000000
CLONE_NEWIPC = 0x08000000
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
VERSIONS = (99, 1, 2, 3, 4, 5, 6)  # of Landlock; 99: this kernel's
CONFIG = CodeConfig(timeout_s=120.0, memory_mib=512, output_kib=64)
# Numbers on (x86-64, aarch64) of what container runtimes refuse, each their own part of it.
CALLS = {
    "memfd_create": (319, 279),
    "pidfd_open": (434, 434),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "keyctl": (250, 219),
    "userfaultfd": (323, 282),
    "landlock_create_ruleset": (444, 444),
    "landlock_add_rule": (445, 445),
    "landlock_restrict_self": (446, 446),
    "seccomp": (317, 277),
}
LIBC = ctypes.CDLL(None, use_errno=True)


def checked(result: int, what: str) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def refuse(error: int, *names: str) -> None:
    """Installs a filter around this process and all that it starts, as a container runtime does: these calls fail."""
    column, architecture = ARCHITECTURES[os.uname().machine]
    code = [(0x20, 0, 0, 4), (0x15, 1, 0, architecture), (0x06, 0, 0, 0x7FFF0000), (0x20, 0, 0, 0)]
    for name in names:
        code += [(0x15, 0, 1, CALLS[name][column]), (0x06, 0, 0, 0x00050000 | error)]
    code.append((0x06, 0, 0, 0x7FFF0000))
    filled = b"".join(struct.pack("HBBI", *line) for line in code)
    buffer = ctypes.create_string_buffer(filled, len(filled))
    checked(LIBC.prctl(38, 1, 0, 0, 0), "no_new_privs")
    checked(LIBC.prctl(22, 2, struct.pack("HxxxxxxQ", len(code), ctypes.addressof(buffer)), 0, 0), "seccomp")


def become_user() -> None:
    """Becomes nobody, of no group, who can read Python and the repository wherever they are."""
    checked(LIBC.unshare(CLONE_NEWNS), "unshare")
    checked(LIBC.mount(None, b"/", None, MS_REC | MS_PRIVATE, None), "mount")
    for path in dict.fromkeys(os.path.realpath(each) for each in (sys.base_prefix, sys.prefix, ROOT)):
        _open_to_all(Path(path))
    for device in ("null", "zero", "random", "urandom"):
        _open_device(Path("/dev") / device)
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)


def _open_to_all(path: Path) -> None:
    """Makes ``path`` reachable for everybody, in this mount namespace: a closed folder above it shows nothing else."""
    for folder in reversed(path.parents):
        if not folder.stat().st_mode & 0o001:
            held = os.open(path, os.O_PATH)
            checked(LIBC.mount(b"none", bytes(folder), b"tmpfs", 0, b"mode=755"), f"mount {folder}")
            path.mkdir(parents=True)
            checked(
                LIBC.mount(f"/proc/self/fd/{held}".encode(), bytes(path), None, MS_BIND | MS_REC, None), f"bind {path}"
            )
            os.close(held)
            return


def _open_device(path: Path) -> None:
    """Gives everybody the device in this mount namespace, where a machine's is for root alone."""
    if path.stat().st_mode & 0o666 != 0o666:
        folder = Path(tempfile.mkdtemp())
        checked(LIBC.mount(b"none", bytes(folder), b"tmpfs", 0, b"mode=755"), f"mount {folder}")
        os.umask(0)
        os.mknod(folder / path.name, path.stat().st_mode | 0o666, path.stat().st_rdev)
        os.umask(0o022)
        checked(LIBC.mount(bytes(folder / path.name), bytes(path), None, MS_BIND, None), f"bind {path}")
        checked(LIBC.umount2(bytes(folder), 2), "umount")
        folder.rmdir()


def enter_container() -> None:
    """As nobody, becomes root of a user namespace, with mounts and messages of its own, as in a rootless container."""
    become_user()
    LIBC.prctl(4, 1, 0, 0, 0)  # the change of user made /proc/self root's
    checked(LIBC.unshare(CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWIPC), "unshare")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {NOBODY} 1")
    Path("/proc/self/gid_map").write_text(f"0 {NOBODY} 1")


@dataclass(frozen=True)
class Situation:
    """about: for the table.  enter: makes it, in a process of its own."""

    about: str
    enter: Callable[[], None]


SITUATIONS = {
    "root": Situation("root of the machine", lambda: None),
    "user": Situation("an ordinary user", become_user),
    "container": Situation("an unprivileged container: root of a user namespace", enter_container),
    "docker": Situation(
        "a container whose profile refuses namespaces, mounts, bpf, keys, `seccomp(2)`",
        lambda: refuse(
            errno.EPERM, "unshare", "setns", "mount", "bpf", "perf_event_open", "keyctl", "userfaultfd", "seccomp"
        ),
    ),
    "no-landlock": Situation(
        "a container whose profile refuses Landlock",
        lambda: refuse(errno.ENOSYS, "landlock_create_ruleset", "landlock_add_rule", "landlock_restrict_self"),
    ),
    "no-landlock-user": Situation(
        "the same, as a user without namespaces",
        lambda: (
            become_user(),
            refuse(errno.EPERM, "landlock_create_ruleset", "landlock_add_rule", "landlock_restrict_self", "unshare"),
        )[0],
    ),
    "no-memfd": Situation(
        "a container whose profile refuses `memfd_create`", lambda: refuse(errno.EPERM, "memfd_create")
    ),
    "no-pidfd": Situation("a container whose profile refuses `pidfd_open`", lambda: refuse(errno.EPERM, "pidfd_open")),
}


def measure() -> dict[str, Any]:
    """Tries every attack here.

    Returns {"refusal": why code is not graded, "layers": those that hold, "unconfined", "confined": what succeeded}.
    """
    try:
        if weak := weaknesses():
            return {"refusal": "; ".join(weak), "weak": True}
        layers = run_confined("", CONFIG).layers
    except ConfinementError as error:
        return {"refusal": str(error), "weak": False}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        field = ground(_new(folder / "free") / "place", folder / "free", stack)
        answer = subprocess.run(
            ["/usr/bin/env", "SOME_API_KEY=x", sys.executable, "-c", field.program],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        field.spare.touch()
        unconfined = _done(answer.stdout)
        library = str(_new(folder / "library"))
        others = confinement.libraries()
        confinement.libraries = lambda: (*others, library)  # type: ignore[assignment]
        confined = {}
        for version in VERSIONS:
            field = ground(_new(folder / str(version)) / "place", Path(library), stack)
            before = field.state()
            outcome = run_confined(field.program, CONFIG, landlock_abi=version)
            changed = ["the ground is not as it was"] if field.state() != before else []
            confined[str(version)] = _done(outcome.stdout) + changed
    return {"refusal": "", "layers": layers, "unconfined": unconfined, "confined": confined}


def _new(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _done(printed: str) -> list[str]:
    return [name for name, said in read(printed).items() if said == "DONE"]


def measured(name: str) -> dict[str, Any]:
    """``measure`` in a situation, by a process of its own."""
    command = [sys.executable, "-m", "benchmarks.isolation", "--as", name, "--json"]
    answer = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600)
    if answer.returncode:
        raise RuntimeError(f"{name}: {answer.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(answer.stdout)
    return result


def table(results: dict[str, dict[str, Any]]) -> str:
    """The table of ``results``, by the names of situations."""
    lines = [
        f"{len(ATTACKS)} attacks, each tried with this kernel's Landlock and with no more than versions 1 to 6 have.\n",
        "| where programs run | layers that hold | attacks that succeed unconfined | confined | code is graded |",
        "|---|---|---|---|---|",
    ]
    for name, result in results.items():
        about = SITUATIONS[name].about
        if result["refusal"]:
            reason = "no: weak confinement, unless asked for by name" if result["weak"] else "no: refused at the start"
            lines.append(f"| {about} | - | - | - | {reason} |")
            continue
        worst = sorted({each for done in result["confined"].values() for each in done})
        lines.append(
            f"| {about} | {', '.join(result['layers'])} | {len(result['unconfined'])} | "
            f"{len(worst)}{': ' * bool(worst)}{', '.join(worst)} | yes |"
        )
    return "\n".join(lines)


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--as", dest="situation", choices=SITUATIONS)
    parser.add_argument("--json", action="store_true", help="what was found here, as JSON")
    parser.add_argument("--write", action="store_true", help="write the table to docs/security.md")
    parser.add_argument("command", nargs="*", help="to run instead, after --")
    chosen = parser.parse_args()
    if chosen.situation is not None:
        SITUATIONS[chosen.situation].enter()
    if chosen.command:
        os.execvp(chosen.command[0], chosen.command)
    if chosen.json:
        print(json.dumps(measure()))
        return 0
    results = {name: measured(name) for name in SITUATIONS}
    print(table(results))
    if chosen.write:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{table(results)}\n{END}{rest.partition(END)[2]}")
    return int(any(done for result in results.values() for done in result.get("confined", {}).values()))


if __name__ == "__main__":
    sys.exit(main())
