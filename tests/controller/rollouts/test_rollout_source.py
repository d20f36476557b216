"""Which rollouts a step gets, when they are drawn, and what becomes of a draw that is not handed over."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import pytest

from mcore_rl.config.algorithm import FilterGroupsConfig
from mcore_rl.config.data import DataConfig
from mcore_rl.config.rollout import RolloutConfig
from mcore_rl.config.run import RunConfig
from mcore_rl.controller.rollouts.rollout_source import DRAWN_AHEAD, Ahead, RolloutSource
from mcore_rl.controller.step.preemption import Preemption
from mcore_rl.controller.step.rollout_collection import RolloutBatch, RolloutCollector
from mcore_rl.data.sampler import PromptSampler
from mcore_rl.ground.errors import DeadEngineError
from mcore_rl.rewards.score import RewardRequest, Score
from mcore_rl.rollout.protocol import Request, Sample, Sampling
from mcore_rl.tracking.clock import Clock
from tests.support.scripted_rollout import ScriptedEngine, ScriptedScorer, row
from tests.support.settings import algorithm_config

STEPS, BATCH, PROMPTS = 3, 2, 12


class Gated(ScriptedEngine):
    """Draws once ``gate`` is open; dies, or ends with ``error``, where a test says.  active: calls that go on."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.gate.set()
        self.error: Exception | None = None
        self.active = 0

    async def generate(self, requests: Sequence[Request], sampling: Sampling) -> AsyncIterator[Sample]:
        self.active += 1
        try:
            if self.error is not None and not requests[0].prompt.id.startswith("greedy/"):
                await asyncio.sleep(0)
                raise self.error
            await self.gate.wait()
            async for sample in super().generate(requests, sampling):
                yield sample
        finally:
            self.active -= 1

    async def interrupt(self) -> None:
        raise AssertionError("one_step_off waits for every response")


class Stage:
    """A source over two collectors, of which the one draws while the trainer waits and the other while it works."""

    def __init__(self, ahead: bool = True, **algorithm: Any) -> None:
        run = RunConfig(
            data=DataConfig(train_batch_size=BATCH),
            algorithm=algorithm_config(**algorithm),
            rollout=RolloutConfig(n=2, max_response_length=20),
        )
        self.waiting, self.working, self.preemption = Gated(), Gated(), Preemption()
        self.sampler, self.clock, self.restarted = PromptSampler(PROMPTS, 0, shuffle=False), Clock(), list[str]()
        self.grade: Callable[[RewardRequest], float | Score] = lambda request: float(request.key[1])
        scorer: Any = ScriptedScorer(lambda request: self.grade(request))

        async def restart(error: DeadEngineError) -> None:
            assert not self.working.active, "a draw goes on while engines are restarted"
            self.restarted.append(str(error))
            self.working.error = None

        apart = Ahead(
            collector=RolloutCollector(self.working, scorer, run),
            is_dead=lambda: self.working.error is not None,
            restart_dead=restart,
            recover=restart,
            interrupt=self.working.interrupt,
        )
        self.source = RolloutSource(
            RolloutCollector(self.waiting, scorer, run),
            self.sampler,
            lambda count: [row(index) for index in self.sampler.next(count)],
            STEPS,
            self.clock,
            lambda done, of: None,
            apart if ahead else None,
        )

    @property
    def position(self) -> int:
        """In the data, as a checkpoint has it."""
        return int(self.source.place["position"])


def on(stage: Callable[[], Stage], play: Callable[[Stage], Awaitable[None]]) -> Stage:
    """Play within the source, then look that nothing of it is left: no draw, and no error that nobody looked at."""
    unheard: list[dict[str, Any]] = []

    async def all_of_it() -> Stage:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unheard.append(context))
        staged = stage()
        async with asyncio.timeout(10), staged.source:
            await play(staged)
        assert not staged.working.active and not staged.waiting.active
        others = asyncio.all_tasks() - {asyncio.current_task()}
        assert not others, others
        del staged.source
        gc.collect()
        return staged

    staged = asyncio.run(all_of_it())
    gc.collect()
    assert not unheard, unheard
    return staged


def rows(batch: RolloutBatch) -> list[str]:
    return list(dict.fromkeys(each.row.id for each in batch.episodes))


async def begun() -> None:
    """Give the tasks time to begin."""
    for _ in range(20):
        await asyncio.sleep(0)


def expected(step: int) -> list[str]:
    return [f"file:{number}" for number in range(BATCH * (step - 1), BATCH * step)]


@pytest.mark.parametrize("ahead", [True, False])
def test_every_step_gets_its_rows_in_order_and_the_last_draws_nothing_ahead(ahead: bool) -> None:
    async def play(stage: Stage) -> None:
        for step in range(1, STEPS + 1):
            assert rows(await stage.source.next(step)) == expected(step)
            assert stage.position == BATCH * step, "a checkpoint has no place for what is drawn ahead"
            await begun()
            assert stage.position == BATCH * step
            await stage.source.settle(stage.preemption)
            assert not stage.working.active

    stage = on(lambda: Stage(ahead), play)
    assert (len(stage.waiting.calls), len(stage.working.calls)) == ((1, STEPS - 1) if ahead else (STEPS, 0))
    assert stage.sampler.state_dict()["position"] == BATCH * STEPS
    seeds = [sampling.seed for _, sampling in [*stage.waiting.calls, *stage.working.calls]]
    one = on(lambda: Stage(False), play)
    assert seeds == [sampling.seed for _, sampling in one.waiting.calls], "a step draws with its own seed in both modes"


