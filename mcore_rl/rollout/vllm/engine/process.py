"""A rollout engine in a child process, for a program that must not import vLLM, such as one with Megatron.

``start_engine`` starts it and returns a ``RolloutEngine``, which can be used from any event loop.  Requests and samples
are sent pickled over a pipe, each sample as soon as it is finished.  On a cluster, Ray starts the processes.

The invariant: if any process of vLLM dies, every caller that waits for the engine gets an error within seconds.  When
the engine is shut down or dead, or this program ends, none of its processes is alive and its sockets are removed.
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
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import Future
from contextlib import aclosing, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ParamSpec, Self, TypeVar

from mcore_rl.config.lora import EngineAdapters
from mcore_rl.config.rollout import ServingConfig
from mcore_rl.ground.errors import DeadEngineError
from mcore_rl.parallel.device import detect
from mcore_rl.parallel.launch import FRESH, ChildProcess, ProcessContext, inherited_environment
from mcore_rl.rollout.protocol import Request, RolloutEngine, Sample, Sampling
from mcore_rl.rollout.remote_engine import RemoteEngine, Verb
from mcore_rl.rollout.vllm.engine.admission import admit, demand_plain_weights
from mcore_rl.rollout.vllm.engine.engine_node import ONE_NODE, EngineNode
from mcore_rl.rollout.vllm.engine.environment import Settings, engine_environment, usable_cores
from mcore_rl.rollout.vllm.engine.liveness import death, first_cause
from mcore_rl.rollout.vllm.engine.process_group import end_group
from mcore_rl.rollout.vllm.engine.server import START, serve

P = ParamSpec("P")
T = TypeVar("T")

STOP_S = 10.0  # how long a regular shutdown of an engine may take
SETTLE_S = 1.0  # how long the process may take to end after its pipe


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
    awaits_weights: bool = False,
    adapters: EngineAdapters | None = None,
    node: EngineNode = ONE_NODE,
    pictures: bool = False,
    wait: bool = True,
    context: ProcessContext = FRESH,
) -> EngineProcess:
    """Starts an engine with the weights of ``directory``, or its part on one node; it is ready after 10 s or more.

    Args:
        name: its name in messages.
        directory: a Hugging Face checkpoint.
        config: a RolloutConfig's engine generates, a RewardModelConfig's engine classifies; it has tp ranks.
        cores: the cores that it computes on, on CPU; None: all that this process may use.
        device_ids: the accelerators that it sees; None: those that this process sees.
        extension: dotted name of the class whose methods are added to vLLM's workers (``worker_methods``).
        version: of the weights in ``directory``.
        log: the file for the output of its processes; None: a temporary file, removed unless the engine fails.
        awaits_weights: reads no weights, which come with an update; it refuses to generate before.
        adapters: that updates bring and every sample is drawn with; None: it has no memory for any.
        node: which of the nodes of an engine on several.  It is started on all of them, with the same other arguments
            but ``cores``, ``device_ids`` and ``log``.  What runs on the first is the engine; on the others, an
            ``EnginePart``.  They wait for one another.
        pictures: prompts may have some: a multimodal checkpoint is run as the whole, and not its text part alone.
        wait: False returns at once, to start several engines; ``wait_until_ready`` then raises what this would.
        context: makes the process, which must be equivalent to a fresh one.

    Raises what ``admit`` raises, before a process is started; RolloutError or DeadEngineError if the start fails.
    """
    platform = detect(config.device)
    model = admit(directory, config, platform, pictures=pictures)
    if not awaits_weights:
        demand_plain_weights(directory, config)
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
        model=model,
        platform=platform,
        cores=chosen,
        extension=extension,
        version=version,
        log=log,
        scratch=scratch,
        awaits_weights=awaits_weights,
        adapters=adapters,
        node=node,
    )
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(settings, theirs), name=name)
    with inherited_environment(engine_environment(platform, config, chosen, device_ids, scratch, node=node)):
        process.start()
    theirs.close()  # so that the pipe closes when the child ends
    engine = EngineProcess(name, process, ours, settings, temporary=temporary)
    if wait:
        engine.wait_until_ready()
    return engine


@dataclass(frozen=True)
class _Caller:
    """A caller that waits for the answers to one call.

    doing: what the engine does for it, for the message if the engine dies meanwhile.
    loop, queue: where the answers are delivered.
    """

    doing: str
    loop: asyncio.AbstractEventLoop
    queue: asyncio.Queue[tuple[str, Any]]

    def hand(self, kind: str, value: Any) -> None:
        with suppress(RuntimeError):  # the loop is closed: the caller no longer waits
            self.loop.call_soon_threadsafe(self.queue.put_nowait, (kind, value))


class EngineProcess(RemoteEngine):
    """A ``RolloutEngine`` or ``EnginePart`` in a process of its own; see the docs of these protocols.

    ``start_engine`` makes it; it is a context manager.
    """

    def __init__(
        self, name: str, process: ChildProcess, connection: Connection, settings: Settings, *, temporary: bool
    ) -> None:
        super().__init__(name)
        self._process = process
        self._connection = connection
        self._log = settings.log
        self._scratch = settings.scratch
        self._temporary = temporary
        self._doing = "starting"
        self.leader = 0  # the process id that the child gives as its own; 0: it has not yet
        self._started: Future[None] = Future()
        self._dead: DeadEngineError | None = None
        self._callers: dict[int, _Caller] = {}
        self._count = itertools.count(START + 1)
        self._lock = threading.Lock()  # of the pipe and of ``_callers``
        # Runs at the program's end before multiprocessing waits for its children: what is registered last runs first.
        atexit.register(self._end)
        threading.Thread(target=self._listen, name=f"{name} listener", daemon=True).start()

    @property
    def pid(self) -> int:
        """The id of the child process, which leads a process group of all the engine's processes."""
        assert self._process.pid is not None
        return self._process.pid

    def wait_until_ready(self) -> None:
        """Waits until the engine can generate; raises the error if it fails to start."""
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
        """Ends the engine's processes: ``shutdown`` for programs without an event loop.  Idempotent."""
        with suppress(OSError, ValueError), self._lock:
            self._connection.send_bytes(pickle.dumps((START, "close", ())))
        self._process.join(STOP_S)
        self._end()
        atexit.unregister(self._end)
        self._process.join()
        if self._temporary and self._dead is None and self._started.exception() is None:
            self._log.unlink(missing_ok=True)

    def _end(self) -> None:
        self._process.kill()  # also by its own id: it leads no group before it runs
        self._clear()

    def _clear(self) -> None:
        end_group(self.pid)
        shutil.rmtree(self._scratch, ignore_errors=True)

    async def generate(self, requests: Sequence[Request], sampling: Sampling) -> AsyncGenerator[Sample]:
        """See ``RolloutEngine.generate``."""
        doing = f"generating {len(requests)} samples"
        parts = self._parts(doing, RolloutEngine.generate.__name__, (tuple(requests), sampling), {})
        async with aclosing(parts):
            async for sample in parts:
                yield sample

    async def shutdown(self) -> None:
        """See ``RolloutEngine.shutdown``."""
        await asyncio.to_thread(self.close)

    async def _ask(self, doing: str, verb: Verb[P, T], *args: P.args, **options: P.kwargs) -> T:
        async with aclosing(self._parts(doing, verb.__name__, args, options)) as parts:
            answers: list[T] = [part async for part in parts]
        (answer,) = answers
        return answer

    async def _parts(
        self, doing: str, verb: str, args: tuple[object, ...], options: dict[str, Any]
    ) -> AsyncGenerator[Any]:
        """Calls ``verb`` in the child; yields its answer part by part, until the child says that it is complete."""
        call = next(self._count)
        caller = _Caller(doing, asyncio.get_running_loop(), asyncio.Queue())
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
        with suppress(OSError), self._lock:  # if the child is gone, the listener finds the reason and tells the callers
            self._connection.send_bytes(message)

    def _listen(self) -> None:
        """The listener's thread: delivers every answer to its caller until the pipe ends."""
        with suppress(EOFError, OSError):
            while True:
                call, kind, value = pickle.loads(self._connection.recv_bytes())
                if kind == "leader":
                    self.leader = value
                elif kind == "phase":
                    self._doing = value
                elif call == START:
                    self._started.set_exception(value) if kind == "error" else self._started.set_result(None)
                else:
                    with self._lock:
                        caller = self._callers.get(call)
                    if caller is not None:
                        caller.hand(kind, value)
                    if isinstance(value, DeadEngineError):  # vLLM is gone, so the child has nothing left to do
                        self._dead = value
                        break
        self._bury()

    def _bury(self) -> None:
        """Ends what the dead child left behind, and tells every caller why it died."""
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
