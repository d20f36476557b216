"""Finds the first cause of a vLLM that died or did not start, in the output of its processes.

vLLM's own exceptions say "see stack trace (above)": the cause is in the output of another of its processes.
"""

from __future__ import annotations

import re
import signal
from pathlib import Path

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
