"""The child's side of ``process.py``: a vLLM engine that answers calls over a pipe, in a process group of its own."""

from __future__ import annotations

import asyncio
import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import warnings
from contextlib import aclosing
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from mcore_rl.ground.errors import McoreRLError, RolloutError
from mcore_rl.processes.guarding import start_guard
from mcore_rl.rollout.protocol import RolloutEngine
from mcore_rl.rollout.remote_engine import perform
from mcore_rl.rollout.vllm.engine.environment import Settings

if TYPE_CHECKING:
    from mcore_rl.rollout.vllm.engine.headless_engine import HeadlessEngine
    from mcore_rl.rollout.vllm.engine.vllm_engine import VllmEngine

    Started = VllmEngine | HeadlessEngine

START = 0  # the number of the call that every child answers unasked: its start
GRACE_S = 3.0  # how long a regular shutdown of an engine may take


def serve(settings: Settings, connection: Connection) -> None:
    """The child's main function: starts the engine and answers calls until ``close`` or the end of the pipe."""
    os.setsid()  # one process group to kill; and Ctrl-C reaches only the parent, which handles it
    log = os.open(settings.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(log, stream.fileno())
    faulthandler.register(signal.SIGUSR2, file=log, all_threads=True)  # also of processes that vLLM forks from here
    _have_own_tracker()
    if sys.platform == "linux" and not settings.platform.is_accelerator:
        os.sched_setaffinity(0, settings.cores)
    alive = _have_guard(settings.scratch)
    # vLLM forks its processes on accelerators.  They must close the pipes by which others see that this one is alive.
    os.register_at_fork(after_in_child=lambda: [end.close() for end in (connection, alive)])
    threading.Thread(target=_end_with_parent, daemon=True).start()
    asyncio.run(_Server(connection).run(settings))
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)  # a regular exit takes the interpreter a second with vLLM loaded


class _Server:
    """Answers calls over the pipe.

    A call is (number, verb, (args, options)); "cancel" names a call to end, "close" ends the child.  Answers are
    (number, kind, value): any number of ``part``, then ``end`` or ``error``.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def run(self, settings: Settings) -> None:
        self._send(START, "leader", os.getpid())
        engine = await self._start(settings)
        if engine is None:
            return
        self._send(START, "end", None)
        inbox: asyncio.Queue[tuple[int, str, Any]] = asyncio.Queue()
        threading.Thread(target=self._receive, args=(asyncio.get_running_loop(), inbox), daemon=True).start()
        while True:
            call, verb, content = await inbox.get()
            if verb == "close":
                break
            if verb != "cancel":
                self._tasks[call] = asyncio.create_task(self._answer(engine, call, verb, *content))
            elif call in self._tasks:
                self._tasks[call].cancel()
        await engine.shutdown()

    async def _start(self, settings: Settings) -> Started | None:
        self._send(START, "phase", "importing vLLM")
        try:
            from mcore_rl.rollout.vllm.engine.headless_engine import HeadlessEngine
            from mcore_rl.rollout.vllm.engine.vllm_engine import VllmEngine

            self._send(START, "phase", f"loading {settings.directory}")
            started = VllmEngine if settings.node.node_rank == 0 else HeadlessEngine
            return await started.start(settings)
        except Exception as error:  # noqa: BLE001  raised in the parent
            self._send(START, "error", _portable(settings.name, error))
            return None

    async def _answer(
        self, engine: Started, call: int, verb: str, args: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        try:
            if verb == RolloutEngine.generate.__name__:
                async with aclosing(getattr(engine, verb)(*args)) as samples:
                    async for sample in samples:
                        self._send(call, "part", sample)
            else:
                self._send(call, "part", await perform(engine, verb, args, options))
            self._send(call, "end", None)
        except Exception as error:  # noqa: BLE001  raised in the parent
            self._send(call, "error", _portable(engine.name, error))
        finally:
            del self._tasks[call]

    def _send(self, call: int, kind: str, value: Any) -> None:
        self._connection.send_bytes(pickle.dumps((call, kind, value)))

    def _receive(self, loop: asyncio.AbstractEventLoop, inbox: asyncio.Queue[tuple[int, str, Any]]) -> None:
        """The receiving thread: puts every call into ``inbox``, and ``close`` at the end of the pipe."""
        try:
            while True:
                loop.call_soon_threadsafe(inbox.put_nowait, pickle.loads(self._connection.recv_bytes()))
        except (EOFError, OSError):
            loop.call_soon_threadsafe(inbox.put_nowait, (START, "close", ()))


def _portable(name: str, error: Exception) -> McoreRLError:
    """An error that the parent can unpickle: this package's errors as they are, any other as its text."""
    if isinstance(error, McoreRLError):
        error.__cause__ = None
        return error
    return RolloutError(f"{name}: {type(error).__name__}: {error}")


def _have_own_tracker() -> None:
    """Replaces the caller's resource tracker by one of this process group.

    The new one removes what killed processes of vLLM leave behind, and says so in the log; the caller's would remove it
    only at the end of the caller's program, and warn of a leak.  To make Python start a new one, the descriptor of the
    caller's is replaced by a broken pipe.
    """
    tracker = resource_tracker.getfd()
    assert tracker is not None
    reading, writing = os.pipe()
    os.close(reading)
    os.dup2(writing, tracker)
    os.close(writing)
    with warnings.catch_warnings(action="ignore"):
        resource_tracker.ensure_running()


def _have_guard(scratch: Path) -> IO[bytes]:
    """Starts the guard, which ends this process group when its program ends, or when the returned file is closed.

    The process's death closes it.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    reading, writing = os.pipe()
    start_guard([reading, parent.sentinel], grace_s=GRACE_S, group=os.getpgrp(), folder=str(scratch))
    os.close(reading)
    return open(writing, "wb", buffering=0)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)  # the guard does the rest
