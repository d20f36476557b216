"""A stream of groups, of which each step takes a batch of finished ones: ``trainer.mode=async`` and partial rollouts.

A group is the responses to one prompt, from the moment at which it is begun until a step trains it; it is drawn by a
task of its own.  Those that are finished and not yet trained are the buffer; ``admission`` says how
many may be begun, and which are trained.  What is unfinished when weights change meets one of three fates
(``Drawing.pause``), and all else is the same:

- ``keep``: it is drawn while the trainer works, frozen while engines receive weights, and goes on with the new ones.
- ``wait``: it is drawn while the trainer works, and finished before engines receive weights.
- ``abort``: it is taken from the engines as soon as the step has its batch, kept with its tokens, and sent again when
  the next step wants groups.  So engines and trainer may share devices.

A checkpoint keeps what is not trained (``kept_draws``): a run that is resumed goes on with it, at its age.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any

from mcore_rl.config.asynchrony import Overdue
from mcore_rl.config.run import RunConfig
from mcore_rl.controller.rollouts.admission import Admission
from mcore_rl.controller.rollouts.drawn_file import DrawnGroup
from mcore_rl.controller.rollouts.kept_draws import KeptDraws
from mcore_rl.controller.rollouts.rollout_source import Ahead
from mcore_rl.controller.step.preemption import Preempted, Preemption
from mcore_rl.controller.step.rollout_collection import (
    FILTERED,
    CollectProgress,
    DroppedGroup,
    RolloutBatch,
    numbered,
)
from mcore_rl.data.prompts import PromptRow
from mcore_rl.data.sampler import PromptSampler
from mcore_rl.ground.errors import DeadEngineError, DeadWorkerError
from mcore_rl.rollout.episodes import Episode, FinishReason, VersionSpan
from mcore_rl.rollout.protocol import Pause, Request, Sample, SampleSource, Sampling
from mcore_rl.tracking.clock import Clock

LEAVE_S = 30.0  # how long a run that leaves, or whose trainer died, waits for engines to give unfinished responses back
DRAWING = "drawing"  # the name in timeline.jsonl of the time in which groups are drawn


class KeptSamples:
    """A ``SampleSource`` over ``source`` that keeps the samples of one group, until the group is finished.

    A request that was answered before is answered the same way, and not sent again: what an engine drew before it died
    is not lost.  An agent may ask for the same turn after other tokens; then it is drawn.

    A sample that was given back unfinished (finish ``abort``) is kept too, and goes on from its tokens.  Who draws sees
    finished samples alone, and an agent's loop lives on while its turn waits.

    going: set while requests may be sent; those that come else wait.
    kept: of the group before the run was resumed, as ``kept`` gives them.
    """

    def __init__(
        self,
        source: SampleSource,
        going: asyncio.Event,
        kept: Iterable[tuple[tuple[int, ...], Sample]] = (),
    ) -> None:
        self._source = source
        self._going = going
        self._kept: dict[tuple[tuple[str, int], tuple[int, ...]], Sample] = {
            ((sample.prompt_id, sample.index), asked): sample for asked, sample in kept
        }
        self._num_calls = 0  # of ``source`` that go on

    @property
    def kept(self) -> tuple[tuple[tuple[int, ...], Sample], ...]:
        """Each sample with the model's input that it answers, for another ``KeptSamples``."""
        return tuple((asked, sample) for (_, asked), sample in self._kept.items())

    @property
    def oldest(self) -> int | None:
        """The version of the oldest token that is kept; None: there is none."""
        return oldest_of(sample.versions for sample in self._kept.values())

    @property
    def is_drawing(self) -> bool:
        """Whether ``source`` has requests of this group."""
        return self._num_calls > 0

    @property
    def num_unfinished_tokens(self) -> int:
        """The tokens of the samples that are kept unfinished."""
        return sum(len(sample.tokens) for sample in self._kept.values() if sample.finish is FinishReason.abort)

    async def generate(self, requests: Sequence[Request], sampling: Sampling) -> AsyncIterator[Sample]:
        """See ``SampleSource.generate``."""
        asked = {request.key: (request.key, tuple(request.tokens)) for request in requests}
        missing = dict[tuple[str, int], Request]()
        for request in requests:
            kept = self._kept.get(asked[request.key])
            if kept is None or kept.finish is FinishReason.abort:
                missing[request.key] = request if kept is None else replace(request, so_far=kept)
            else:
                yield kept
        while missing:
            while not self._going.is_set():
                await self._going.wait()  # it may be cleared again before who waited runs
            self._num_calls += 1
            try:
                async for sample in self._source.generate([*missing.values()], sampling):
                    key = sample.prompt_id, sample.index
                    if sample.finish is FinishReason.abort and not len(sample.tokens):
                        continue  # nothing of it was drawn
                    self._kept[asked[key]] = sample
                    if sample.finish is FinishReason.abort:
                        missing[key] = replace(missing[key], so_far=sample)
                    else:
                        del missing[key]
                        yield sample
            finally:
                self._num_calls -= 1

    def forget(self) -> None:
        """Keep nothing of what was drawn so far."""
        self._kept.clear()


