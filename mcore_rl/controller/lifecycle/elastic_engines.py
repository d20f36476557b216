"""Lets engines join and leave a run that goes on, as ``mcore-rl engines`` asks (``tracking.engine_requests``).

An engine that joins is started beside the run, like the others.  It receives the current weights with the next update,
or at once while the trainer does not change them, is checked, and draws.  One that leaves gets no more to draw; others
draw on with its unfinished samples; then it is ended, and its devices are free.

The invariant: what is asked for and cannot be changes nothing, and no failure of an engine that joins ends the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import psutil

from mcore_rl.config.rollout import ServingConfig
from mcore_rl.config.trainer import Placement, TrainerConfig
from mcore_rl.controller.lifecycle.device_sharing import DeviceSharing
from mcore_rl.controller.lifecycle.engine_set import EngineSet, Member, layout_of
from mcore_rl.controller.lifecycle.messages import note, warn
from mcore_rl.controller.lifecycle.weight_sync import WeightSync
from mcore_rl.ground.errors import ConfigError, McoreRLError, Violation
from mcore_rl.parallel.device import Platform
from mcore_rl.planning.overheads import GIB
from mcore_rl.rollout.pool import EngineLoad, EnginePool
from mcore_rl.runtime.placement import (
    EngineBundles,
    Places,
    cluster_cores,
    free_engine,
    live_nodes,
    node_names,
    nodes_of,
    place_engine,
)
from mcore_rl.runtime.start import Joining
from mcore_rl.tracking.engine_requests import EngineAnswer, EngineMailbox, EngineRequest, EngineRow

LOOK_S = 0.5  # between two looks for requests
MOST_AT_ONCE = 1024


@dataclass(frozen=True, kw_only=True)
class Starting:
    """How an engine is started beside a run.

    start: an engine in these bundles, ready when it returns.
    sees: whether these nodes see the models.  host_bytes: what an engine takes of a machine without accelerators.
    """

    trainer: TrainerConfig
    rollout: ServingConfig
    platform: Platform
    places: Places
    start: Callable[[Joining, EngineBundles], Awaitable[Member]]
    sees: Callable[[frozenset[str]], Awaitable[None]]
    host_bytes: int


class ElasticEngines:
    """Answers requests about the engines of one run, while it is open.

    An update outside the run's own turn that fails ends the run with its error, as one of the run's own would.
    """

    def __init__(
        self,
        run_dir: Path,
        starting: Starting,
        engines: EngineSet,
        pool: EnginePool,
        weights: WeightSync,
        devices: DeviceSharing,
    ) -> None:
        self._run_dir = run_dir
        self._starting = starting
        self._engines = engines
        self._pool = pool
        self._weights = weights
        self._devices = devices
        self._next = 1 + max(number_of(member) for member in engines.members)
        self._coming: dict[int, int] = {}  # slot of an engine that is started -> its number
        self._leaving: list[str] = []
        self._work: set[asyncio.Task[None]] = set()
        self._owner: asyncio.Task[object] | None = None  # the task of the run, while it may be cancelled
        self._failure: BaseException | None = None

    async def __aenter__(self) -> ElasticEngines:
        self._owner = asyncio.current_task()
        self._work.add(asyncio.create_task(self._serve()))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        work = [*self._work]
        self._owner = None
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)
        if self._failure is not None and isinstance(error, asyncio.CancelledError):
            owner = asyncio.current_task()
            assert owner is not None
            if owner.uncancel() == 0:
                raise self._failure

    async def _serve(self) -> None:
        mailbox = EngineMailbox(self._run_dir)
        while True:
            for name, request in mailbox.requests():
                if isinstance(request, str):
                    warn(request)
                    continue
                task = asyncio.create_task(self._answer(mailbox, name, request))
                self._work.add(task)
                task.add_done_callback(self._answered)
            await asyncio.sleep(LOOK_S)

    def _answered(self, task: asyncio.Task[None]) -> None:
        """Ends the run if an update failed that gave an engine its weights: nobody else was told of it."""
        self._work.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and self._owner is not None:
            self._failure, owner, self._owner = error, self._owner, None
            owner.cancel()

    async def _answer(self, mailbox: EngineMailbox, name: str, request: EngineRequest) -> None:
        lines = list[str]()

        def say(line: str) -> None:
            lines.append(line)
            note(line)
            mailbox.answer(name, EngineAnswer(state="working", lines=tuple(lines)))

        try:
            await self.do(request, say)
        except ConfigError as error:
            mailbox.answer(name, EngineAnswer(state="refused", lines=(*lines, str(error)), engines=self.rows()))
        except BaseException:
            again = "The run ended, or begins again because a training process died, before this was done. Ask again"
            mailbox.answer(name, EngineAnswer(state="refused", lines=(*lines, again)))
            raise
        else:
            mailbox.answer(name, EngineAnswer(state="done", lines=tuple(lines), engines=self.rows()))

    async def do(self, request: EngineRequest, say: Callable[[str], None]) -> None:
        """Does what is asked; tells ``say`` how far it is.  ConfigError: it cannot be done, or an engine failed."""
        leaving = self._demand_possible(request)
        slots = self._free_slots(request.add)
        numbers = range(self._next, self._next + request.add)
        self._next += request.add
        self._coming |= dict(zip(slots, numbers, strict=True))
        self._leaving += [member.name for member in leaving]
        work = [self._remove(member, say) for member in leaving]
        work += [self._add(number, slot, say) for slot, number in zip(slots, numbers, strict=True)]
        results = await asyncio.gather(*work, return_exceptions=True)
        problems = [result for result in results if isinstance(result, BaseException)]
        for problem in problems:
            if not isinstance(problem, ConfigError):
                raise problem
        if problems:
            raise ConfigError([each for error in problems for each in error.violations])  # type: ignore[attr-defined]

    def rows(self) -> tuple[EngineRow, ...]:
        """All engines, those that are being started last."""
        rows = [self._row(load) for load in self._pool.loads]
        names = {row.name for row in rows}
        coming = [f"engine {number}" for number in self._coming.values()]
        new = [name for name in coming if name not in names]
        rows += [EngineRow(name=name, state="starting", version=None, requests=0, tokens=0, nodes=()) for name in new]
        return tuple(rows)

    def _row(self, load: EngineLoad) -> EngineRow:
        name = load.engine.name
        version = self._weights.version
        bundles = next((member.bundles for member in self._engines.members if member.name == name), ())
        has_weights = load.has_weights and load.death is None
        return EngineRow(
            name=name,
            state=_state(load),
            version=version if has_weights else None,
            requests=len(load.costs),
            tokens=round(load.tokens),
            nodes=tuple(node_names(nodes_of(bundles))),
        )

    def _demand_possible(self, request: EngineRequest) -> list[Member]:
        """The engines that leave.  Raises ConfigError with every reason why what is asked cannot be done."""
        wrong = list[Violation]()
        members = [each for each in self._engines.members if each.name not in self._leaving]
        by_name = {member.name: member for member in members}
        if (request.add or request.remove or request.remove_last) and (fixed := self._why_fixed()):
            raise ConfigError([Violation("run_dir", self._run_dir, *fixed)])
        leaving = list[Member]()
        for text in request.remove:
            name = text.replace("-", " ")
            if (member := by_name.get(name)) is not None:
                leaving += [member] if member not in leaving else []
                continue
            there = ", ".join(each.replace(" ", "-") for each in by_name)
            starting = name in [f"engine {number}" for number in self._coming.values()]
            problem = "is still starting" if starting else f"is no engine of this run, which has {there}"
            remedy = "Ask again when it draws" if starting else "Name one of these"
            wrong.append(Violation("--remove", text, problem, remedy))
        rest = [member for member in members if member not in leaving]
        leaving += rest[max(0, len(rest) - request.remove_last) :]
        if leaving and not self._stay(leaving):
            problem = "would leave the run without an engine that draws"
            wrong.append(Violation("--remove", ", ".join(each.name for each in leaving), problem, "Add others first"))
        for member in leaving:
            if self._load(member).death is not None:
                problem = "has died, and is about to be started again"
                wrong.append(Violation("--remove", member.name, problem, "Ask again when it draws"))
        wrong += self._room_violations(request.add, len(members) - len(leaving) + len(self._coming))
        if wrong:
            raise ConfigError(wrong)
        return leaving

    def _why_fixed(self) -> tuple[str, str] | None:
        """Why engines can neither join nor leave, and what to do."""
        trainer = self._starting.trainer
        rollout = self._starting.rollout
        if trainer.placement is Placement.colocated:
            problem = "trainer.placement=colocated: engines are where the trainer is"
            return problem, "Go on with trainer.placement=separate, where engines have devices of their own"
        if rollout.layout.experts_span_replicas:
            problem = f"rollout.ep={rollout.ep} spreads the experts over all replicas, which are one engine"
            return problem, f"Go on with rollout.ep={rollout.tp}, where each replica is an engine of its own"
        return None

    def _stay(self, leaving: Sequence[Member]) -> bool:
        names = {member.name for member in leaving} | set(self._leaving)
        return any(load.draws and load.engine.name not in names for load in self._pool.loads)

    def _room_violations(self, add: int, num_others: int) -> list[Violation]:
        """Why this machine has no room for so many more engines, as far as that is known before they are started.

        Ray counts accelerators; cores and host memory are shared, and counted here.
        """
        starting = self._starting
        size = self._starting.rollout.layout.engine_size
        if not 0 <= add <= MOST_AT_ONCE:
            return [Violation("--add", add, "is too many", f"Write {MOST_AT_ONCE} or less")]
        if starting.platform.is_accelerator or not add:
            return []
        wrong = list[Violation]()
        cores = cluster_cores()
        if (num_others + add) * size > cores:
            problem = f"beside {num_others} others of {size} ranks, a core each: Ray has {cores} cores"
            wrong.append(Violation("--add", add, problem, "Add fewer, or join a node to Ray first"))
        alone = len(live_nodes()) == 1
        free = psutil.virtual_memory().available
        if alone and add * starting.host_bytes > free:
            problem = f"takes {add * starting.host_bytes / GIB:.1f} GiB of host memory, and {free / GIB:.1f} are free"
            wrong.append(Violation("--add", add, problem, "Add fewer, or lower rollout.kv_cache_memory_bytes"))
        return wrong

    def _free_slots(self, count: int) -> list[int]:
        taken = {member.slot for member in [*self._engines.members, *self._engines.newcomers]} | set(self._coming)
        free = (slot for slot in range(len(taken) + count) if slot not in taken)
        return [next(free) for _ in range(count)]

    async def _add(self, number: int, slot: int, say: Callable[[str], None]) -> None:
        name = f"engine {number}"
        say(f"{name}: starting")
        try:
            member = await self._start(number, slot)
            self._engines.newcomers.append(member)
            say(f"{name}: ready, and gets weights with the next update, or at once while the trainer waits")
        finally:
            del self._coming[slot]
        try:
            async with self._devices.engines_turn():
                assert self._weights.version is not None, "engines with devices of their own keep their weights"
                await self._devices.send_again(self._weights.version)  # unless the trainer has in its turn
        finally:
            if member not in self._engines.members:
                await self._end(member)
        if member not in self._engines.members:
            problem = "it could not take the weights: the run's output says why"
            raise ConfigError([Violation("--add", name, problem, "Install the same everywhere, and add it again")])
        say(f"{name}: draws, with weights of version {self._weights.version}")

    async def _start(self, number: int, slot: int) -> Member:
        """A new engine, ready but for its weights.  ConfigError: it does not start."""
        starting = self._starting
        one = self._starting.rollout.layout
        train = starting.places.train
        bundles = None
        try:
            bundles = await place_engine(starting.trainer, layout_of(one, 1), starting.platform, train, slot)
            await starting.sees(nodes_of(bundles))
            beside = len(self._engines.members) + len(self._engines.newcomers) + len(self._coming) - 1
            return await starting.start(Joining(number, slot, beside), bundles)
        except BaseException as error:
            if bundles is not None:
                free_engine(bundles, train)
            if not isinstance(error, McoreRLError):
                raise
            if isinstance(error, ConfigError):
                raise
            violation = Violation("--add", f"engine {number}", str(error), "The run goes on without it")
            raise ConfigError([violation]) from error

    async def _remove(self, member: Member, say: Callable[[str], None]) -> None:
        try:
            async with self._weights.no_update():
                self._engines.dismiss(member)
            say(f"{member.name}: leaves; others draw on with what it has not finished")
            num_unfinished = await self._end(member)
        finally:
            self._leaving.remove(member.name)
        say(f"{member.name}: has left, with {num_unfinished} unfinished samples for others; its devices are free")

    async def _end(self, member: Member) -> int:
        """Ends an engine that is no member any more and frees its devices; returns what others draw to the end."""
        num_unfinished = 0
        if member in self._engines.newcomers:
            self._engines.newcomers.remove(member)
        else:
            num_unfinished = await self._pool.drain(member.client)
        await member.client.shutdown()
        free_engine(member.bundles, self._starting.places.train)
        return num_unfinished

    def _load(self, member: Member) -> EngineLoad:
        return next(load for load in self._pool.loads if load.engine is member.client)


def number_of(member: Member) -> int:
    """The number in an engine's name."""
    return int(member.name.rpartition(" ")[2])


def _state(load: EngineLoad) -> str:
    """Where an engine stands, in a word or two."""
    if load.leaves:
        return "leaving"
    if load.death is not None:
        return "died"
    if not load.has_weights:
        return "awaits weights"
    return "drawing" if load.costs else "idle"