def test_the_next_step_is_drawn_while_the_trainer_works_and_waited_for() -> None:
    async def play(stage: Stage) -> None:
        stage.working.gate.clear()
        with stage.clock("generate"):
            await stage.source.next(1)
        with stage.clock("update_actor"):
            await begun()
            assert stage.working.active == 1
        settling = asyncio.ensure_future(stage.source.settle(stage.preemption))
        await begun()
        assert not settling.done(), "weights are published only when nothing is drawn"
        stage.working.gate.set()
        await settling
        assert not stage.working.active
        times = stage.clock.step()
        assert "time/generate" in times and not any(DRAWN_AHEAD in key for key in times)
        spans = {span.phase: span for span in stage.clock.spans}
        ahead, trained = spans[DRAWN_AHEAD], spans["update_actor"]
        assert ahead.start < trained.end < ahead.end, "at the same time"

    on(Stage, play)


def test_rows_that_were_not_handed_over_are_given_back_at_the_end() -> None:
    async def play(stage: Stage) -> None:
        await stage.source.next(1)
        await stage.source.settle(stage.preemption)
        assert stage.sampler.state_dict()["position"] == 2 * BATCH

    assert on(Stage, play).sampler.state_dict()["position"] == BATCH


def test_a_draw_that_goes_on_is_cancelled_at_the_end() -> None:
    async def play(stage: Stage) -> None:
        stage.working.gate.clear()
        await stage.source.next(1)
        await begun()
        assert stage.working.active == 1
        raise KeyError("the step failed")

    with pytest.raises(KeyError, match="the step failed"):
        on(Stage, play)


def test_a_step_that_is_abandoned_gives_its_rows_back_and_those_drawn_ahead() -> None:
    async def play(stage: Stage) -> None:
        await stage.source.next(1)
        await stage.source.settle(stage.preemption)
        kept = stage.source.kept
        assert kept.batch is not None and kept.place["position"] == 2 * BATCH
        abandoned = await stage.source.next(2)
        assert abandoned is kept.batch
        stage.working.gate.clear()
        await begun()
        stage.source.return_to(kept)
        assert stage.position == BATCH and stage.source.kept == kept, "what was drawn is kept, too"

    stage = on(Stage, play)
    assert stage.sampler.state_dict()["position"] == BATCH, "neither is lost, and the end does not give back twice"


def test_a_run_that_is_told_to_end_does_not_wait_for_the_draw() -> None:
    async def play(stage: Stage) -> None:
        stage.working.gate.clear()
        await stage.source.next(1)
        settling = asyncio.ensure_future(stage.source.settle(stage.preemption))
        await begun()
        stage.preemption.ask("a test")
        await settling
        assert not stage.working.active and stage.position == BATCH == stage.sampler.state_dict()["position"]

    on(Stage, play)


@pytest.mark.parametrize("estimator", ["grpo", "remax"])
def test_an_engine_that_dies_is_restarted_when_the_trainer_is_done_and_its_step_drawn_again(estimator: str) -> None:
    async def play(stage: Stage) -> None:
        stage.working.error = DeadEngineError("engine 0 died")
        stage.working.gate.clear()  # greedy responses would be waited for without end
        await stage.source.next(1)
        await begun()
        assert not stage.restarted, "the weights are being changed"
        assert not stage.working.active, "the other call ends with the one that died"
        await stage.source.settle(stage.preemption)
        assert stage.restarted == ["engine 0 died"] and stage.position == BATCH
        stage.working.gate.set()
        assert rows(await stage.source.next(2)) == expected(2)
        assert {request.prompt.id for request in stage.waiting.calls[-1][0]}, "drawn while the trainer waits"
        await stage.source.settle(stage.preemption)
        assert rows(await stage.source.next(3)) == expected(3)

    stage = on(lambda: Stage(adv_estimator=estimator), play)
    assert stage.restarted == ["engine 0 died"]


def test_another_error_is_raised_in_the_step_that_would_have_trained_it() -> None:
    async def play(stage: Stage) -> None:
        def fail(request: RewardRequest) -> float:
            raise RuntimeError("the grader is gone")

        await stage.source.next(1)
        stage.grade = fail
        await stage.source.settle(stage.preemption)
        assert stage.position == BATCH, "step 1 is complete and can be saved"
        with pytest.raises(RuntimeError, match="the grader is gone"):
            await stage.source.next(2)

    on(Stage, play)


def test_a_draw_is_over_when_the_source_is_left_and_an_error_that_nobody_waits_for_is_silent() -> None:
    async def leave_while_it_draws(stage: Stage) -> None:
        stage.working.gate.clear()
        await stage.source.next(1)
        await begun()
        assert stage.working.active == 1

    async def leave_when_it_failed(stage: Stage) -> None:
        stage.working.error = RuntimeError("nobody waits for this")
        await stage.source.next(1)
        await begun()
        stage.working.error = None  # its traceback holds the task

    on(Stage, leave_while_it_draws)
    on(Stage, leave_when_it_failed)


def test_dynamic_sampling_draws_as_many_batches_as_it_needs_ahead() -> None:
    async def play(stage: Stage) -> None:
        stage.grade = lambda request: float(request.key[1] == 0 and int(request.ground_truth) % 2)
        assert rows(await stage.source.next(1)) == ["file:1", "file:3"]
        assert stage.position == 4
        await stage.source.settle(stage.preemption)
        assert stage.position == 4 and stage.sampler.state_dict()["position"] == 8
        assert rows(await stage.source.next(2)) == ["file:5", "file:7"]

    filtering = FilterGroupsConfig(enable=True, max_num_gen_batches=3)
    on(lambda: Stage(filter_groups=filtering), play)