@dataclass(kw_only=True, eq=False)
class Group:
    """One group; a ``Standing`` of ``admission``.

    ordinal: its number in the order in which groups are begun.  row: the prompt.  samples: what is drawn for it.
    oldest: the version of its oldest token; until it is finished, the oldest that it can be.
    episodes: when it is finished, graded, a greedy one last if the algorithm needs it.
    """

    ordinal: int
    row: PromptRow
    samples: KeptSamples
    oldest: int
    episodes: list[Episode] | None = None

    @classmethod
    def of(cls, kept: DrawnGroup, source: SampleSource, going: asyncio.Event) -> Group:
        """The group that ``kept`` was made of, which goes on to draw from ``source``.  going: see ``KeptSamples``."""
        ordinal = kept.facts["ordinal"]
        oldest = kept.facts["oldest"]
        samples = KeptSamples(source, going, kept.samples)
        episodes = [*kept.episodes] or None
        return cls(ordinal=ordinal, row=kept.row, samples=samples, oldest=oldest, episodes=episodes)

    @property
    def kept(self) -> DrawnGroup:
        """The group as a checkpoint has it."""
        episodes = tuple(self.episodes or ())
        facts = {"ordinal": self.ordinal, "oldest": self.oldest}
        return DrawnGroup(row=self.row, episodes=episodes, samples=self.samples.kept, facts=facts)

    @property
    def finished(self) -> bool:
        """Whether a step can train it."""
        return self.episodes is not None

    def finish(self, episodes: list[Episode]) -> None:
        """Take its graded responses."""
        self.episodes = episodes
        self.samples.forget()
        drawn = oldest_of(part.versions for each in episodes for part in each.segments if part.trained)
        assert drawn is None or drawn >= self.oldest, f"{self.row.id} has tokens of version {drawn}"
        self.oldest = self.oldest if drawn is None else drawn

    def begin_again(self, version: int, *, whole: bool) -> None:
        """Draw on with ``version`` after an engine died.  whole: draw the finished responses again, too."""
        if whole:
            self.samples.forget()
        kept = self.samples.oldest
        self.oldest = version if kept is None else min(kept, version)


def oldest_of(spans: Iterable[Sequence[VersionSpan]]) -> int | None:
    """The lowest version of any token; None: there are no tokens whose version is known."""
    return min((span.version for of_one in spans for span in of_one if span.end > span.start), default=None)


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """What a stream draws with, and by which rules.

    ahead: what draws, what restarts engines, and what takes draws from them.
    admission: how many groups may be begun, and which are trained.
    pause: what becomes of draws under way when weights change.
    redraws: draw the whole group again if an engine dies with a part of it (``async.overdue``).
    num_samples: responses to a prompt.  needs_greedy: whether a group has a greedy one beside them.
    gen_batch: groups that count as one batch in ``dropped/generation_batches``.
    most_dropped: groups without a signal that may be replaced for one step (``algorithm.filter_groups``).
    """

    ahead: Ahead
    admission: Admission
    pause: Pause
    redraws: bool
    num_samples: int
    needs_greedy: bool
    gen_batch: int
    most_dropped: int


