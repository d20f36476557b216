"""Ranks that start in a tenth of a second: ``run_ranks`` for tests whose subject is what ranks do, not how they start.

A fresh process takes five seconds to import torch, Megatron and transformers.  Here servers import them once a session
and fork a process for every rank of every run (``multiprocessing.forkserver``).

The invariant: nothing passes from one run to the next.  A server has only imported; each rank is a copy of it, gets the
environment, the threads and the directory that a fresh process would inherit, and ends with its run.

There are two servers, so that ranks which talk to each other do not iterate over a set of strings in the same order: no
collective may depend on that order.  Tests of how ranks start and die use ``mcore_rl.parallel.launch``.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from multiprocessing import forkserver, popen_forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any
from unittest import mock

import torch

from mcore_rl.parallel import launch
from mcore_rl.parallel.cpu import UNCOMPILED
from mcore_rl.parallel.launch import Rank, inherited_environment

IMPORTED = ["pytest", "tests.support.engine_runs", "tests.support.live_trainers", "tests.support.saved_states"]
SERVERS = tuple(forkserver.ForkServer() for _ in range(2))


def server_of(rank: int) -> forkserver.ForkServer:
    """Neighbours along an axis of 2, in a layout of 2, 4 or 8 ranks, differ in one bit, and so in their servers."""
    return SERVERS[rank.bit_count() % len(SERVERS)]


class _Popen(popen_forkserver.Popen):
    """Forked from the server of its rank."""

    def _launch(self, process_obj: _Process) -> None:
        for seed, server in enumerate(SERVERS, start=1):
            server.set_forkserver_preload(IMPORTED)
            # As those of a rank, but for the order of its sets; and one thread, for a process with several cannot fork.
            own = {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": str(seed), "OMP_NUM_THREADS": "1"}
            with inherited_environment(UNCOMPILED | own):
                server.ensure_running()
        connect = server_of(process_obj.rank).connect_to_new_process
        with mock.patch.object(forkserver, "connect_to_new_process", connect):
            super()._launch(process_obj)


class _Process(ForkServerProcess):
    """One rank, with the environment that a fresh process would inherit."""

    def __init__(self, *, args: tuple[Any, ...], **how: Any) -> None:
        super().__init__(args=args, **how)
        (self.rank,) = (each.rank for each in args if isinstance(each, Rank))

    @staticmethod
    def _Popen(process_obj: _Process) -> _Popen:
        return _Popen(process_obj)

    def start(self) -> None:
        self.environ = dict(os.environ)
        super().start()

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self.environ)
        torch.set_num_threads(int(self.environ["OMP_NUM_THREADS"]))
        super().run()


run_ranks = partial(launch.run_ranks, context=type("Worlds", (ForkServerContext,), {"Process": _Process})())
