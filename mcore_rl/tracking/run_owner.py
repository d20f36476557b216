"""Who owns a run directory: one program at a time, on whichever machine.

``RUN/owner.json`` names the owner: host, process, start of the process, Slurm job.  It appears in one step, by a hard
link, which file systems that are shared make as atomic as local ones; no lock of the kernel's is needed, which NFS or
Lustre may not pass on.  The owner touches the file every ``BEAT_S`` seconds, as a sign of life.

An owner that is gone is recognised, and its file taken over:

the same machine    by process id and start time
the same Slurm job  that was queued again: it runs once at a time, so the earlier start is gone
another Slurm job   by what ``squeue`` says of it
any other           it gives no sign of life for ``WATCH_S`` seconds

The place of an owner that is gone can be claimed once: the claim is a file with that owner's token in its name.

Invariant: of two programs that start in one directory at most one gets on.  Times of different machines are never
compared.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from mcore_rl.config.files import output_problem
from mcore_rl.ground.errors import ConfigError, RunDirectoryError, Violation
from mcore_rl.ground.json_text import read_json

OWNER = "owner.json"
BEAT_S = 10.0
WATCH_S = 60.0  # several beats: an owner may be busy, and a client of NFS late to see them
SQUEUE_S = 20.0
WRITE_S = 5.0  # for a file that is written in two steps, where there are no links
NOBODY = "nobody"  # the token of a file that cannot be read
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EOPNOTSUPP)  # file systems without them
KEY = "trainer.default_local_dir"


@dataclass(frozen=True, kw_only=True)
class Owner:
    """A program that owns a run directory.

    host, machine: the name, and what no other machine has: the id of its boot and of its space of process ids.
    pid, started: the process, and its start in clock ticks since the boot.
    job, job_starts: of Slurm; "" and 0 outside.  since: for people.  token: of this ownership.
    """

    host: str = field(default_factory=socket.gethostname)
    machine: str = field(default_factory=lambda: _machine())
    pid: int = field(default_factory=os.getpid)
    started: int = field(default_factory=lambda: start_of(os.getpid()) or 0)
    job: str = field(default_factory=lambda: os.environ.get("SLURM_JOB_ID", ""))
    job_starts: int = field(default_factory=lambda: int(os.environ.get("SLURM_RESTART_COUNT", "0")))
    since: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    token: str = field(default_factory=lambda: secrets.token_hex(8))

    def __str__(self) -> str:
        job = f", Slurm job {self.job}" if self.job else ""
        return f"process {self.pid} on {self.host}{job}, since {self.since}"

    def lives(self, ours: Owner) -> bool | None:
        """Whether this owner still runs, as the program ``ours`` can tell; None if it cannot."""
        if self.machine == ours.machine:
            return start_of(self.pid) == self.started
        if not self.job:
            return None
        if self.job == ours.job:
            return False if self.job_starts < ours.job_starts else None
        return _job_runs(self.job)


@dataclass(frozen=True)
class Gone:
    """A run directory that vanished.  moved_to: where it is now, if it was moved."""

    directory: Path
    moved_to: Path | None

    def __str__(self) -> str:
        where = f"it is now {self.moved_to}" if self.moved_to else "it was removed, or its file system is gone"
        return f"the run directory {self.directory} is no longer there: {where}"

    @property
    def places(self) -> list[Path]:
        """Where the run may be saved instead, the best first."""
        beside = self.directory.with_name(f"{self.directory.name}-rescued")
        return [*([self.moved_to] if self.moved_to else []), beside, Path.cwd() / beside.name]


class RunOwner:
    """Owns ``directory`` while it is open, which is made if it is missing.

    say: receives notes.  Raises ConfigError on entry: another program owns it, or it cannot be written.
    """

    def __init__(self, directory: Path, *, say: Callable[[str], None]) -> None:
        self._directory = directory
        self._say = say
        self._path = directory / OWNER
        self._me = Owner()
        self._ended = threading.Event()
        self._descriptor = -1

    @property
    def job_began_again(self) -> bool:
        """Whether this program belongs to a Slurm job that was queued again."""
        return self._me.job_starts > 0

    def __enter__(self) -> Self:
        made = next((each for each in (*reversed(self._directory.parents), self._directory) if not each.exists()), None)
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._acquire()
        except OSError as error:
            raise self._refusal(f"cannot be written: {error}", "Give a directory that can be written") from error
        self._made = made
        self._descriptor = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY)
        threading.Thread(target=self._beat, name="owner of the run directory", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        os.close(self._descriptor)
        with suppress(OSError):
            if (owner := read_owner(self._path)) is not None and owner.token == self._me.token:
                self._path.unlink()
        if self._made is not None:  # a start that failed leaves no empty folders
            with suppress(OSError):
                place = self._directory
                while place != self._made.parent:
                    place.rmdir()
                    place = place.parent

    def check(self, warn: Callable[[str], None]) -> Gone | None:
        """Whether the directory is gone; None if it is there and still this program's.

        warn: is told if the owner's file had to be written again, or the file system fails.  RunDirectoryError: another
        run owns it by now.
        """
        try:
            ours = os.fstat(self._descriptor)
            there = os.stat(self._directory)
            if (ours.st_dev, ours.st_ino) == (there.st_dev, there.st_ino):
                self._check_owner(warn)
                return None
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError as error:  # a file system that fails for a while
            warn(f"the run directory {self._directory} cannot be looked at: {error}")
            return None
        now = Path(os.readlink(f"/proc/self/fd/{self._descriptor}"))
        return Gone(self._directory, now if now.is_dir() and now != self._directory else None)

    def _check_owner(self, warn: Callable[[str], None]) -> None:
        owner = read_owner(self._path)
        if owner is None and self._claim(self._path):
            warn(f"{self._path} was removed while its run went on, and is written again")
            return
        owner = owner or read_owner(self._path)
        if owner is not None and owner.token != self._me.token:
            raise RunDirectoryError(f"{self._directory} is owned by another run by now ({owner}): this one ends")

    def _acquire(self) -> None:
        while not self._claim(self._path):
            root = _settled(self._path)
            if root is None:
                continue  # it has just ended
            claims = [self._path]  # of the owner, of who takes its place, and so on
            last = root
            while (heir := _settled(self._heir_of(last))) is not None:
                claims.append(self._heir_of(last))
                last = heir
            if self._lives(last, claims[-1]):
                remedy = "Wait for that run or end it, or give this one another directory. If it is gone for certain, "
                remedy += f"remove {self._path}"
                raise self._refusal(f"belongs to another run, which is going on: {last}", remedy)
            place = self._heir_of(last)
            if not self._claim(place):
                continue  # another program was faster
            now = _settled(self._path)
            if now is not None and now.token == root.token:  # else it was taken over, and the claims are removed
                self._write(fresh := self._path.with_name(f".{OWNER}.{self._me.token}"))
                fresh.replace(self._path)
            for path in [place, *reversed(claims[1:])]:
                path.unlink(missing_ok=True)
            if (now := read_owner(self._path)) is not None and now.token == self._me.token:
                return

    def _heir_of(self, owner: Owner) -> Path:
        """The claim to the place of ``owner``, which only one program can make."""
        return self._path.with_name(f".{OWNER}.{owner.token}.heir")

    def _lives(self, owner: Owner, path: Path) -> bool:
        """Whether ``owner``, whose claim is ``path``, still runs; waits for a sign of life where nothing else tells."""
        lives = None if owner.token == NOBODY else owner.lives(self._me)
        if lives is not None:
            return lives
        who = "a program that left no name" if owner.token == NOBODY else str(owner)
        self._say(
            f"{self._directory} belongs to {who}, of which nothing is known here: "
            f"waiting up to {WATCH_S:.0f} s for a sign of life"
        )
        first = _touched(path)
        until = time.monotonic() + WATCH_S
        while time.monotonic() < until:
            time.sleep(min(1.0, BEAT_S / 4))
            if (now := _touched(path)) != first:
                return now is not None
        return False

    def _claim(self, path: Path) -> bool:
        """Makes ``path``, with this program's name in it; False if there is such a file already."""
        new = self._path.with_name(f".{OWNER}.{self._me.token}")
        try:
            self._write(new)
            os.link(new, path)
        except FileExistsError:
            return new.stat().st_nlink == 2  # NFS may repeat a link that had succeeded
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            try:
                with path.open("x", encoding="utf-8") as file:
                    file.write(self._text())
            except FileExistsError:
                return False
        finally:
            new.unlink(missing_ok=True)
        return True

    def _write(self, path: Path) -> None:
        path.write_text(self._text(), encoding="utf-8")

    def _text(self) -> str:
        return json.dumps(asdict(self._me), indent=1) + "\n"

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_S):
            with suppress(OSError):
                if (owner := read_owner(self._path)) is not None and owner.token == self._me.token:
                    os.utime(self._path)

    def _refusal(self, problem: str, remedy: str) -> ConfigError:
        return ConfigError([Violation(KEY, self._directory, problem, remedy)])


