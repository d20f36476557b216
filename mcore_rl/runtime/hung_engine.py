"""What the processes of an engine that hangs are doing, and their end.

An engine is several processes on one node: the Ray actor, vLLM's server below it, its EngineCore, and a worker for each
rank.  One that stands still stops all.  They are looked at on their own node, by a task of Ray's, because the engine
itself cannot answer.  Stacks come from ``faulthandler``, by a signal; a stopped process (state T) would write them only
once it is continued, and then go on with its work, so it is told of without.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mcore_rl.rollout.engine.process_group import end_group, group_of, is_helper
from mcore_rl.runtime.answers import Whereabouts, stacks_file
from mcore_rl.runtime.watchdog import hang_file

LOOK_S = 60.0  # the time limit for a node to look at an engine and end it
STACKS_S = 5.0  # the time limit for one process to write its stacks
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


def end_hung_engine(what: str, where: Whereabouts | None, leader: int | None, log: Path | None) -> list[str]:
    """Ends the engine that hangs; returns lines for the screen: what each of its processes was doing.

    The stacks go to a ``hang_<time>.txt`` beside ``log``.

    Args:
        what: the title of that file.
        where: the actor of the engine; None: unknown, nothing can be looked at.
        leader: the process that leads the engine's group; None: it is still starting.
        log: the engine's output.
    """
    states = _ended(where, leader, log)
    if states is None:
        return ["  its node does not answer: nothing is known of its processes"]
    states.sort(key=lambda each: each.state not in "Tt")  # a stopped one explains the others
    lines = [f"  {each.line()}" for each in states]
    if log is not None:
        path = hang_file(log.parent)
        path.write_text("\n".join([what, "", *(f"{each.line()}\n{each.stacks}" for each in states)]))
        lines.append(f"The stacks of its processes are in {path}")
    return lines


def _ended(where: Whereabouts | None, leader: int | None, log: Path | None) -> list[EngineProcessState] | None:
    if where is None:
        return None
    place = NodeAffinitySchedulingStrategy(where.node_id, soft=False)
    task = ray.remote(look_and_end).options(num_cpus=0, max_retries=0, scheduling_strategy=place)
    try:
        states: list[EngineProcessState] = ray.get(task.remote(where.pid, leader, log), timeout=LOOK_S)
    except RayError:  # a time-out of Ray's is one too
        return None
    return states


def look_and_end(actor: int, leader: int | None, log: Path | None) -> list[EngineProcessState]:
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


def _state_of(process: psutil.Process, actor: int, log: Path | None) -> EngineProcessState:
    pid = process.pid
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
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
    elif log is None or not _catches(pid, signal.SIGUSR2):
        stacks = "no stacks: it was not prepared to write them\n"
    else:
        stacks = _stacks_of(pid, stacks_file(log) if pid == actor else log) or "no stacks: it did not write them\n"
    return EngineProcessState(pid, name, state, stacks)


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
