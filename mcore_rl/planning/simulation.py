"""Simulates a run by its events: engines draw, the trainer trains, weights are published, in one of the modes.

A group is the responses to one prompt; its age is counted from the version of the weights that drew its oldest token.
Before version ``v + 1`` is published, at most ``v + 1 + max_staleness`` batches of groups have been begun (AReaL,
arXiv:2505.24298, section 5.1).  That alone bounds no age: a step that trains younger groups in place of one that is
unfinished leaves more to later steps than they can train in time.  So a training step takes the oldest groups that are
whole, and only if no more than ``j`` batches of the others must be trained within the next ``j`` steps, for every
``j``; else it waits for more to be whole.  What it begins with, every later step can keep.

The costs are given; ``planning/modes.py`` makes them from a plan.  Rewards take no time, and nothing dies.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import count
from random import Random

from mcore_rl.planning.lengths import Lengths
from mcore_rl.planning.simulated_engine import EngineCosts, Response, SimulatedEngine

AHEAD = 1.25  # of the sequences that an engine runs together, so many are sent to it (rollout/pool.py)


@dataclass(frozen=True, kw_only=True)
class SimulatedMode:
    """How drawing and training follow one another.

    max_staleness: versions, see the head of this file; 0: a step draws, then trains.
    shared: engines and trainer are on the same devices, so that engines stand while the trainer works.
    in_flight: unfinished responses go on under new weights, their cache computed again; else a new version waits until
    no response is under way.
    """

    name: str
    max_staleness: int = 0
    shared: bool = False
    in_flight: bool = False


SYNC_COLOCATED = SimulatedMode(name="sync, colocated", shared=True)
SYNC_SEPARATE = SimulatedMode(name="sync, separate")
ONE_STEP_OFF = SimulatedMode(name="one_step_off", max_staleness=1)


def asynchronous(max_staleness: int, *, in_flight: bool = True) -> SimulatedMode:
    """The mode ``async`` with this bound, ``async.max_staleness``."""
    name = f"async, {max_staleness}" + ("" if in_flight else ", drained")
    return SimulatedMode(name=name, max_staleness=max_staleness, in_flight=in_flight)


@dataclass(frozen=True, kw_only=True)
class TrainerCosts:
    """Seconds of a training step: ``fixed_s``, and ``token_s`` for each token of prompts and responses.

    publish_s: of a weight update, in which the engines stand.
    """

    fixed_s: float
    token_s: float
    publish_s: float


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What a step trains.  groups: prompts.  samples: responses to each.  prompt: tokens of a prompt."""

    groups: int
    samples: int
    prompt: int
    lengths: Lengths


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """What came of it, after the first steps.

    step_s: mean seconds of a step.  samples_per_s: trained.
    drawing, training, publishing: shares of the time; of the engines the mean.
    staleness_mean, staleness_max: versions between a group's oldest token and the step that trained it.
    num_preemptions: of responses that gave up their cache, in all engines and steps.
    trained: the numbers of the groups that were trained, in their order; of all steps.
    shared: whether engines and trainer are on the same devices.
    """

    step_s: float
    samples_per_s: float
    drawing: float
    training: float
    publishing: float
    staleness_mean: float
    staleness_max: int
    num_preemptions: int
    trained: tuple[int, ...]
    shared: bool

    @property
    def engines_idle(self) -> float:
        """The share of the time in which an engine's devices do nothing; on shared devices they train, too."""
        return max(0.0, 1 - self.drawing - self.publishing - self.training * self.shared)

    @property
    def trainer_idle(self) -> float:
        """The share of the time in which the trainer's devices do nothing; on shared devices they draw, too."""
        return max(0.0, 1 - self.training - self.publishing - self.drawing * self.shared)


@dataclass(slots=True, kw_only=True)
class _Group:
    """version: of the weights when it was begun.  oldest: of its first token.  left: responses under way."""

    number: int
    lengths: list[int]
    version: int
    tokens: int
    left: int
    oldest: int = -1


