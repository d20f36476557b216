"""Lets bash itself expand a script, in a cage, with a function in the place of every program: what it would start.

A script is a stranger's text.  It runs in ``shell_cage``, for ``DEADLINE_S`` at most, with ``MAX_PROCESSES``, and sees
of the environment only the variables that it names, and no secret among them.  Where a machine has no such cage, no
script is run: ``words_of`` reads a plain command without a shell.
"""

from __future__ import annotations

import json
import os
import re
import selectors
import shlex
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mcore_rl.ground.errors import McoreRLError
from mcore_rl.ground.secrets import without_secrets
from mcore_rl.processes.guarding import GuardedProgram

PROLOGUE = Path(__file__).with_name("prologue.sh")
BEGIN = 'builtin source "$1"; shift'
START_S = 60  # for the cage to be there
DEADLINE_S = 10
MAX_PROCESSES = 50
MAX_BYTES = 1 << 20  # of what programs are given, and of messages
MEMORY_BYTES = 256 << 20  # of each process
MAX_ROUNDS = 8  # each learns a program's name that has a slash
OUTPUT = re.compile(r"<output-of-[^<>\s]*>")  # what prologue.sh prints for a program
ACTIVE = re.compile(r"[$`;|&<>()]")  # outside of single quotes: what only a shell reads
# bash: "FILE: line N: /usr/bin/python3: Permission denied"; of the cage, no such file or no right to run it
NOT_RUN = re.compile(
    r"line \d+: ([\w./+-]*/[\w.+-]+): (?:No such file or directory|Permission denied|Operation not permitted)$", re.M
)
HIDDEN = re.compile(r"PATH|IFS|PS4|ENV|SHELLOPTS|BASHOPTS|LC_ALL|LANG|BASH_.*|LD_.*")  # variables that change bash


class NoCageError(McoreRLError):
    """No script can be run on this machine, since it cannot be kept from doing harm."""


@dataclass
class Expanded:
    """What came of a script.

    programs: the words of each program that it would have started, in order.
    stopped: why it did not reach its end, in bash's words or ours; "" if it did.
    broken: whether a limit of ours ended it.
    """

    programs: list[list[str]]
    stopped: str = ""
    broken: bool = False


def words_of(text: str) -> list[str] | None:
    """The words of a plain command, or of a file of ``key=value`` lines; None if it takes a shell to read them."""
    joined = text.replace("\\\n", " ").strip()
    if ACTIVE.search(re.sub(r"'[^']*'", "", joined)):
        return None
    try:
        words = shlex.split(joined, comments=True)
    except ValueError:
        return None  # bash says what is never closed
    return words if "\n" not in joined or all("=" in word for word in words) else None


def expand(
    text: str, file: Path | None = None, words: Sequence[str] = (), *, environment: Mapping[str, str]
) -> Expanded:
    """Runs a script of bash in the cage.

    file: where ``text`` is from.  words: its arguments.  environment: the user's variables.

    Raises NoCageError.
    """
    known = set[str]()
    for _ in range(MAX_ROUNDS):
        expanded, messages = _run(text, file, words, environment, known)
        new = set(NOT_RUN.findall(messages)) - known
        if not new:
            break
        known |= new
    return expanded


