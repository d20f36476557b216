"""Training ranks and vLLM engines that start fast, for tests whose subject is what they do, not how they start.

A fresh rank takes five seconds to import torch, Megatron and transformers; a fresh engine sixteen, since both of its
processes import vLLM.  Here servers import them once a session, and a process is forked from its server
(``multiprocessing.forkserver``).  ``run_ranks`` and ``start_engine`` are those of the package, but for that.

The invariant: nothing passes from one run to the next.  A server has only imported; each process is a copy of it, gets
the environment that a fresh one would inherit and a random state of its own, and ends with its run.  Tests of how
processes start and die use the package's own.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.context
import os
import pickle
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from multiprocessing import forkserver, popen_forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from mcore_rl.parallel import launch
from mcore_rl.parallel.cpu import UNCOMPILED
from mcore_rl.parallel.launch import Rank, inherited_environment
from mcore_rl.rollout.vllm.engine import process as engine_process

LAUNCHING = threading.Lock()


class Server(forkserver.ForkServer):
    """Imports ``modules``, once it is needed, and forks.  environment: what must be set before."""

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        super().__init__()
        self.modules = list(modules)
        self.set_forkserver_preload(self.modules)
        self.environment = environment

    def ensure_running(self) -> None:
        # One thread: a process that has several cannot fork.
        common = {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        with inherited_environment(UNCOMPILED | common | self.environment):
            super().ensure_running()

    @property
    def address(self) -> str:
        """Where another process may ask it for one; it must run."""
        return str(self._forkserver_address)


class _Popen(popen_forkserver.Popen):
    """Forked from the server that the process names."""

    def _launch(self, process_obj: _Process) -> None:
        connect = process_obj.server().connect_to_new_process
        with LAUNCHING, mock.patch.object(forkserver, "connect_to_new_process", connect):
            super()._launch(process_obj)


def _environment_of_server() -> set[str]:
    """Names of the variables that the server was started with; what its imports added is not among them."""
    entries = Path("/proc/self/environ").read_bytes().split(b"\0")
    return {os.fsdecode(entry.partition(b"=")[0]) for entry in entries if entry}


def become_fresh(environ: Mapping[str, str]) -> None:
    """Gives this forked process ``environ``, as a fresh one would have it, and a random state of its own."""
    os.environ |= environ
    for name in _environment_of_server() - environ.keys():
        os.environ.pop(name, None)
    sys.path[1:1] = [each for each in environ.get("PYTHONPATH", "").split(os.pathsep) if each not in ("", *sys.path)]
    tempfile.tempdir = None  # imports may have read TMPDIR
    if "OMP_NUM_THREADS" in environ:
        torch.set_num_threads(int(environ["OMP_NUM_THREADS"]))
    torch.default_generator.seed()  # by chance, as in a fresh process; Python sees to its own
    np.random.seed()


class _Process(ForkServerProcess):
    """With the environment that a fresh process would inherit."""

    @staticmethod
    def _Popen(process_obj: _Process) -> _Popen:
        return _Popen(process_obj)

    def server(self) -> Server:
        raise NotImplementedError

    def start(self) -> None:
        self.environ = dict(os.environ)
        super().start()

    def run(self) -> None:
        become_fresh(self.environ)
        super().run()


# ---- training ranks ----

# Two, each with its own order of the strings in a set: no collective may depend on that order.
RANK_SERVERS = tuple(
    Server(
        # Not Ray: it reads its settings, and who it is, from the environment when it is imported.
        ["pytest"]
        + [f"tests.support.{name}" for name in ("engine_runs", "live_trainers", "saved_states", "fast_python")],
        {"PYTHONHASHSEED": str(seed)},
    )
    for seed in (1, 2)
)


class _Pickled:
    """Travels as bytes: multiprocessing would send a descriptor for every tensor, and the server takes 250."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __reduce__(self) -> tuple[Any, tuple[bytes]]:
        return pickle.loads, (pickle.dumps(self.value),)


class RankProcess(_Process):
    """A training rank."""

    def __init__(self, *, args: tuple[Any, ...], **how: Any) -> None:
        super().__init__(
            args=tuple(_Pickled(each) if isinstance(each, (tuple, list)) else each for each in args), **how
        )
        self.rank = next((each.rank for each in args if isinstance(each, Rank)), 0)

    def server(self) -> Server:
        for server in RANK_SERVERS:  # all import at once
            server.ensure_running()
        # In a world of 2, 4 or 8, neighbours along an axis of 2 differ in one bit, and so in their server.
        return RANK_SERVERS[self.rank.bit_count() % 2]


class _RankContext(ForkServerContext):
    Process = RankProcess


RANKS = _RankContext()  # for processes that are no ranks, too
run_ranks = partial(launch.run_ranks, context=RANKS)

# ---- engines ----


ENGINE_SERVER = Server(
    [
        "mcore_rl.rollout.vllm.engine.vllm_engine",
        "vllm.v1.engine.core",
        "vllm.v1.worker.cpu_worker",
        "tests.support.forked",
    ],
    {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
)


class _EngineProcess(_Process):
    def server(self) -> Server:
        return ENGINE_SERVER

    def run(self) -> None:
        fork_what_vllm_spawns()
        super().run()


def fork_what_vllm_spawns() -> None:
    """vLLM's own processes are forked too, as on other platforms (VLLM_WORKER_MULTIPROC_METHOD): from this one."""
    contexts = multiprocessing.context._concrete_contexts
    contexts["spawn"] = contexts["fork"]


class _EngineContext(ForkServerContext):
    Process = _EngineProcess


ENGINES = _EngineContext()  # for other processes that need vLLM, too
start_engine = partial(engine_process.start_engine, context=ENGINES)
