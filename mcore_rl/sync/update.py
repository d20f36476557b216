"""One weight update: who is asked for what, in which order.

The engines pause and refuse new samples; their workers receive while the training ranks publish; when all of them are
done, the engines take the version and go on.  Where anything fails, every engine is told that its weights are only
partly updated, and refuses to draw until an update is complete.  After a restart of an engine all join a new channel.

The first update of a channel is checked before anything is drawn with it: first the configuration that both sides
compute with, because weights alone do not make a model, and then every weight.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from mcore_rl.config.rollout import RolloutLayout
from mcore_rl.ground.errors import DeadEngineError, DeadWorkerError, SyncError
from mcore_rl.proofs.effective_config import EffectiveConfig, config_differences, joined, unread
from mcore_rl.rollout.protocol import Pause, RolloutEngine
from mcore_rl.rollout.vllm.worker_methods import Answer, WeightReceiverMethods, answer_of
from mcore_rl.sync.check import Expected, HeldFingerprints, differences
from mcore_rl.sync.publish import Published

logger = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")
MAX_SHOWN = 20
REMEDY = "Give both the same config.json: that of model.path, unchanged since the run began"


class Trainers(Protocol):
    """The training ranks: each method calls the ``Publisher`` of all of them, ``opening`` of one."""

    async def configuration(self) -> EffectiveConfig:
        """The configuration that the training ranks compute with, of all layers."""
        ...

    async def opening(self, first_rank: int, attempt: int) -> bytes:
        """``Publisher.opening`` of one training rank."""
        ...

    async def open(self, attempt: int) -> None:
        """``Publisher.open`` on all training ranks."""
        ...

    async def publish(self, version: int) -> list[Published]:
        """``Publisher.publish``, in the order of the ranks."""
        ...

    async def expected(self, version: int) -> Expected:
        """``check.expected_weights``; all ranks return the same."""
        ...

    async def demand_alive(self) -> None:
        """Returns once every training rank has answered; raises DeadWorkerError if one is gone."""
        ...


class WeightUpdater:
    """Brings the trainers' weights into ``engines``, which in their order are the ranks of ``layout``."""

    def __init__(self, engines: Sequence[RolloutEngine], layout: RolloutLayout, trainers: Trainers) -> None:
        self.trainers = trainers
        self._attempt = 0
        self._version: int | None = None
        self.take(engines, layout)

    def take(self, engines: Sequence[RolloutEngine], layout: RolloutLayout) -> None:
        """Updates ``engines``, and no others, from now on; they join a new channel at the next update.

        The trainers must have made their plan for ``layout`` (``Publisher``).
        """
        each = layout.engine_size
        assert len(engines) * each == layout.world_size, f"{len(engines)} engines of {each} ranks are not {layout}"
        self.engines = dict(zip(range(0, layout.world_size, each), engines, strict=True))
        self._is_open = self._is_checked = False
        self._previous: Expected | None = None  # by ranks, which other engines are by now
        self._expected: Expected | None = None

    async def open(self) -> None:
        """Let all training ranks and workers join one channel.

        Raises SyncError or WeightMapError with what one of them found, and SyncError with every field in which an
        engine computes another model than the trainers.
        """
        await self._compare_configurations()
        self._attempt += 1
        openings = {rank: await self.trainers.opening(rank, self._attempt) for rank in self.engines}
        joining = [
            _call(engine, WeightReceiverMethods.sync_open, openings[rank]) for rank, engine in self.engines.items()
        ]
        await _all(*joining, self.trainers.open(self._attempt))
        self._is_open = True
        self._is_checked = False

    async def _compare_configurations(self) -> None:
        """Refuses engines whose model is another one than the trainers' with the same weights."""
        configs = {"the trainer": await self.trainers.configuration()}
        for rank, engine in self.engines.items():
            config = joined(await _call(engine, WeightReceiverMethods.sync_configuration))
            if config not in configs.values():  # engines that are alike are named once
                configs[f"rollout rank {rank}"] = config
        for holder, names in unread(configs).items():
            logger.warning("Not compared, because %s does not tell: %s", holder, ", ".join(names))
        if problems := config_differences(configs):
            head = "The engines compute another model than the trainer, and would with the same weights:"
            raise SyncError("\n  - ".join([head, *problems]) + "\n" + REMEDY)

    def rejoin(self) -> None:
        """Let all join a new channel at the next update: a restarted engine is no member of the old one."""
        self._is_open = False

    async def update(self, version: int, pause: Pause = Pause.keep) -> list[Published]:
        """Bring the trainers' weights into all engines as ``version``; return what each training rank did.

        Opens a channel where none is open, and then checks the update.

        Args:
            version: of the weights.
            pause: what happens to samples under way.  ``Pause.keep`` freezes them: they go on with the new weights, and
                ``Sample.versions`` says which tokens each version drew.

        Raises SyncError with the first cause, DeadEngineError or DeadWorkerError where a process is gone; all engines
        then refuse to draw until an update is complete.
        """
        engines = list(self.engines.values())
        try:
            await _all(*(engine.start_update(pause) for engine in engines))
            if not self._is_open:
                await self.open()
            receiving = [_call(engine, WeightReceiverMethods.sync_receive, version) for engine in engines]
            publishing = asyncio.ensure_future(self.trainers.publish(version))
            await _all(*receiving, publishing)
            self._version = version
            if not self._is_checked:
                await self.check()
            await _all(*(engine.finish_update(version) for engine in engines))
        except Exception as error:
            self._is_open = False
            telling = (engine.fail_update(str(error)) for engine in engines)
            await asyncio.gather(*telling, return_exceptions=True)  # one that is gone cannot be told
            if isinstance(error, SyncError):  # a member may say so before it is known that another one died
                await self.trainers.demand_alive()
            raise
        return publishing.result()

    async def check(self) -> None:
        """Compare every tensor of every rollout rank with the trainers', which must not have trained since ``update``.

        Raises SyncError naming each tensor that is wrong, missing or stale (it is as an earlier check saw it).
        """
        assert self._version is not None, "nothing was updated yet"
        expected = await self.trainers.expected(self._version)
        if self._expected is not None and self._expected.version != expected.version:
            self._previous = self._expected
        self._expected = expected
        held = HeldFingerprints(values={}, copies={})
        for rank, engine in self.engines.items():
            prints = await _call(engine, WeightReceiverMethods.sync_fingerprints)
            copies = await _call(engine, WeightReceiverMethods.sync_copies)
            held = held.beside(HeldFingerprints.of(rank, prints, copies))
        problems = differences(expected, held, self._previous)
        if problems:
            shown = [
                *problems[:MAX_SHOWN],
                *([f"and {len(problems) - MAX_SHOWN} more"] if len(problems) > MAX_SHOWN else []),
            ]
            head = f"{len(problems)} tensors of the rollout ranks are not the trainer's, version {self._version}:"
            raise SyncError("\n  - ".join([head, *shown]) + "\nPublish again; if they stay, report it with this list")
        self._is_checked = True


async def _call(
    engine: RolloutEngine, method: Callable[Concatenate[Any, P], Answer[T]], *args: P.args, **options: P.kwargs
) -> list[T]:
    """Call a method of ``WeightReceiver`` in every worker of ``engine``; return the results in rank order."""
    return [answer_of(answer) for answer in await engine.call_workers(method, *args, **options)]


async def _all(*calls: Awaitable[T]) -> list[T]:
    """Return the results of ``calls`` once all have ended: none may be left waiting for a member that never comes.

    Of several errors the one that knows most is raised: a death, else the cause that the members agreed on.
    """
    results = await asyncio.gather(*calls, return_exceptions=True)
    errors = [result for result in results if isinstance(result, BaseException)]
    for kind in (DeadEngineError, DeadWorkerError, SyncError, BaseException):
        for error in errors:
            if isinstance(error, kind):
                raise error
    return [result for result in results if not isinstance(result, BaseException)]
