"""What a process could have kept of another one's life, to compare one that was forked with a fresh one."""

from __future__ import annotations

import gc
import locale
import logging
import os
import re
import resource
import signal
import sys
import threading
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

# Variables that no two processes share, and two that readline, in pytest's process, sets for the C library alone.
OWN = ("MASTER_PORT", "PYTEST_CURRENT_TEST", "VLLM_RPC_BASE_PATH", "TMPDIR", "COLUMNS", "LINES")
VLLM_NAME = re.compile(r"vllm_(dist|mm)_[\w-]+")  # made up anew for each engine
NUMBER = re.compile(r" at 0x[0-9a-f]+|(?<=Thread)-[0-9]+")  # where a function lies, and which thread of all so far
LIMITS = (resource.RLIMIT_CORE, resource.RLIMIT_NOFILE, resource.RLIMIT_AS)


def state() -> dict[str, str]:
    """By kind; equal where two processes are as good as each other."""
    tasks, maps = Path("/proc/self/task"), Path("/proc/self/maps").read_text().splitlines()
    values = {
        "environment": sorted(
            f"{name}={VLLM_NAME.sub('', value)}" for name, value in os.environ.items() if name not in OWN
        ),
        "directory": os.getcwd(),
        "path": sys.path,
        "umask": os.umask(os.umask(0o22)),
        "signals": [NUMBER.sub("", str(signal.getsignal(number))) for number in sorted(signal.valid_signals())],
        "limits": [resource.getrlimit(limit) for limit in LIMITS],
        "cores of threads": sorted({str(sorted(os.sched_getaffinity(int(task.name)))) for task in tasks.iterdir()}),
        "nice": os.nice(0),
        "locale": locale.setlocale(locale.LC_ALL),
        "Python threads": sorted(NUMBER.sub("", thread.name) for thread in threading.enumerate()),
        "gc": (gc.isenabled(), gc.get_threshold()),
        "log level": logging.getLogger().level,
        "warnings": len(warnings.filters),
        "OpenMP": sorted({line.split()[-1] for line in maps if "omp" in line}),
        "torch": (
            torch.get_num_threads(),
            torch.get_num_interop_threads(),
            torch.get_default_dtype(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_grad_enabled(),
            torch.backends.mkldnn.enabled,
            dist.is_initialized(),
        ),
    }
    return {kind: str(value) for kind, value in values.items()}


def imported() -> set[str]:
    """Modules that are there already."""
    return set(sys.modules)


class Seen:
    """Mixed into vLLM's worker class."""

    def state(self) -> dict[str, str]:
        return state()