def read_owner(path: Path) -> Owner | None:
    """The owner that the file names; None if there is none, or it cannot be read."""
    try:
        return Owner(**read_json(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _settled(path: Path) -> Owner | None:
    """The owner that the file names, once it is written; ``NOBODY`` if it never is, None if there is no file."""
    until = time.monotonic() + WRITE_S
    while (owner := read_owner(path)) is None and path.exists():
        if time.monotonic() > until:
            return Owner(token=NOBODY)
        time.sleep(0.01)
    return owner


def demand_free(directory: Path) -> None:
    """Raises ConfigError where ``RunOwner`` would for ``directory``; makes, changes and waits for nothing."""
    if problem := output_problem(directory.resolve(), "directory"):  # of a link, what it leads to
        raise ConfigError([Violation(KEY, directory, *problem)])
    owner = read_owner(directory / OWNER)
    if owner is not None and owner.token != NOBODY and owner.lives(Owner()):
        remedy = "Wait for that run or end it, or give this one another directory"
        raise ConfigError([Violation(KEY, directory, f"belongs to another run, which is going on: {owner}", remedy)])


def start_of(pid: int) -> int | None:
    """When the process started, in clock ticks since the boot; None if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _machine() -> str:
    """What processes share whose ids mean the same: the boot of a kernel, and a namespace of it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _touched(path: Path) -> int | None:
    """When the file was last touched, by the file system's clock; None if it is gone.

    It is opened, since a client of NFS asks the server anew only then.
    """
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_mtime_ns
    except OSError:
        return None


def _job_runs(job: str) -> bool | None:
    """Whether Slurm has the job; None if it cannot be asked."""
    try:
        command = ["squeue", "--noheader", "--format=%T", f"--jobs={job}"]
        asked = subprocess.run(command, capture_output=True, text=True, timeout=SQUEUE_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if asked.returncode:  # a job that Slurm has forgotten, or a Slurm that does not answer
        return False if "Invalid job id" in asked.stderr else None
    return any(state not in ("PENDING", "REQUEUED") for state in asked.stdout.split())