def _run(
    text: str, file: Path | None, words: Sequence[str], environment: Mapping[str, str], known: set[str]
) -> tuple[Expanded, str]:
    """(what came of a round, what bash said).  known: names with a slash of programs."""
    program = GuardedProgram(f"{__package__}.shell_cage", without_secrets(), shows=True)
    ours = program.socket
    try:
        with suppress(BrokenPipeError):  # it ended, and says why
            ours.sendall(json.dumps(_job(text, file, words, environment, known)).encode() + b"\n")
        told, messages, broken = _followed(ours, program)
        head, _, records = told.decode(errors="replace").partition("\0")
        if not head.isdigit():
            what = head or messages.strip().rpartition("\n")[2] or "it did not start"
            raise NoCageError(
                f"a script is run here only where it can do no harm, and this machine has no cage for it ({what}). "
                "Give the command that it ends in, in quotes and without variables"
            )
        with suppress(ProcessLookupError):
            os.killpg(int(head), signal.SIGKILL)  # all at once, as no guard could that kills one after another
    finally:
        ours.close()
        program.kill()
        code = program.end()
        program.output.close()
    if code in (-signal.SIGXCPU, -signal.SIGKILL):
        broken = broken or f"it did not end within {DEADLINE_S} s of a processor"
    said = [line for line in messages.splitlines() if not line.startswith("+")]
    stopped = broken or ((said[-1] if said else f"exit code {code}") if code else "")
    return Expanded(_programs(records), stopped, bool(broken)), messages


def _job(
    text: str, file: Path | None, words: Sequence[str], environment: Mapping[str, str], known: set[str]
) -> dict[str, object]:
    """What the cage is told.  Scripts beside ``file`` may be read, since it may source them."""
    beside = [str(path.resolve()) for path in sorted(file.resolve().parent.glob("*.sh"))] if file else []
    texts = [text, *(Path(path).read_text(encoding="utf-8", errors="replace") for path in beside)]
    mentioned = {name for each in texts for name in re.findall(r"[A-Za-z_]\w*", each)}
    shown = {
        name: value
        for name, value in without_secrets((), environment).items()
        if name in mentioned | {"HOME", "USER", "PWD"} and not HIDDEN.fullmatch(name)
    }
    functions = [
        f'function {each} {{ __run {name} "$@"; }}'
        for name in sorted(known)
        for each in (name, name.rpartition("/")[2])
    ]
    return {
        "script": "\n".join([BEGIN, *functions, 'builtin source "$0" "$@"' if file else text, "wait"]),
        "words": [str(file or "command"), str(PROLOGUE), *words],
        "environment": {**shown, "PATH": "/nonexistent", "LC_ALL": "C.UTF-8"},
        "readable": [str(PROLOGUE), *beside, *([str(file.resolve())] if file else [])],
        "seconds": DEADLINE_S,
        "memory_bytes": MEMORY_BYTES,
        "processes": MAX_PROCESSES,
    }


def _followed(ours: socket.socket, program: GuardedProgram) -> tuple[bytes, str, str]:
    """(records, messages, what limit was broken) of the cage, until all that is in it has ended."""
    records = bytearray()
    messages = bytearray()
    is_started = False
    deadline = time.monotonic() + START_S
    with selectors.DefaultSelector() as selector:
        selector.register(ours, selectors.EVENT_READ, records)
        selector.register(program.output, selectors.EVENT_READ, messages)
        while selector.get_map():
            for key, _ in selector.select(0.1):
                part = os.read(key.fd, 1 << 16)
                key.data.extend(part)
                if not part:
                    selector.unregister(key.fileobj)
            del messages[:-MAX_BYTES]
            if not is_started and b"\0" in records:
                is_started = True
                deadline = time.monotonic() + DEADLINE_S
            if time.monotonic() > deadline:
                return bytes(records), messages.decode(errors="replace"), f"it did not end within {DEADLINE_S} s"
            if len(records) > MAX_BYTES:
                return bytes(records), "", f"it gives programs more than {MAX_BYTES >> 20} MiB of words"
    return bytes(records), messages.decode(errors="replace"), ""


def _programs(records: str) -> list[list[str]]:
    """The words of each program, from what the functions of prologue.sh wrote, each its process id before it."""
    programs = list[list[str]]()
    open_ones = dict[str, list[str]]()
    for record in records.split("\0"):
        said = record.lstrip("0123456789")
        pid = record.removesuffix(said)
        mark = said[:1]
        if mark == "(":
            open_ones[pid] = []
        elif mark == "=" and pid in open_ones:
            open_ones[pid].append(said[1:])
        elif mark == ")" and pid in open_ones:
            programs.append(open_ones.pop(pid))
    return programs