@dataclass(frozen=True, kw_only=True)
class _Sums:
    """Seconds until a version was published.  time: since the beginning.  busy_s: of all engines together."""

    time: float = 0.0
    busy_s: float = 0.0
    training_s: float = 0.0
    publishing_s: float = 0.0


class _Trainer(Enum):
    """What the trainer does.  trained: its weights wait until no response is under way."""

    idle = "idle"
    training = "training"
    trained = "trained"
    publishing = "publishing"


def simulate(
    mode: SimulatedMode,
    work: Workload,
    engines: EngineCosts,
    num_engines: int,
    trainer: TrainerCosts,
    *,
    steps: int = 8,
    seed: int = 0,
) -> Simulation:
    """Simulate ``steps`` training steps, after as many as the mode needs to reach its pace.

    Equal arguments give equal results, and every mode sees the same groups in the same order.
    """
    assert steps > 0 and num_engines > 0 and work.groups > 0 and work.samples > 0, "there is something to simulate"
    run = _Run(mode, work, engines, num_engines, trainer, Random(seed))
    first = 2 * mode.max_staleness + 1
    run.until(first + steps)
    before = run.sums[first]
    after = run.sums[-1]
    seconds = after.time - before.time
    staleness = run.staleness[first * work.groups :]
    return Simulation(
        step_s=seconds / steps,
        samples_per_s=steps * work.groups * work.samples / seconds,
        drawing=(after.busy_s - before.busy_s) / num_engines / seconds,
        training=(after.training_s - before.training_s) / seconds,
        publishing=(after.publishing_s - before.publishing_s) / seconds,
        staleness_mean=sum(staleness) / len(staleness),
        staleness_max=max(staleness),
        num_preemptions=sum(engine.num_preemptions for engine in run.engines),
        trained=tuple(run.trained),
        shared=mode.shared,
    )