def drawing_of(run: RunConfig, num_steps: int, ahead: Ahead) -> Drawing:
    """How ``run`` draws in ``trainer.mode=async`` or with ``rollout.partial``.  num_steps: the last step."""
    batch = run.data.train_batch_size
    filtering = run.algorithm.filter_groups
    partial_in_turns = run.rollout.partial
    pause = Pause.abort if partial_in_turns else Pause.keep if run.async_.partial_rollout else Pause.wait
    extra = math.ceil(run.rollout.over_sampling * batch) if partial_in_turns else None
    gen_batch = batch if run.data.gen_batch_size is None else run.data.gen_batch_size
    most = filtering.max_num_gen_batches * gen_batch - batch if filtering.enable else 0
    return Drawing(
        ahead=ahead,
        admission=Admission(batch=batch, bound=run.async_.max_staleness, num_steps=num_steps, extra=extra),
        pause=pause,
        redraws=run.async_.overdue is Overdue.redraw,
        num_samples=run.rollout.n,
        needs_greedy=run.needs_greedy,
        gen_batch=gen_batch,
        most_dropped=max(0, most),
    )


class RolloutStream:
    """The rollouts of one step after the other, as ``RolloutSource``; a context manager, which ends all draws.

    Args:
        drawing: what draws, and by which rules.
        sampler: ``next_rows(count)`` takes rows from it.
        num_trained: groups that were trained before the run was resumed.
        clock: shows in the timeline when groups were drawn.
        progress: is told of the groups that the trainer waits for.
    """

    def __init__(
        self,
        drawing: Drawing,
        sampler: PromptSampler,
        next_rows: Callable[[int], list[PromptRow]],
        num_trained: int,
        clock: Clock,
        progress: CollectProgress,
    ) -> None:
        self._drawing = drawing
        self._sampler = sampler
        self._next_rows = next_rows
        self._progress = progress
        self._num_trained = num_trained
        self._ordinal = sampler.num_drawn
        self._version = 0
        self._may_draw = False
        self._going = asyncio.Event()  # set while groups may send requests
        self._live: dict[int, Group] = {}  # begun, neither trained nor dropped, by ordinal
        self._tasks: dict[Group, asyncio.Task[list[Episode]]] = {}  # of the groups under way
        self._changed = asyncio.Event()  # a group is no longer under way
        self._death: DeadEngineError | None = None
        self._failure: BaseException | None = None
        self._busy = BusyTime(clock)
        self._dropped, self._num_redrawn = list[DroppedGroup](), 0  # since the last step got its groups
        self._kept_at_end: KeptDraws | None = None

    async def __aenter__(self) -> RolloutStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind in (Preempted, DeadWorkerError) and self._going.is_set() and not self._drawing.ahead.is_dead():
            with suppress(DeadEngineError, TimeoutError):
                await asyncio.wait_for(self.interrupt(), LEAVE_S)  # so that unfinished responses are kept
        tasks = [*self._tasks.values()]
        self._kept_at_end = self.kept
        self._give_back(self.place)
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def place(self) -> dict[str, Any]:
        """The sampler's state, to which the prompts of all groups that no step has, or has told of, are given back."""
        rows = [self._live[ordinal].row for ordinal in sorted(self._live)]
        dropped = [(each.epoch, each.number) for each in self._dropped]
        return self._sampler.state_with([*dropped, *((row.epoch, row.number) for row in rows)])

    @property
    def kept(self) -> KeptDraws:
        """All groups that no step has, as they are now; once the stream has ended, as they were then."""
        if self._kept_at_end is not None:
            return self._kept_at_end
        return KeptDraws(
            place=self._sampler.state_dict(),
            groups=tuple(self._live[ordinal].kept for ordinal in sorted(self._live)),
            next_ordinal=self._ordinal,
            num_trained=self._num_trained,
            dropped=tuple(self._dropped),
        )

    def return_to(self, kept: KeptDraws) -> None:
        """Goes back to ``kept``, of this stream, but for what was drawn of its groups since; begins nothing more."""
        known = self._live
        self._may_draw = False
        self._sampler.load_state_dict(kept.place)
        self._go_on_with(kept)
        self._live |= {ordinal: known[ordinal] for ordinal in self._live if ordinal in known}
        for group, task in self._tasks.items():
            if self._live.get(group.ordinal) is not group:
                task.cancel()

    def resume(self, kept: KeptDraws, version: int) -> None:
        """Goes on with ``kept`` of a checkpoint, after step ``version``, before anything is drawn.

        A group that would be trained beyond the bound, since the bound or the batch is another one now, is drawn again.
        """
        self._sampler.load_state_dict(kept.place)
        self._go_on_with(kept)
        late = self._drawing.admission.overdue(version, self._live.values())
        for group in late:
            del self._live[group.ordinal]
        self._num_redrawn += len(late)
        again = ((group.row.epoch, group.row.number) for group in late)
        self._sampler.load_state_dict(self._sampler.state_with(again))

    def _go_on_with(self, kept: KeptDraws) -> None:
        engine = self._drawing.ahead.collector.engine
        groups = [Group.of(each, engine, self._going) for each in kept.groups]
        self._live = {group.ordinal: group for group in groups}
        self._ordinal = kept.next_ordinal
        self._num_trained = kept.num_trained
        self._dropped = [*kept.dropped]

    def _give_back(self, place: dict[str, Any]) -> None:
        """Gives all rows after ``place`` back to the sampler, and cancels every draw."""
        self._may_draw = False
        for task in self._tasks.values():
            task.cancel()
        self._live = {}
        self._dropped = []
        self._sampler.load_state_dict(place)

    async def next(self, step: int) -> RolloutBatch:
        """The rollouts of ``step``.  Raises what a draw or a grader raised, as ``RolloutCollector.collect`` does."""
        rules = self._drawing
        admission = self._drawing.admission
        self._version = step - 1
        self._may_draw = True
        held_s = 0.0
        self._going.set()
        self._busy.set(bool(self._tasks))
        self._draw()
        while True:
            if self._failure is not None:
                raise self._failure
            if self._death is not None:
                await self._recover(self._death)
            if chosen := admission.choose(self._version, self._live.values()):
                break
            num_finished = self._num_finished
            shown = min(num_finished, admission.batch) * rules.num_samples
            self._progress(shown, admission.batch * rules.num_samples)
            begun = time.perf_counter()
            self._changed.clear()
            assert self._tasks, "a step waits for groups, and none is under way"
            await self._changed.wait()
            held_s += (time.perf_counter() - begun) * (num_finished >= admission.batch)
        for group in chosen:
            del self._live[group.ordinal]
        self._num_trained += len(chosen)
        if rules.pause is Pause.abort:
            await self.interrupt()
        return self._batch(step, chosen, held_s)

    async def interrupt(self) -> None:
        """Takes all draws from the engines: what is unfinished stays in ``Group.samples`` until ``next`` goes on.

        Agents' loops, tools and graders go on meanwhile.
        """
        self._may_draw = False
        self._going.clear()
        self._busy.set(False)
        while any(group.samples.is_drawing for group in self._tasks):  # some may be on their way to the engines
            await self._drawing.ahead.interrupt()
            await asyncio.sleep(0)

    async def take_back(self) -> None:
        """Takes what is unfinished from the engines, for a checkpoint, and goes on with it where drawing goes on."""
        if not self._going.is_set() or self._drawing.ahead.is_dead():
            return
        may_draw = self._may_draw
        await self.interrupt()
        self._may_draw = may_draw
        self._going.set()
        self._busy.set(bool(self._tasks))
        self._draw()

    async def settle(self, preemption: Preemption) -> None:
        """Makes draws ready for the weights that engines are about to receive, as ``Drawing.pause`` says.

        With ``wait`` nothing is drawn afterwards, and nothing is begun until ``next``; if the run is told to end, all
        draws are cancelled.  If all engines died, they are restarted, and ``next`` draws on with the weights that they
        receive.  Raises as ``EngineRestarter.restart_dead``.
        """
        if self._drawing.pause is Pause.wait:
            self._may_draw = False
            try:
                await preemption.cancel_if_asked(self._quiet())
            except Preempted:
                for task in self._tasks.values():
                    task.cancel()
                await self._quiet()
                return
        if self._death is not None and self._failure is None:
            await self._quiet_if_dead()
            await self._drawing.ahead.restart_dead(self._death)
            self._death = None

    @property
    def _num_finished(self) -> int:
        return sum(group.finished for group in self._live.values())

    async def _quiet(self) -> None:
        """Waits until no group is under way."""
        while self._tasks:
            await asyncio.wait(self._tasks.values())

    async def _quiet_if_dead(self) -> None:
        """Waits until no group sends requests, which all fail, unless the engines that died were restarted since."""
        while self._drawing.ahead.is_dead() and any(group.samples.is_drawing for group in self._tasks):
            await asyncio.wait(self._tasks.values(), return_when=asyncio.FIRST_COMPLETED)

    async def _recover(self, death: DeadEngineError) -> None:
        """Restarts dead engines while the trainer waits, and draws on."""
        await self._quiet_if_dead()
        await self._drawing.ahead.recover(death)
        self._death = None
        self._draw()

    def _draw(self) -> None:
        """Goes on with groups that an engine died with, and begins as many as the bound allows."""
        if not self._may_draw or self._death is not None or self._failure is not None:
            return
        for group in self._live.values():
            if not group.finished and group not in self._tasks:
                self._num_redrawn += 1
                whole = self._drawing.redraws or not self._drawing.ahead.collector.can_replay(group.row)
                group.begin_again(self._version, whole=whole)
                self._begin(group)
        for _ in range(self._drawing.admission.room(self._version, self._num_trained + len(self._live))):
            (row,) = self._next_rows(1)
            samples = KeptSamples(self._drawing.ahead.collector.engine, self._going)
            group = Group(ordinal=self._ordinal, row=row, samples=samples, oldest=self._version)
            self._live[group.ordinal] = group
            self._ordinal += 1
            self._begin(group)

    def _begin(self, group: Group) -> None:
        collector = self._drawing.ahead.collector.over(group.samples)
        task = asyncio.create_task(collector.collect_group(group.ordinal, group.row))
        self._tasks[group] = task
        task.add_done_callback(partial(self._ended, group))
        self._busy.set(self._going.is_set())

    def _ended(self, group: Group, task: asyncio.Task[list[Episode]]) -> None:
        """Takes the episodes of ``group``, or the error that ended its draw, which ``next`` and ``settle`` see to."""
        del self._tasks[group]
        error = None if task.cancelled() else task.exception()
        if isinstance(error, DeadEngineError):
            self._death = self._death or error
        elif error is not None:
            self._failure = self._failure or error
        elif not task.cancelled() and group.ordinal in self._live:
            self._take(group, task.result())
        self._draw()
        self._busy.set(bool(self._tasks) and self._going.is_set())
        self._changed.set()

    def _take(self, group: Group, episodes: list[Episode]) -> None:
        """Puts ``group`` into the buffer; or drops it if it has no signal, so that another is begun in its place."""
        if len(self._dropped) < self._drawing.most_dropped and not self._drawing.ahead.collector.teaches(episodes):
            del self._live[group.ordinal]
            self._dropped.append(DroppedGroup.of(group.row, FILTERED))
        else:
            group.finish(episodes)

    def _batch(self, step: int, chosen: list[Group], held_s: float) -> RolloutBatch:
        """What a step gets; counts begin anew."""
        rules = self._drawing
        dropped = tuple(self._dropped)
        redrawn = self._num_redrawn
        self._dropped = []
        self._num_redrawn = 0
        groups = [group.episodes for group in chosen if group.episodes is not None]
        episodes, greedy = numbered(step, groups, needs_greedy=rules.needs_greedy)
        return RolloutBatch(
            episodes=episodes,
            greedy=greedy,
            num_batches=math.ceil((len(chosen) + len(dropped)) / rules.gen_batch),
            seconds=self._busy.take(),
            dropped=dropped,
            metrics={
                "rollout/buffer": float(self._num_finished),
                "rollout/under_way": float(len(self._tasks)),
                "rollout/kept_tokens": float(sum(each.samples.num_unfinished_tokens for each in self._live.values())),
                "rollout/redrawn": float(redrawn),
                "rollout/held_s": held_s,
                **self._drawing.ahead.collector.metrics(episodes),
            },
        )


class BusyTime:
    """Seconds in which groups were under way, and the time of them as ``DRAWING`` in the timeline of ``clock``."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._shown: AbstractContextManager[None] | None = None
        self._since = self._seconds = 0.0

    def set(self, busy: bool) -> None:
        """Whether groups are under way from now on."""
        if busy and self._shown is None:
            self._shown = self._clock.beside(DRAWING)
            self._since = time.perf_counter()
            self._shown.__enter__()
        elif not busy and self._shown is not None:
            self._seconds += time.perf_counter() - self._since
            self._shown.__exit__(None, None, None)
            self._shown = None

    def take(self) -> float:
        """Since the last call."""
        now = time.perf_counter()
        seconds = self._seconds + (0.0 if self._shown is None else now - self._since)
        self._seconds = 0.0
        self._since = now
        return seconds
