"""Notices an engine that hangs, and ends it, so that it can be restarted as one that died.

The invariant: no call of an engine waits for ever.  A call with an answer has a time limit, learnt from earlier ones.
Samples and scores have none, but the engine must make progress while it works: something arrives, or vLLM's scheduler
has counted tokens since it was asked last.

An engine is several processes on each of its nodes: a Ray actor, vLLM's server, its EngineCore, a worker for each
rank.  One that stands still stops all.  They are looked at on their own nodes, by tasks of Ray's, because the engine
itself cannot answer.  Stacks come from ``faulthandler``, by a signal; a stopped process (state T) would write them only
once it is continued, and then go on with its work, so it is told of without.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil
import ray
from ray.exceptions import RayError

from mcore_rl.ground.errors import DeadEngineError
from mcore_rl.rollout.protocol import Statistics
from mcore_rl.rollout.vllm.engine.process_group import end_group, group_of, is_helper
from mcore_rl.runtime.answers import Whereabouts, stacks_file
from mcore_rl.runtime.cluster import on_node
from mcore_rl.runtime.watchdog import Watchdog, hang_file

T = TypeVar("T")
LOOK_S = 5.0  # between two looks at the progress of an engine that works
WORK = "progress"  # the watchdog's name for the time between two signs of progress
NODE_S = 60.0  # the time limit for a node to look at an engine and end it
STACKS_S = 5.0  # the time limit for one process to write its stacks
AWAKE_S = 0.05  # a process that waits is awake for less at a time
QUIET_S = 0.3  # stacks are complete when the log has not grown for so long
LETTERS = {
    "T": "stopped (state T): somebody sent it SIGSTOP",
    "t": "stopped (state t): a debugger holds it",
    "D": "waits in the kernel (state D)",
    "R": "computes (state R)",
    "S": "waits (state S)",
}


class EngineWatch:
    """Watches one engine from its start to its end; a restarted engine has another.

    Args:
        name: the engine's name in messages.
        watchdog: the limits, which it learns too; may be shared with like engines.
        statistics: asks the engine for its counts.
        kill: ends the engine's actors.

    places: where its processes are, as far as that is known.
    paused: it need not make progress, since it was told to pause.
    """

    def __init__(
        self,
        name: str,
        watchdog: Watchdog,
        statistics: Callable[[], Awaitable[object]],
        kill: Callable[[], None],
    ) -> None:
        self.places: Sequence[EnginePlace] = ()
        self.watchdog = watchdog
        self.paused = False
        self._name = name
        self._statistics = statistics
        self._kill = kill
        self._num_working = self._num_arrived = 0
        self._counted: tuple[int, int] | None = None  # tokens of prompts and responses, when it was asked last
        self._silence: asyncio.Task[float] | None = None
        self._end: asyncio.Task[list[str]] | None = None

    async def answered(self, doing: str, method: str, call: Awaitable[T]) -> T:
        """Returns the result of ``call``, or raises its error.

        doing: what the engine is doing, for messages.  method: the watchdog's name of the call.
        DeadEngineError: it took too long, and the engine was killed.
        """
        begun = time.monotonic()
        limit_s = self.watchdog.limit_s(method)
        task = asyncio.ensure_future(call)
        try:
            await asyncio.wait([task], timeout=None if math.isinf(limit_s) else limit_s)
            if not task.done():
                raise await self._hung(doing, f"no answer for {limit_s:.0f} s")
            answer = await self._checked(doing, task)
        finally:
            task.cancel()
        self.watchdog.took(method, time.monotonic() - begun)
        return answer

    async def at_work(self, doing: str, work: Awaitable[T]) -> T:
        """Returns the result of ``work``, samples or scores, or raises its error.

        DeadEngineError: the engine made no progress for too long, and was killed.
        """
        begun = time.monotonic()
        task = asyncio.ensure_future(work)
        self._num_working += 1
        if self._silence is None or self._silence.done():
            self._silence = asyncio.create_task(self._silent())
        silence = self._silence
        try:
            await asyncio.wait([task, silence], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise await self._hung(doing, f"no progress for {silence.result():.0f} s")
            answer = await self._checked(doing, task)
            self._num_arrived += 1
            if (waited := time.monotonic() - begun) < LOOK_S:  # what takes longer is looked at on the way
                self.watchdog.took(WORK, waited)
            return answer
        finally:
            task.cancel()
            self._num_working -= 1
            if not self._num_working:
                silence.cancel()
                self._silence = None

    async def _silent(self) -> float:
        """Returns once the engine has made no progress for too long, after how many seconds; learns how long it takes.

        Its scheduler's counts change only where vLLM's own loop runs, unlike an answer of a thread beside it.
        """
        arrived = self._num_arrived
        since = time.monotonic()
        asking: asyncio.Future[object] | None = None
        try:
            while True:
                limit_s = self.watchdog.limit_s(WORK)
                await asyncio.sleep(min(LOOK_S, limit_s / 4))
                counted = self._counted
                if asking is not None and asking.done():
                    if not asking.cancelled() and asking.exception() is None:
                        answer = asking.result()
                        if isinstance(answer, Statistics):
                            counted = answer.prompt_tokens, answer.generated_tokens
                    asking = None
                if asking is None:
                    asking = asyncio.ensure_future(self._statistics())
                now = time.monotonic()
                if arrived != self._num_arrived or self._counted not in (None, counted):
                    self.watchdog.took(WORK, now - since)
                    arrived = self._num_arrived
                    since = now
                elif self.paused:
                    since = now
                self._counted = counted
                if now - since > limit_s:
                    return now - since
        finally:
            if asking is not None:
                asking.cancel()

    async def _checked(self, doing: str, task: asyncio.Future[T]) -> T:
        try:
            return await task
        except DeadEngineError as error:
            if self._end is None:
                raise
            raise await self._hung(doing, "no answer") from error  # another call has noticed

    async def _hung(self, doing: str, sign: str) -> DeadEngineError:
        """Ends the engine, once for all that wait for it, and returns the error of one of them."""
        what = f"{self._name} hangs while {doing}: {sign} (trainer.watchdog says how long is too long)"
        if self._end is None:
            self._end = asyncio.create_task(self._ended(what))
        return DeadEngineError("\n".join([what, *await asyncio.shield(self._end)]))

    async def _ended(self, what: str) -> list[str]:
        """Ends the engine; returns what its processes were doing, in lines for the screen."""
        lines = await asyncio.to_thread(end_hung_engine, what, self.places)
        self._kill()
        return lines


@dataclass(frozen=True)
class EngineProcessState:
    """One process of an engine.  state: its letter in /proc/PID/stat.  stacks: of its Python threads, or why none."""

    pid: int
    name: str
    state: str
    stacks: str

    def line(self) -> str:
        """One line for the screen."""
        return f"{self.name}, process {self.pid}: {LETTERS.get(self.state, f'state {self.state}')}"


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
    lines = list[str]()
    report = [what, ""]
    for node, states in enumerate(_look_and_end_each(places)):
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


def _look_and_end_each(places: Sequence[EnginePlace]) -> list[list[EngineProcessState] | None]:
    """The states of the processes at each place, which are ended; None: its node does not answer."""
    tasks = [
        on_node(look_and_end, place.actor.node_id, max_retries=0).remote(place.actor.pid, place.leader, place.log)
        for place in places
    ]
    if tasks:
        ray.wait(tasks, num_returns=len(tasks), timeout=NODE_S)
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
    processes = list[psutil.Process]()
    leaders = [] if leader is None else [leader]
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
