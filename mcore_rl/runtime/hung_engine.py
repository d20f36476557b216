"""What the processes of an engine that hangs are doing, and their end.

An engine is several processes on each of its nodes: a Ray actor, vLLM's server, its EngineCore, a worker for each
rank.  One that stands still stops all.  They are looked at on their own nodes, by tasks of Ray's, because the engine
itself cannot answer.  Stacks come from ``faulthandler``, by a signal; a stopped process (state T) would write them only
once it is continued, and then go on with its work, so it is told of without.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mcore_rl.rollout.engine.process_group import end_group, group_of, is_helper
from mcore_rl.runtime.answers import Whereabouts, stacks_file
from mcore_rl.runtime.watchdog import hang_file

LOOK_S = 60.0  # the time limit for a node to look at an engine and end it
STACKS_S = 5.0  # the time limit for one process to write its stacks
AWAKE_S = 0.05  # a process that waits is awake for less at a time
QUIET_S = 0.3  # stacks are complete when the log has not grown for so long
STATES = {
    "T": "stopped (state T): somebody sent it SIGSTOP",
    "t": "stopped (state t): a debugger holds it",
    "D": "waits in the kernel (state D)",
    "R": "computes (state R)",
    "S": "waits (state S)",
}


@dataclass(frozen=True)
class EngineProcessState:
    """One process of an engine.  state: its letter in /proc/PID/stat.  stacks: of its Python threads, or why none."""

    pid: int
    name: str
    state: str
    stacks: str

    def line(self) -> str:
        """One line for the screen."""
        return f"{self.name}, process {self.pid}: {STATES.get(self.state, f'state {self.state}')}"


@dataclass(frozen=True)
class EnginePlace:
    """Where the part of an engine on one node is.

    actor: its Ray actor.  leader: the process that leads the group of its processes; None: it is still starting.
    log: their output.
    """

    actor: Whereabouts
    leader: int | None
    log: Path


def end_hung_engine(what: str, places: Sequence[EnginePlace]) -> list[str]:
    """Ends the engine that hangs; returns lines for the screen: what each of its processes was doing.

    The stacks go to a ``hang_<time>.txt`` beside its log.

    Args:
        what: the title of that file.
        places: of all parts of the engine that are known.
    """
    lines, report = list[str](), [what, ""]
    for node, states in enumerate(_ended(places)):
        prefix = f"on its node {node}: " if len(places) > 1 else ""
        if states is None:
            lines.append(f"  {prefix}it does not answer: nothing is known of its processes")
            continue
        for each in sorted(states, key=lambda each: each.state not in "Tt"):  # a stopped one explains the others
            lines.append(f"  {prefix}{each.line()}")
            report += [f"{prefix}{each.line()}", each.stacks]
    if places:
        path = hang_file(places[0].log.parent)
        try:
            path.write_text("\n".join([*report, ""]))
            lines.append(f"The stacks of its processes are in {path}")
        except OSError as error:
            lines.append(f"The stacks of its processes cannot be written: {error}")
    return lines


def _ended(places: Sequence[EnginePlace]) -> list[list[EngineProcessState] | None]:
    """The states of the processes at each place, which are ended; None: its node does not answer."""
    look = ray.remote(look_and_end)
    tasks = [
        look.options(
            num_cpus=0,
            max_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(place.actor.node_id, soft=False),
        ).remote(place.actor.pid, place.leader, place.log)
        for place in places
    ]
    if tasks:
        ray.wait(tasks, num_returns=len(tasks), timeout=LOOK_S)
    return [_result(task) for task in tasks]


def _result(task: Any) -> list[EngineProcessState] | None:
    try:
        states: list[EngineProcessState] = ray.get(task, timeout=0.1)
    except RayError:  # a time-out of Ray's is one too
        return None
    return states


def look_and_end(actor: int, leader: int | None, log: Path) -> list[EngineProcessState]:
    """Looks at the process ``actor`` and every process of the engine, then kills them.  Runs on their node.

    SIGKILL, since a stopped process ignores all else.  The actor is left to Ray if it can end by itself: Ray prints
    a page about one that was killed.
    """
    processes, leaders = list[psutil.Process](), [] if leader is None else [leader]
    with suppress(psutil.Error, ProcessLookupError):
        processes.append(psutil.Process(actor))
        if leader is None:
            below = [each for each in processes[0].children(recursive=True) if not is_helper(each)]
            leaders = [each.pid for each in below if os.getpgid(each.pid) == each.pid]
            processes += below
    if leader is not None:
        processes += sorted(group_of(leader), key=lambda each: each.pid != leader)
    states = [_state_of(each, actor, log) for each in processes]
    for group in leaders:
        end_group(group)
    for process, each in zip(processes, states, strict=True):
        with suppress(psutil.Error):
            if each.pid != actor or each.state in "Tt":
                process.kill()
    return states


def _state_of(process: psutil.Process, actor: int, log: Path) -> EngineProcessState:
    pid = process.pid
    try:
        state = _letter_of(pid)
        words = process.cmdline() or [process.name()]
        leads = os.getpgid(pid) == pid
    except (OSError, psutil.Error):
        return EngineProcessState(pid, "a process", "X", "no stacks: it is gone\n")
    name = "vLLM's process below it"  # one of vLLM's, which tells its name only where setproctitle is installed
    if pid == actor:
        name = "its Ray actor"
    elif leads:
        name = "its server"
    elif words[0].startswith("VLLM::"):
        name = words[0].strip()
    if state in "Tt":
        stacks = "no stacks: a stopped process cannot write them\n"
    elif not _catches(pid, signal.SIGUSR2):
        stacks = "no stacks: it was not prepared to write them\n"
    else:
        stacks = _stacks_of(pid, stacks_file(log) if pid == actor else log) or "no stacks: it did not write them\n"
    return EngineProcessState(pid, name, state, stacks)


def _letter_of(pid: int) -> str:
    """The state of the process in /proc/PID/stat; R only if it computes all the time, not if it just woke up."""
    until = time.monotonic() + AWAKE_S
    while True:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        if letter != "R" or time.monotonic() > until:
            return letter
        time.sleep(AWAKE_S / 10)


def _catches(pid: int, number: signal.Signals) -> bool:
    """Whether the process has a handler of the signal, which would otherwise end it."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    masks = [line.split()[1] for line in lines if line.startswith("SigCgt:")]
    return bool(masks) and bool(int(masks[0], 16) >> (number - 1) & 1)


def _stacks_of(pid: int, file: Path) -> str:
    """What the process writes to ``file`` when it is asked for its stacks."""
    try:
        start = size = file.stat().st_size
        os.kill(pid, signal.SIGUSR2)
        until = time.monotonic() + STACKS_S
        while time.monotonic() < until:
            time.sleep(QUIET_S)
            now = file.stat().st_size
            if now == size > start:
                break
            size = now
        return file.read_bytes()[start:].decode(errors="replace")
    except OSError:
        return ""