class _Run:
    """The state of a simulation.  sums: at every version, the first at the beginning.  staleness: of trained groups."""

    def __init__(
        self,
        mode: SimulatedMode,
        work: Workload,
        costs: EngineCosts,
        num_engines: int,
        trainer: TrainerCosts,
        random: Random,
    ) -> None:
        self._mode = mode
        self._work = work
        self._trainer = trainer
        self._random = random
        self.engines = [SimulatedEngine(costs) for _ in range(num_engines)]
        self._room = max(1, round(AHEAD * costs.most))
        self._events: list[tuple[float, int, SimulatedEngine | None]] = []  # None: the trainer's
        self._numbers = count()
        self._current: dict[SimulatedEngine, int] = {}  # of its events, the one that still holds
        self._pending: deque[_Group] = deque()
        self._live: dict[int, _Group] = {}  # begun and not trained, in their order
        self._num_whole = self._num_begun = 0
        self._state = _Trainer.idle
        self._training_s = 0.0
        self._publishing_s = 0.0
        self.sums = [_Sums()]
        self.staleness = list[int]()
        self.trained = list[int]()

    @property
    def version(self) -> int:
        """How often weights were published."""
        return len(self.sums) - 1

    def until(self, version: int) -> None:
        """Simulate until ``version`` is published."""
        self._admit(0.0)
        while self.version < version:
            time, number, engine = heapq.heappop(self._events)
            if engine is None:
                self._trainer_event(time)
            elif self._current.get(engine) == number:
                self._take_whole(engine, time)
                self._resume(engine)
                self._dispatch(time)
                self._go_on(time)

    def _push(self, time: float, engine: SimulatedEngine | None = None) -> None:
        number = next(self._numbers)
        if engine is not None:
            self._current[engine] = number
        heapq.heappush(self._events, (time, number, engine))

    def _admit(self, time: float) -> None:
        """Begin as many groups as the bound allows."""
        while self._num_begun < (self.version + 1 + self._mode.max_staleness) * self._work.groups:
            lengths = self._work.lengths.group(self._random, self._work.samples)
            tokens = sum(lengths) + len(lengths) * self._work.prompt
            number = self._num_begun
            self._num_begun = self._num_begun + 1
            group = _Group(number=number, lengths=lengths, version=self.version, tokens=tokens, left=len(lengths))
            self._live[number] = group
            self._pending.append(group)
        self._dispatch(time)

    def _dispatch(self, time: float) -> None:
        """Send pending groups to the engines with the fewest responses, while they have room."""
        touched: dict[SimulatedEngine, None] = {}
        while self._pending:
            engine = min(self.engines, key=lambda each: each.outstanding)
            if engine.outstanding and engine.outstanding + self._work.samples > self._room:
                break
            if engine not in touched:
                touched[engine] = None
                self._take_whole(engine, time)
            group = self._pending.popleft()
            for index, length in enumerate(group.lengths):
                engine.submit(
                    Response(group=group.number, length=length, prompt=self._work.prompt, prefilled=index > 0)
                )
        for engine in touched:
            self._resume(engine)

    def _take_whole(self, engine: SimulatedEngine, time: float) -> None:
        """Let ``engine`` compute until ``time``, and note what became whole."""
        for response in engine.advance(time):
            group = self._live[response.group]
            group.left -= 1
            self._num_whole += group.left == 0

    def _resume(self, engine: SimulatedEngine) -> None:
        begun, end = engine.resume()
        for response in begun:
            group = self._live[response.group]
            group.oldest = self.version if group.oldest < 0 else group.oldest
        self._current.pop(engine, None)
        if end is not None:
            self._push(end, engine)

    def _pause(self, time: float) -> float:
        """Stop every engine at the end of its step; returns when all stand."""
        for engine in self.engines:
            self._take_whole(engine, time)
            self._current.pop(engine, None)
        return max(engine.clock for engine in self.engines)

    def _go_on(self, time: float) -> None:
        """Begin what the trainer may begin: a training step, or a weight update that waited."""
        if self._state is _Trainer.trained:
            self._publish(time)
        elif self._state is _Trainer.idle and (chosen := self._choose()):
            self._train(chosen, time)

    def _choose(self) -> list[_Group]:
        """The oldest batch that is whole; empty if a step must wait."""
        size = self._work.groups
        bound = self._mode.max_staleness
        if self._num_whole < size:
            return []
        whole = (group for group in self._live.values() if not group.left)
        chosen = sorted(whole, key=lambda group: (group.oldest, group.number))[:size]
        begun = Counter(group.oldest for group in self._live.values() if group.oldest >= 0)
        begun.subtract(group.oldest for group in chosen)
        others = 0
        for version in sorted(begun):
            others += begun[version]  # to be trained within this many steps after this one
            if others > max(0, version + bound - self.version) * size:
                return []
        return chosen

    def _train(self, chosen: Sequence[_Group], time: float) -> None:
        for group in chosen:
            del self._live[group.number]  # which fails for one that was trained
            assert 0 <= self.version - group.oldest <= self._mode.max_staleness, "no token is older than the bound"
            self.staleness.append(self.version - group.oldest)
            self.trained.append(group.number)
        self._num_whole -= len(chosen)
        begin = self._pause(time) if self._mode.shared else time
        seconds = self._trainer.fixed_s + self._trainer.token_s * sum(group.tokens for group in chosen)
        self._training_s += seconds
        self._state = _Trainer.training
        self._push(begin + seconds)

    def _publish(self, time: float) -> None:
        """Begin a weight update, unless a response is in its way."""
        if not self._mode.in_flight and (self._pending or not all(engine.idle for engine in self.engines)):
            self._state = _Trainer.trained
            return
        begin = self._pause(time)
        self._publishing_s += self._trainer.publish_s
        self._state = _Trainer.publishing
        self._push(begin + self._trainer.publish_s)

    def _trainer_event(self, time: float) -> None:
        """The trainer has trained, or the engines have its weights."""
        if self._state is _Trainer.training:
            self._publish(time)
            return
        busy_s = sum(engine.busy_s for engine in self.engines)
        self.sums.append(_Sums(time=time, busy_s=busy_s, training_s=self._training_s, publishing_s=self._publishing_s))
        self._state = _Trainer.idle
        for engine in self.engines:
            engine.recompute(time)
            self._resume(engine)
        self._admit(time)
        self._go_on(time)
