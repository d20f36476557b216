"""Notices the death of vLLM's processes on a node, and says what they died of.

vLLM's own exceptions say "see stack trace (above)": the cause is in the output of another of its processes.
"""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections.abc import Callable, Coroutine, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import psutil

from mcore_rl.ground.errors import DeadEngineError, McoreRLError, RolloutError
from mcore_rl.parallel.device import Platform
from mcore_rl.rollout.vllm.engine.process_group import is_alive, is_tracker, remove, shared_memory_of

# The message of ``vllm/v1/executor/multiproc_executor.py``, 0.32, about a worker that is gone.
WORKER_DIED = re.compile(r"Worker proc (\S+) died unexpectedly \(exit code: (-?\d+|None)\)")
PREFIX = re.compile(r"^(\(\S+ pid=\d+\) *)?((ERROR|CRITICAL|WARNING|INFO) +\S+ \S+ +\[[^]]+\] ?)?")
RAISED = re.compile(r"^([A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt|Killed))\b(: .*)?$")
AFTERMATH = (
    "EngineDeadError",
    "EngineGenerateError",
    "CancelledError",
    "SystemExit",
    "BrokenPipeError",
    "RayTaskError",
)
# Messages of a vLLM process when another of its processes failed.
POINTS_ELSEWHERE = (
    "Engine core initialization failed",
    "WorkerProc initialization failed",
    "cancelled",
    "Executor failed",
)
MAX_CHARS = 600
T = TypeVar("T")

POLL_S = 0.2  # between checks whether vLLM's processes are alive
SETTLE_S = 0.5  # after a death, for what the processes still write
CAUSE_S = 5.0  # after a death, for vLLM to write what it died of: on a busy machine it comes late
# Between SIGTERM and SIGKILL to vLLM's processes.  On accelerators they release the device's memory meanwhile; on the
# CPU they would only shut their interpreters down, which takes longer.
STOP_S = 5.0
STOP_ON_CPU_S = 0.0


class Liveness:
    """Watches all processes that are below this one when it is made.

    They are watched here, because vLLM reports a dead worker only after it waited for the others to end, 10 s.

    Args:
        name: the engine's name in messages.
        log: the file that has the processes' output, to find the cause of a death there; None if there is none.
        cores: the processes whose exit codes may tell the cause.
        has_failed: whether vLLM itself has noticed a death.
    """

    def __init__(
        self, name: str, log: Path | None, cores: Sequence[BaseProcess], has_failed: Callable[[], bool]
    ) -> None:
        self.name = name
        self._log = log
        self._cores = list(cores)
        self._has_failed = has_failed
        self._below = [child for child in psutil.Process().children(recursive=True) if not is_tracker(child)]
        self._mapped = shared_memory_of(self._below)
        self._death = asyncio.create_task(self._wait_for_death())

    async def watch(self) -> None:
        """Waits until a process ends, and raises DeadEngineError with its cause then."""
        await asyncio.shield(self._death)
        raise await self._obituary("serving")

    async def alive(self, work: Coroutine[Any, Any, T], doing: str) -> T:
        """Returns the result of ``work``; raises if it fails, or as soon as vLLM dies.

        doing: what the engine is doing, for the message: "waking up".
        """
        task = asyncio.create_task(work)
        try:
            await asyncio.wait([task, self._death], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise await self._obituary(doing)
            return task.result()
        except Exception as error:
            raise await self.explained(error, doing) from error
        finally:
            task.cancel()

    async def explained(self, error: Exception, doing: str) -> McoreRLError:
        """Turns what vLLM raised into an error that says what the engine was doing and why it failed."""
        if isinstance(error, McoreRLError):
            return error
        if self._has_failed() or self._death.done():
            return await self._obituary(doing)
        return RolloutError(f"{self.name} failed while {doing}: {words(error)}")

    async def close(self) -> None:
        """Ends the watch: the processes are about to be ended."""
        self._death.cancel()
        await asyncio.gather(self._death, return_exceptions=True)

    def clear(self) -> None:
        """Removes the shared memory that the processes had, after their end."""
        remove(self._mapped)

    async def _wait_for_death(self) -> None:
        while not self._has_failed() and all(map(is_alive, self._below)):
            await asyncio.sleep(POLL_S)

    async def _obituary(self, doing: str) -> DeadEngineError:
        until = time.monotonic() + CAUSE_S
        cause = ""
        while not cause and time.monotonic() < until:
            await asyncio.sleep(SETTLE_S)
            cause = first_cause(self._log, {core.name: core.exitcode for core in self._cores})
        self.clear()
        where = f". Its output is in {self._log}" if self._log is not None else ""
        return DeadEngineError(f"{self.name} died while {doing}: {cause or 'one of its processes is gone'}{where}")


def stop_s(platform: Platform) -> float:
    """Seconds that vLLM's processes have to end when they are told to, before they are killed."""
    return STOP_S if platform.is_accelerator else STOP_ON_CPU_S


def start_error(name: str, directory: Path, log: Path | None, error: Exception) -> RolloutError:
    """What to raise where vLLM raised ``error`` while it started with ``directory``: the first cause in ``log``."""
    where = f". Its output is in {log}" if log is not None else ""
    return RolloutError(f"{name}: vLLM does not start with {directory}: {first_cause(log, {}) or words(error)}{where}")


def words(error: Exception) -> str:
    """One line for an exception of vLLM's; if it has many lines, the one that names the first exception.

    vLLM raises an EngineGenerateError without words for whatever a request failed of, which is its cause.
    """
    while not str(error) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    text = f"{type(error).__name__}: {error}"
    return first_exception(str(error)) or (text if "\n" not in text else " ".join(text.split())[:600])


def first_cause(log: Path | None, exit_codes: dict[str, int | None]) -> str:
    """Returns what a vLLM died of; "" if nothing tells.

    It looks in this order for a worker that a signal ended; another process that a signal ended; the first exception in
    the log; an exit code.

    Args:
        log: the output of vLLM's processes.
        exit_codes: of vLLM's processes, by name; None for one that is running.
    """
    text = log.read_text(errors="replace") if log is not None and log.exists() else ""
    died = WORKER_DIED.search(text)
    if died and died[2] == "None":  # vLLM read the exit code before there was one
        return f"vLLM's {died[1]} died"
    if died and int(died[2]) < 0:
        return f"vLLM's {died[1]} was {death(int(died[2]))}"
    killed = [f"vLLM's {name} was {death(code)}" for name, code in exit_codes.items() if code is not None and code < 0]
    raised = first_exception(text)
    ended = [f"vLLM's {name} {death(code)}" for name, code in exit_codes.items() if code]
    return next(iter([*killed, *([raised] if raised else []), *ended]), "")


def first_exception(text: str) -> str:
    """The first line of a log that names an exception that is a cause, not an aftermath; "" if there is none."""
    for line in text.splitlines():
        words = PREFIX.sub("", line)
        match = RAISED.match(words)
        if match and match[1].rpartition(".")[2] not in AFTERMATH and not any(e in words for e in POINTS_ELSEWHERE):
            return words[:MAX_CHARS]
    return ""


def death(exit_code: int) -> str:
    """ "killed by SIGKILL (out of memory?)", or "exited with code 1"."""
    if exit_code >= 0:
        return f"exited with code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    return f"killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
