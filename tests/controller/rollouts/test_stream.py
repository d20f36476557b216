"""A stream of groups: what each step gets, what it waits for, and what becomes of groups that no step has.

Here updates wait for what is drawn (``async.partial_rollout=false``), or nothing is unfinished when they come;
``test_stream_partial.py`` has the rest.
"""

from __future__ import annotations

import asyncio
import gc
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from mcore_rl.config.algorithm import FilterGroupsConfig
from mcore_rl.config.asynchrony import AsyncConfig, Overdue
from mcore_rl.config.data import DataConfig
from mcore_rl.config.rollout import RolloutConfig
from mcore_rl.config.run import RunConfig
from mcore_rl.config.trainer import ASYNC, Placement, TrainerConfig
from mcore_rl.controller.rollouts.rollout_source import Ahead
from mcore_rl.controller.rollouts.stream import DRAWING, RolloutStream, drawing_of
from mcore_rl.controller.step.preemption import Preemption
from mcore_rl.controller.step.rollout_collection import RolloutBatch, RolloutCollector
from mcore_rl.data.prompts import PromptRow
from mcore_rl.data.sampler import PromptSampler
from mcore_rl.ground.errors import DeadEngineError
from mcore_rl.rewards.score import RewardRequest, Score
from mcore_rl.rollout.episodes import VersionSpan
from mcore_rl.rollout.protocol import Request, Sample, Sampling
from mcore_rl.tracking.clock import Clock
from tests.support.scripted_rollout import ScriptedEngine, ScriptedScorer, row
from tests.support.settings import algorithm_config

STEPS, BATCH, BOUND, PROMPTS = 6, 2, 2, 20


