"""A rollout engine in a child process, for a program that must not import vLLM: one that holds Megatron, or a script.

``start_engine`` starts it; what it returns is a ``RolloutEngine``, and can be used from any event loop.  Requests and
samples travel by pickle over a pipe, samples as soon as they are finished.  On a cluster Ray starts the processes.

The invariant: whatever becomes of vLLM's processes, whoever waits for the engine hears of it within seconds, and when
the engine is shut down or dead, or this program ends, none of its processes is alive and its sockets are gone.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import os
import pickle
import shutil
import tempfile
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from concurrent.futures import Future
from contextlib import aclosing, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from mcore_rl.config.rollout import ServingConfig
from mcore_rl.errors import DeadEngineError
from mcore_rl.parallel.device import detect
from mcore_rl.parallel.launch import FRESH, ChildProcess, ProcessContext, inherited_environment
from mcore_rl.rollout.engine.classifier import admit_engine
from mcore_rl.rollout.engine.environment import engine_environment, usable_cores
from mcore_rl.rollout.engine.log import death, first_cause
from mcore_rl.rollout.engine.process_group import end_group
from mcore_rl.rollout.engine.server import START, Settings, serve
from mcore_rl.rollout.protocol import Pause, Request, Sample, Sampling, Statistics

STOP_S = 10.0  # for an engine that was asked to shut down
SETTLE_S = 1.0  # between the end of the pipe and the end of the process


def start_engine(
    name: str,
    directory: Path,
    config: ServingConfig,
    *,
    cores: Sequence[int] | None = None,
    device_ids: Sequence[str] | None = None,
    extension: str | None = None,
    version: int = 0,
    log: Path | None = None,
    wait: bool = True,
    context: ProcessContext = FRESH,
) -> EngineProcess:
    """An engine of ``config``'s tp ranks with the weights of ``directory``, ready after 10 s and more.

    name: in messages.  cores: that it computes on, on CPU; None: all that this process may use.  device_ids: the
    accelerators that it sees; None: those that this process sees.  extension, version: see ``VllmEngine.start``.
    log: where the output of its processes goes; None: to a file that is removed unless the engine fails.  wait: False
    returns at once, for starting several; ``wait_until_ready`` then raises what this would.  config: a RolloutConfig's
    engine draws, a RewardModelConfig's classifies.  context: makes the process, which must be as good as fresh.

    Raises ConfigError and RolloutError: before a process is started for what ``admit_engine`` can tell, else once it
    failed.
    """
    platform = detect(config.device)
    admit_engine(directory, config, platform)
    chosen = tuple(usable_cores() if cores is None else cores)
    temporary = log is None
    if log is None:
        descriptor, path = tempfile.mkstemp(prefix=f"{name}-", suffix=".log")
        os.close(descriptor)
        log = Path(path)
    scratch = Path(tempfile.mkdtemp(prefix="mcore-rl-engine-"))
    settings = Settings(
        name=name,
        directory=directory,
        config=config,
        platform=platform,
        cores=chosen,
        extension=extension,
        version=version,
        log=log,
        scratch=scratch,
    )
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(settings, theirs), name=name)
    with inherited_environment(engine_environment(platform, config, chosen, device_ids, scratch)):
        process.start()
    theirs.close()  # so that the pipe ends when the child does
    engine = EngineProcess(name, process, ours, settings, temporary=temporary)
    if wait:
        engine.wait_until_ready()
    return engine


@dataclass(frozen=True)
class _Caller:
    """Who waits for an answer, on which event loop, and for what."""

    doing: str
    loop: asyncio.AbstractEventLoop
    queue: asyncio.Queue[tuple[str, Any]]

    def hand(self, kind: str, value: Any) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self.loop.call_soon_threadsafe(self.queue.put_nowait, (kind, value))


class EngineProcess:
    """A ``RolloutEngine`` or ``Classifier`` in a process of its own; see there.

    Made by ``start_engine``; a context manager.
    """

    def __init__(
        self, name: str, process: ChildProcess, connection: Connection, settings: Settings, *, temporary: bool
    ) -> None:
        self._name, self._process, self._connection = name, process, connection
        self._log, self._scratch, self._temporary = settings.log, settings.scratch, temporary
        self._doing = "starting"
        self._started: Future[None] = Future()
        self._dead: DeadEngineError | None = None
        self._callers: dict[int, _Caller] = {}
        self._count = itertools.count(START + 1)
        self._lock = threading.Lock()  # of the pipe, and of who waits
        # When this program ends, before multiprocessing waits for its children: the last that is registered runs first.
        atexit.register(self._end)
        threading.Thread(target=self._listen, name=f"{name} listener", daemon=True).start()

    @property
    def name(self) -> str:
        """What messages call it."""
        return self._name

    @property
    def pid(self) -> int:
        """Of the child process, which leads a process group of all that belongs to the engine."""
        assert self._process.pid is not None
        return self._process.pid

    def wait_until_ready(self) -> None:
        """Return when the engine can generate; raise why it cannot."""
        try:
            self._started.result()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End its processes; ``shutdown`` for programs without an event loop.  Twice is as good as once."""
        with suppress(OSError, ValueError), self._lock:
            self._connection.send_bytes(pickle.dumps((START, "close", ())))
        self._process.join(STOP_S)
        self._end()
        atexit.unregister(self._end)
        self._process.join()
        if self._temporary and self._dead is None and self._started.exception() is None:
            self._log.unlink(missing_ok=True)

    def _end(self) -> None:
        self._process.kill()  # by itself, too: it leads no group before it runs
        self._clear()

    def _clear(self) -> None:
        end_group(self.pid)
        shutil.rmtree(self._scratch, ignore_errors=True)

    async def generate(self, requests: Sequence[Request], sampling: Sampling) -> AsyncIterator[Sample]:
        """See ``RolloutEngine.generate``."""
        parts = self._parts(f"generating {len(requests)} samples", "generate", tuple(requests), sampling)
        async with aclosing(parts):
            async for sample in parts:
                yield sample

    async def classify(self, texts: Sequence[Sequence[int]]) -> list[float | str]:
        """See ``Classifier.classify``."""
        return list(await self._ask(f"scoring {len(texts)} texts", "classify", tuple(texts)))

    async def abort(self, keys: Iterable[tuple[str, int]] | None = None) -> None:
        """See ``RolloutEngine.abort``."""
        await self._ask("aborting samples", "abort", None if keys is None else tuple(keys))

    async def pause(self, mode: Pause) -> None:
        """See ``RolloutEngine.pause``."""
        await self._ask("pausing", "pause", mode)

    async def resume(self) -> None:
        """See ``RolloutEngine.resume``."""
        await self._ask("resuming", "resume")

    async def sleep(self, level: int = 1) -> None:
        """See ``RolloutEngine.sleep``."""
        await self._ask("going to sleep", "sleep", level)

    async def wake(self) -> None:
        """See ``RolloutEngine.wake``."""
        await self._ask("waking up", "wake")

    async def version(self) -> int:
        """See ``RolloutEngine.version``."""
        return int(await self._ask("asked for its version", "version"))

    async def start_update(self, mode: Pause = Pause.keep) -> None:
        """See ``RolloutEngine.start_update``."""
        await self._ask("starting an update", "start_update", mode)

    async def finish_update(self, version: int) -> None:
        """See ``RolloutEngine.finish_update``."""
        await self._ask(f"finishing the update to version {version}", "finish_update", version)

    async def fail_update(self, cause: str) -> None:
        """See ``RolloutEngine.fail_update``."""
        await self._ask("giving an update up", "fail_update", cause)

    async def rpc(self, method: str, *args: object, timeout_s: float | None = None) -> list[Any]:
        """See ``RolloutEngine.rpc``."""
        return list(await self._ask(f"running {method}", "rpc", method, *args, timeout_s=timeout_s))

    async def statistics(self) -> Statistics:
        """See ``RolloutEngine.statistics``."""
        found = await self._ask("asked for its statistics", "statistics")
        assert isinstance(found, Statistics)
        return found

    async def shutdown(self) -> None:
        """See ``RolloutEngine.shutdown``."""
        await asyncio.to_thread(self.close)

    async def _ask(self, doing: str, verb: str, *args: object, **options: object) -> Any:
        found = None
        async for part in self._parts(doing, verb, *args, **options):
            found = part
        return found

    async def _parts(self, doing: str, verb: str, *args: object, **options: object) -> AsyncGenerator[Any]:
        """What the child answers, part by part, until it says that this was all."""
        call, caller = next(self._count), _Caller(doing, asyncio.get_running_loop(), asyncio.Queue())
        with self._lock:
            self._callers[call] = caller
        answered = False
        try:
            self._send(call, verb, args, options)
            while True:
                kind, value = await caller.queue.get()
                if kind == "part":
                    yield value
                    continue
                answered = True
                if kind == "error":
                    raise value
                return
        finally:
            with self._lock:
                del self._callers[call]
            if not answered and self._dead is None:
                self._send(call, "cancel", (), {})

    def _send(self, call: int, verb: str, args: tuple[object, ...], options: dict[str, object]) -> None:
        if self._dead is not None:
            raise DeadEngineError(str(self._dead))
        message = pickle.dumps((call, verb, (args, options)))
        with suppress(OSError), self._lock:  # gone: the listener finds out why, and tells whoever waits
            self._connection.send_bytes(message)

    def _listen(self) -> None:
        """The listener's thread: hand every answer to who waits for it, until the pipe ends."""
        with suppress(EOFError, OSError):
            while True:
                call, kind, value = pickle.loads(self._connection.recv_bytes())
                if kind == "phase":
                    self._doing = value
                elif call == START:
                    self._started.set_exception(value) if kind == "error" else self._started.set_result(None)
                else:
                    with self._lock:
                        caller = self._callers.get(call)
                    if caller is not None:
                        caller.hand(kind, value)
                    if isinstance(value, DeadEngineError):  # vLLM is gone; what answered for it has nothing left to do
                        self._dead = value
                        break
        self._bury()

    def _bury(self) -> None:
        """The child is gone: end what it left behind, and tell everyone who waits why."""
        if self._dead is None:
            self._process.join(SETTLE_S)
        code = self._process.exitcode
        self._clear()
        told = None if self._dead is None else str(self._dead)
        cause = "stopped answering" if code is None else f"was {death(code)}" if code < 0 else death(code)
        wrote = first_cause(self._log, {}) if code and code > 0 else ""
        why = f"its process {self.pid} {cause}{f' ({wrote})' if wrote else ''}. Its output is in {self._log}"
        with self._lock:
            callers = list(self._callers.values())
            doing = callers[0].doing if callers else self._doing
            self._dead = self._dead or DeadEngineError(f"{self.name} died while {doing}: {why}")
        if not self._started.done():
            self._started.set_exception(self._dead)
        for caller in callers:
            caller.hand("error", DeadEngineError(told or f"{self.name} died while {caller.doing}: {why}"))