class Engine(ScriptedEngine):
    """Draws with ``version``.  slow: rows whose responses wait for ``gate``.  dead: rows with which it dies, after one
    response; then every call raises, as a pool's does, until it is restarted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.version, self.active = 0, 0
        self.slow, self.dead = set[str](), set[str]()
        self.gate = asyncio.Event()
        self.death: DeadEngineError | None = None

    async def generate(self, requests: Sequence[Request], sampling: Sampling) -> AsyncIterator[Sample]:
        name = requests[0].prompt.id.rpartition("/")[2]
        self.active += 1
        try:
            if self.death is not None:
                raise self.death
            if name in self.slow:
                await self.gate.wait()
            async for sample in super().generate(requests, sampling):
                yield replace(sample, versions=(VersionSpan(version=self.version, start=0, end=len(sample.tokens)),))
                if name in self.dead:
                    self.dead.remove(name)
                    self.death = DeadEngineError("engine 0 died")
                    raise self.death
        finally:
            self.active -= 1


class Stage:
    """A stream, and a trainer that trains in no time; a checkpoint of it can be played on (``resumed``)."""

    def __init__(
        self, bound: int = BOUND, overdue: Overdue = Overdue.wait, place: dict[str, Any] | None = None, step: int = 0,
        **algorithm: Any,
    ) -> None:  # fmt: skip
        self.run = RunConfig(
            data=DataConfig(train_batch_size=BATCH),
            algorithm=algorithm_config(**algorithm),
            rollout=RolloutConfig(n=2, max_response_length=20),
            trainer=TrainerConfig(mode=ASYNC, placement=Placement.separate),
            async_=AsyncConfig(max_staleness=bound, overdue=overdue, partial_rollout=False),
        )
        self.engine, self.preemption, self.clock = Engine(), Preemption(), Clock()
        self.engine.version = step
        self.sampler, self.restarted = PromptSampler(PROMPTS, 0, shuffle=False), list[str]()
        if place is not None:
            self.sampler.load_state_dict(place)
        self.grade: Callable[[RewardRequest], float | Score] = lambda request: float(request.key[1])
        scorer: Any = ScriptedScorer(lambda request: self.grade(request))
        self.begun: list[PromptRow] = []

        async def restart(error: DeadEngineError) -> None:
            assert not self.engine.active, "a draw goes on while engines are restarted"
            if self.engine.death is None:
                return
            self.restarted.append(str(error))
            self.engine.death = None

        collector = RolloutCollector(self.engine, scorer, self.run)
        ahead = Ahead(
            collector=collector,
            is_dead=lambda: self.engine.death is not None,
            restart_dead=restart,
            recover=restart,
            interrupt=self.interrupt,
        )
        drawing = drawing_of(self.run, STEPS, ahead)
        self.stream = RolloutStream(
            drawing, self.sampler, self.rows, step * BATCH, self.clock, lambda done, of: None
        )  # fmt: skip

    async def interrupt(self) -> None:
        raise AssertionError("updates wait for every response")

    def rows(self, count: int) -> list[PromptRow]:
        rows = [replace(row(index), number=index, epoch=epoch) for epoch, index in self.sampler.next_of_epochs(count)]
        self.begun += rows
        return rows

    async def train(self, step: int) -> RolloutBatch:
        """A whole step; in its middle engines have time to draw."""
        rollouts = await self.stream.next(step)
        await some_time()
        await self.publish(step)
        return rollouts

    async def publish(self, step: int) -> None:
        await self.stream.settle(self.preemption)
        assert not self.engine.active, "engines draw while they receive weights"
        self.engine.version = step

    @property
    def waiting(self) -> list[int]:
        """The prompts that a checkpoint of now would draw again."""
        return [index for _, index in self.stream.place["again"]]


def on(stage: Callable[[], Stage], play: Callable[[Stage], Awaitable[None]]) -> Stage:
    """Play within the stream, then look that nothing of it is left: no draw, and no error that nobody looked at."""
    unheard: list[dict[str, Any]] = []

    async def all_of_it() -> Stage:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unheard.append(context))
        staged = stage()
        async with asyncio.timeout(20), staged.stream:
            await play(staged)
        await asyncio.sleep(0)  # for what was cancelled last
        assert not staged.engine.active
        others = asyncio.all_tasks() - {asyncio.current_task()}
        assert not others, others
        del staged.stream
        gc.collect()
        return staged

    staged = asyncio.run(all_of_it())
    assert not unheard, unheard
    return staged


def rows(batch: RolloutBatch) -> list[int]:
    return [int(each) for each in dict.fromkeys(each.row.id.removeprefix("file:") for each in batch.episodes)]


def ages(batch: RolloutBatch, step: int) -> list[int]:
    spans = [each.segments[1].versions[0].version for each in batch.episodes]
    return [step - 1 - version for version in spans]


async def some_time() -> None:
    for _ in range(30):
        await asyncio.sleep(0)


def test_every_step_gets_a_batch_and_its_age_grows_to_the_bound() -> None:
    async def play(stage: Stage) -> None:
        for step in range(1, STEPS + 1):
            batch = await stage.train(step)
            assert rows(batch) == [2 * step - 2, 2 * step - 1], "due first, then in the order in which they were begun"
            assert {*ages(batch, step)} == {min(step - 1, BOUND)}
            assert [each.group for each in batch.episodes] == [0, 0, 1, 1]
            assert len(stage.begun) == min(step + BOUND, STEPS) * BATCH, "as many as the bound allows"
            assert batch.num_batches == 1 and batch.num_dropped == 0
            assert stage.waiting == [*range(2 * step, len(stage.begun))]

    stage = on(Stage, play)
    assert stage.sampler.num_drawn == STEPS * BATCH
    seeds = {sampling.seed for _, sampling in stage.engine.calls}
    ids = [requests[0].prompt.id for requests, _ in stage.engine.calls]
    assert len(seeds) == 1 and ids == [f"{number}/file:{number}" for number in range(STEPS * BATCH)]


def test_a_step_does_not_wait_for_a_slow_group_until_it_is_due() -> None:
    async def play(stage: Stage) -> None:
        stage.engine.slow = {"file:0"}
        trained = [rows(await stage.stream.next(1))]
        await some_time()
        assert stage.engine.active == 1
        stage.engine.gate.set()
        await stage.publish(1)
        stage.engine.gate.clear()
        trained += [rows(await stage.train(step)) for step in (2, 3)]
        assert trained == [[1, 2], [0, 3], [4, 5]], "of equal age the first that was begun comes first"

    on(Stage, play)


def test_the_next_groups_are_drawn_while_the_trainer_works_and_waited_for_before_weights_change() -> None:
    async def play(stage: Stage) -> None:
        stage.engine.slow = {"file:4"}
        with stage.clock("generate"):
            batch = await stage.stream.next(1)
        assert batch.metrics["rollout/buffer"] + batch.metrics["rollout/under_way"] == 4
        with stage.clock("update_actor"):
            await some_time()
            assert stage.engine.active == 1
        settling = asyncio.ensure_future(stage.publish(1))
        await some_time()
        assert not settling.done(), "weights are published only when nothing is drawn"
        stage.engine.gate.set()
        await settling
        times = stage.clock.step()
        assert not any(DRAWING in key for key in times)
        spans = {span.phase: span for span in stage.clock.spans}
        assert spans[DRAWING].start < spans["update_actor"].end < spans[DRAWING].end, "at the same time"
        second = await stage.stream.next(2)
        assert second.metrics["rollout/buffer"] == 2, "4 is finished"
        assert second.seconds >= spans[DRAWING].end - spans["update_actor"].end > 0

    on(Stage, play)


def test_a_step_is_held_back_for_what_is_due_and_says_for_how_long() -> None:
    async def play(stage: Stage) -> None:
        stage.engine.slow = {"file:0"}
        waiting = asyncio.ensure_future(stage.stream.next(1))
        await asyncio.sleep(0.02)
        assert not waiting.done(), "with a bound of 0 versions to come, nobody may overtake it"
        stage.engine.gate.set()
        assert rows(await waiting) == [0, 1]

    on(lambda: Stage(bound=0), play)

    async def play_held(stage: Stage) -> None:
        stage.engine.slow = {"file:0", "file:1"}
        batch = await stage.stream.next(1)
        assert rows(batch) == [2, 3] and batch.metrics["rollout/held_s"] == 0
        stage.stream._version = 1  # as if weights had been published in flight
        stage.stream._may_draw = True
        stage.engine.version = 1
        waiting = asyncio.ensure_future(stage.stream.next(2))
        for _ in range(100):  # turns of the loop: all that can finish has
            await asyncio.sleep(0)
        assert not waiting.done(), "two of version 1 are finished, and two of version 0 are due"
        begun = time.perf_counter()
        await asyncio.sleep(0.02)
        at_least = time.perf_counter() - begun
        stage.engine.gate.set()
        held = await waiting
        assert rows(held) == [0, 1] and held.metrics["rollout/held_s"] >= at_least

    on(lambda: Stage(bound=1), play_held)


def test_dropped_groups_are_replaced_up_to_a_limit_and_counted() -> None:
    async def play(stage: Stage) -> None:
        stage.grade = lambda request: float(request.key[1] == 0 and int(request.ground_truth) % 4 == 3)
        first = await stage.train(1)
        second = await stage.train(2)
        assert (rows(first), rows(second)) == ([3, 5], [6, 7]), (
            "four may be dropped for a step; then others are trained"
        )
        assert first.num_dropped == 4 and first.num_batches == 3
        assert stage.stream._dropped, "some were dropped since, and no step has told of them"
        lost = first.num_dropped + second.num_dropped
        assert len(stage.begun) == 4 + lost + len(stage.waiting), "every prompt is trained, dropped or waits"

    filtering = FilterGroupsConfig(enable=True, max_num_gen_batches=3)
    on(lambda: Stage(bound=1, filter_groups=filtering), play)


@pytest.mark.parametrize("overdue", list(Overdue))
def test_an_engine_that_dies_is_restarted_when_the_trainer_is_done_and_its_group_is_drawn_again(
    overdue: Overdue,
) -> None:
    async def play(stage: Stage) -> None:
        stage.engine.dead, stage.engine.slow = {"file:3"}, {"file:3"}
        assert rows(await stage.stream.next(1)) == [0, 1]
        stage.engine.gate.set()
        await some_time()
        assert stage.engine.death is not None
        assert not stage.restarted, "the weights are being changed"
        await stage.publish(1)
        assert stage.restarted == ["engine 0 died"]
        stage.engine.calls.clear()
        second = await stage.train(2)
        assert second.metrics["rollout/redrawn"] >= 1
        again = [requests for requests, _ in stage.engine.calls if requests[0].prompt.id == "3/file:3"]
        assert [len(requests) for requests in again] == [1 if overdue is Overdue.wait else 2]
        batches = [second, *[await stage.train(step) for step in (3, 4, 5, 6)]]
        trained = {number: step for step, batch in enumerate(batches, 2) for number in rows(batch)}
        assert sorted(trained) == [*range(2, 12)], "each once"
        of_3 = [each for batch in batches for each in batch.episodes if each.row.id == "file:3"]
        drawn = sorted(each.segments[1].versions[0].version for each in of_3)
        assert drawn == ([0, 1] if overdue is Overdue.wait else [1, 1])
        assert max(age for step, batch in enumerate(batches, 2) for age in ages(batch, step)) <= BOUND

    on(lambda: Stage(overdue=overdue), play)


@pytest.mark.parametrize("bound", [0, 2])
def test_an_engine_that_dies_while_the_trainer_waits_is_restarted_at_once(bound: int) -> None:
    async def play(stage: Stage) -> None:
        stage.engine.dead = {"file:0"}
        first = rows(await stage.train(1))
        assert stage.restarted == ["engine 0 died"]
        assert sorted([*first, *stage.waiting]) == [*range((bound + 1) * BATCH)]

    on(lambda: Stage(bound=bound), play)


def test_another_error_is_raised_in_the_next_step() -> None:
    async def play(stage: Stage) -> None:
        def fail(request: RewardRequest) -> float:
            raise RuntimeError("the grader is gone")

        stage.engine.slow = {"file:7"}
        await stage.stream.next(1)
        stage.grade = fail
        stage.engine.gate.set()
        await stage.publish(1)
        with pytest.raises(RuntimeError, match="the grader is gone"):
            await stage.stream.next(2)

    stage = on(lambda: Stage(bound=4), play)
    assert stage.sampler.num_drawn == BATCH, "step 1 is complete, and all others are drawn again"


def test_a_run_that_is_told_to_end_does_not_wait_for_draws_and_loses_no_prompt() -> None:
    async def play(stage: Stage) -> None:
        stage.engine.slow = {"file:3", "file:5"}
        await stage.stream.next(1)
        settling = asyncio.ensure_future(stage.stream.settle(stage.preemption))
        await some_time()
        stage.preemption.ask("a test")
        await settling
        assert not stage.engine.active and stage.waiting == [2, 3, 4, 5]

    assert on(Stage, play).sampler.state_dict()["again"] == [[0, 2], [0, 3], [0, 4], [0, 5]]


def test_a_step_that_is_abandoned_gives_its_rows_back() -> None:
    async def play(stage: Stage) -> None:
        await stage.train(1)
        place, kept = stage.stream.place, stage.stream.kept
        await stage.stream.next(2)
        stage.stream.return_to(kept)
        assert stage.stream.place == place and stage.waiting == [2, 3, 4, 5]
        assert [each.row.number for each in stage.stream.kept.groups] == [2, 3, 4, 5]

    assert on(Stage, play).sampler.num_drawn == BATCH


@pytest.mark.parametrize("leave_at", range(1, STEPS))
def test_a_resumed_run_trains_every_prompt_once(leave_at: int) -> None:
    """Killed after a checkpoint, with groups in every state; the next takes another order of the same prompts."""
    trained, places = list[int](), list[dict[str, Any]]()

    async def until_then(stage: Stage) -> None:
        stage.engine.slow = {"file:0", "file:5"}
        stage.engine.gate.set()
        for step in range(1, leave_at + 1):
            trained.extend(rows(await stage.train(step)))
        places.append(stage.stream.place)
        await stage.stream.next(leave_at + 1)  # lost with the controller

    async def to_the_end(stage: Stage) -> None:
        for step in range(leave_at + 1, STEPS + 1):
            batch = await stage.train(step)
            assert max(ages(batch, step)) <= min(BOUND, step - 1 - leave_at)
            trained.extend(rows(batch))

    on(Stage, until_then)
    stage = on(lambda: Stage(place=places[0], step=leave_at), to_the_end)
    assert sorted(trained) == [*range(STEPS * BATCH)]
    assert stage.sampler.num_drawn == STEPS * BATCH


@pytest.mark.parametrize("seed", range(8))
def test_in_any_order_the_bound_holds_and_every_prompt_is_trained_once(seed: int) -> None:
    """Responses take random times, engines die, groups have no signal."""
    draw = random.Random(seed)
    overdue, bound = draw.choice(list(Overdue)), draw.randint(1, 4)
    filtering = FilterGroupsConfig(enable=draw.random() < 0.5, max_num_gen_batches=2)

    async def play(stage: Stage) -> None:
        delays = {f"file:{number}": draw.choice([0, 0, 1, 5, 40]) for number in range(PROMPTS)}
        plain = stage.engine.generate

        async def delayed(requests: Sequence[Request], sampling: Sampling) -> AsyncIterator[Sample]:
            for _ in range(delays[requests[0].prompt.id.rpartition("/")[2]]):
                await asyncio.sleep(0)
            async for sample in plain(requests, sampling):
                yield sample

        stage.engine.generate = delayed  # type: ignore[method-assign]
        stage.engine.dead = {f"file:{draw.randrange(PROMPTS)}" for _ in range(3)}
        stage.grade = lambda request: float(request.key[1] == 0 and int(request.ground_truth) % 3 > 0)
        trained, dropped = list[int](), 0
        for step in range(1, STEPS + 1):
            batch = await stage.train(step)
            assert max(ages(batch, step)) <= bound
            trained += rows(batch)
            dropped += batch.num_dropped
        counts = Counter(each.number + PROMPTS * each.epoch for each in stage.begun)
        assert len(trained) == STEPS * BATCH and max(counts.values()) == 1
        assert len(stage.begun) >= len(trained) + dropped

    on(lambda: Stage(bound=bound, overdue=overdue, filter_groups=filtering), play)
