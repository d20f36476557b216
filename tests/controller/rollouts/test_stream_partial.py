"""Responses that are unfinished when weights change: drawn in flight, or taken back and gone on with."""

from __future__ import annotations

import asyncio
import gc
import math
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mcore_rl.agents.engine_waits import EngineWaits
from mcore_rl.config.algorithm import FilterGroupsConfig
from mcore_rl.config.asynchrony import AsyncConfig
from mcore_rl.config.data import DataConfig
from mcore_rl.config.rollout import RolloutConfig
from mcore_rl.config.run import RunConfig
from mcore_rl.config.trainer import ASYNC, Mode, Placement, TrainerConfig
from mcore_rl.controller.rollouts.kept_draws import KeptDraws
from mcore_rl.controller.rollouts.rollout_source import Ahead
from mcore_rl.controller.rollouts.stream import RolloutStream, drawing_of
from mcore_rl.controller.step.metrics import staleness_metrics
from mcore_rl.controller.step.preemption import Preemption
from mcore_rl.controller.step.rollout_collection import RolloutBatch, RolloutCollector
from mcore_rl.data.prompts import PromptRow
from mcore_rl.data.sampler import PromptSampler
from mcore_rl.ground.errors import DeadEngineError, DeadWorkerError
from mcore_rl.rewards.score import RewardRequest
from mcore_rl.rollout.episodes import Episode, prompt_segment
from mcore_rl.rollout.pool import EnginePool
from mcore_rl.rollout.protocol import Pause, Prompt, Request, SampleSource, Sampling
from mcore_rl.rollout.single_turn import drawn_segment
from mcore_rl.tracking.clock import Clock
from tests.support.scripted_rollout import ScriptedScorer, row
from tests.support.settings import algorithm_config
from tests.support.token_engine import Ends, TokenEngine, lognormal

IN_FLIGHT, IN_TURNS = "async", "sync with rollout.partial"
BOTH = pytest.mark.parametrize("mode", [IN_FLIGHT, IN_TURNS])


def settings(mode: str, bound: int, batch: int, longest: int, share: float, **algorithm: Any) -> RunConfig:
    """share: of a batch that is begun beyond a step's own, in turns."""
    in_flight = mode == IN_FLIGHT
    return RunConfig(
        data=DataConfig(train_batch_size=batch),
        algorithm=algorithm_config(**algorithm),
        rollout=RolloutConfig(n=2, max_response_length=longest, partial=not in_flight, over_sampling=share),
        trainer=TrainerConfig(mode=ASYNC, placement=Placement.separate) if in_flight else TrainerConfig(),
        async_=AsyncConfig(max_staleness=bound),
    )


class Stage:
    """A stream over the pool of a run with engines that draw token by token, and a trainer.

    ends: what ends a response.  ticks: turns of the event loop that training takes, and half of them an update.
    """

    def __init__(
        self, mode: str, ends: Ends, *, bound: int = 2, batch: int = 2, steps: int = 6, ticks: int = 20,
        seats: int = 64, longest: int = 200, share: float = 1.0, prompts: int = 0, engines: int = 1,
        agents: Any = None, **algorithm: Any,
    ) -> None:  # fmt: skip
        self.run = settings(mode, bound, batch, longest, share, **algorithm)
        self.version, self.ticks, self.in_turns = 0, ticks, mode == IN_TURNS
        self.engines = [TokenEngine(ends, f"engine {number}") for number in range(engines)]
        self.pool = EnginePool(self.engines, seats, goes_on=not self.in_turns)  # type: ignore[arg-type]
        self.sampler = PromptSampler(prompts or 2 * steps * batch, 0, shuffle=False)
        self.grade: Callable[[RewardRequest], float] = lambda request: float(request.key[1])
        scorer: Any = ScriptedScorer(lambda request: self.grade(request))
        self.begun, self.restarts, self.drawn = list[PromptRow](), 0, list[int]()

        async def restart(error: DeadEngineError) -> None:
            if self.pool.death is not None:
                self.restart()

        async def recover(error: DeadEngineError) -> None:
            if self.pool.death is not None:
                self.restart()
                await self.update(self.version)

        ahead = Ahead(
            collector=RolloutCollector(self.pool, scorer, self.run, agents=agents),
            is_dead=lambda: self.pool.death is not None,
            restart_dead=restart,
            recover=recover,
            interrupt=self.pool.interrupt,
        )
        drawing = drawing_of(self.run, steps, ahead)
        self.preemption = Preemption()
        self.stream = RolloutStream(drawing, self.sampler, self.rows, 0, Clock(), lambda done, of: None)

    @property
    def active(self) -> int:
        return sum(engine.active for engine in self.engines)

    def restart(self) -> None:
        """Those that the pool has met dead; the others are met later."""
        met = [load.engine for load in self.pool._loads if load.death is not None]
        for engine in self.engines:
            if engine in met:
                assert not engine.active
                engine.death, engine.frozen = None, True  # until it has received weights
        self.restarts += 1
        self.pool.mark_alive()

    async def update(self, version: int) -> None:
        """As ``WeightSync.update``: engines that die meanwhile are restarted, and all receive the weights."""
        async with self.pool.held():
            for engine in self.engines:
                engine.asleep = False
                await engine.start_update()
            await some_time(self.ticks // 2)
            await some_time(2)  # for who draws to meet a death
            for engine in self.engines:
                engine.death = None
            self.restart()
            for engine in self.engines:
                await engine.finish_update(version)

    def rows(self, count: int) -> list[PromptRow]:
        rows = [replace(row(index), number=index, epoch=epoch) for epoch, index in self.sampler.next_of_epochs(count)]
        self.begun += rows
        return rows

    async def train(self, step: int) -> RolloutBatch:
        """A whole step, as the loop has it."""
        batch = await self.stream.next(step)
        if self.in_turns:
            assert not self.active and not self.pool.num_unfinished, "the trainer has the devices"
        for engine in self.engines:
            engine.asleep = self.in_turns
        await some_time(self.ticks)
        await self.stream.settle(self.preemption)
        self.version = step
        await self.update(step)
        return batch


def play(stage: Callable[[], Stage], script: Callable[[Stage], Awaitable[None]]) -> Stage:
    """Play within the stream, then look that nothing of it is left."""
    unheard: list[dict[str, Any]] = []

    async def all_of_it() -> Stage:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unheard.append(context))
        staged = stage()
        async with asyncio.timeout(60), staged.stream:
            await script(staged)
        await some_time(5)
        assert not staged.active
        assert not (others := asyncio.all_tasks() - {asyncio.current_task()}), others
        del staged.stream
        gc.collect()
        return staged

    staged = asyncio.run(all_of_it())
    assert not unheard, unheard
    return staged


async def some_time(ticks: int) -> None:
    for _ in range(ticks):
        await asyncio.sleep(0)


def numbers(batch: RolloutBatch) -> list[int]:
    return [int(each) for each in dict.fromkeys(each.row.id.removeprefix("file:") for each in batch.episodes)]


def drawn_tokens(episode: Episode) -> list[int]:
    """The version that drew each token, which is the token; spans must say the same."""
    versions = list[int]()
    for segment in episode.segments:
        if segment.trained:
            said = [span.version for span in segment.versions for _ in range(span.end - span.start)]
            assert said == segment.tokens.tolist()
            assert segment.logprobs is not None
            np.testing.assert_array_equal(segment.logprobs, np.arange(len(said)) / -8)
            versions += said
    assert versions == sorted(versions)
    return versions


def fixed(lengths: dict[str, int], usual: int = 3) -> Ends:
    """Each prompt's responses are so long."""
    return lambda request, place, draw: place + 1 >= lengths.get(request.prompt.id.rpartition("/")[2], usual)


def test_an_update_waits_for_nobody_and_what_is_under_way_goes_on_with_the_new_weights() -> None:
    async def script(stage: Stage) -> None:
        batches = [await stage.train(step) for step in range(1, 5)]
        assert numbers(batches[0]) == [1, 2], "not the long one"
        (place,) = [at for at, batch in enumerate(batches) if 0 in numbers(batch)]
        long = [each for each in batches[place].episodes if each.row.id == "file:0"]
        assert all({*drawn_tokens(each)} >= {0, 1} for each in long)
        assert len([each for each in stage.engines[0].asked if each.prompt.id == "0/file:0"]) == 2, "never asked again"
        measured = staleness_metrics(batches[place].episodes, place + 1)
        assert measured["rollout/resumed_share"] == 0.5 and measured["rollout/versions_max"] >= 2
        assert measured["rollout/staleness_max"] <= 2

    play(lambda: Stage(IN_FLIGHT, fixed({"file:0": 70}), steps=4), script)


def test_when_the_trainer_dies_engines_give_back_what_they_have_drawn() -> None:
    stage = Stage(IN_FLIGHT, fixed({"file:0": 70}), steps=4)

    async def run() -> None:
        await stage.stream.next(1)
        await some_time(20)
        death = DeadWorkerError("rank 0 died")
        await stage.stream.__aexit__(DeadWorkerError, death, None)
        await some_time(5)
        assert not stage.active

    asyncio.run(run())
    (long,) = [each for each in stage.stream.kept.groups if each.row.id == "file:0"]
    lengths = [len(sample.tokens) for _, sample in long.samples]
    assert len(lengths) == 2 and all(5 <= length < 70 for length in lengths), "unfinished, with its tokens"
    finished = [each.row.id for each in stage.stream.kept.groups if each.episodes]
    assert "file:1" not in finished and finished, "those of the step are its own, the buffer is kept"


def test_with_partial_rollout_off_no_token_of_an_update_is_under_way() -> None:
    async def script(stage: Stage) -> None:
        stage.stream._drawing = replace(stage.stream._drawing, pause=Pause.wait)
        batches = [await stage.train(step) for step in range(1, 5)]
        assert all(len({*drawn_tokens(each)}) == 1 for batch in batches for each in batch.episodes)

    play(lambda: Stage(IN_FLIGHT, fixed({"file:0": 70}), steps=4), script)


def test_in_turns_what_is_unfinished_is_kept_and_goes_on_from_its_tokens() -> None:
    async def script(stage: Stage) -> None:
        first = await stage.train(1)
        assert numbers(first) == [1, 2] and first.metrics["rollout/under_way"] == 1
        assert first.metrics["rollout/kept_tokens"] > 0
        (group,) = [each for each in stage.stream._live.values() if not each.finished]
        kept = {key: sample.tokens.tolist() for (key, _), sample in group.samples._kept.items()}
        assert len(kept) == 2 and first.metrics["rollout/kept_tokens"] == sum(map(len, kept.values()))
        asked = len(stage.engines[0].asked)
        batches = [await stage.train(step) for step in (2, 3)]
        again = [each for each in stage.engines[0].asked[asked:] if each.prompt.id == "0/file:0"]
        assert {each.key: [int(token) for token in each.so_far.tokens] for each in again[:2] if each.so_far} == kept
        (place,) = [at for at, batch in enumerate(batches, 2) if 0 in numbers(batch)]
        long = [each for each in batches[place - 2].episodes if each.row.id == "file:0"]
        for each in long:
            versions = drawn_tokens(each)
            assert versions[: len(kept["0/file:0", each.index])] == kept["0/file:0", each.index]
            assert len(versions) == 12 and {*versions} >= {0, 1}

    play(lambda: Stage(IN_TURNS, fixed({"file:0": 12}), steps=3), script)


def test_a_long_response_is_waited_for_when_it_is_due() -> None:
    """Two hundred steps would pass it by, were its age not bounded."""

    async def script(stage: Stage) -> None:
        batches = [await stage.train(step) for step in range(1, 5)]
        assert [0 in numbers(batch) for batch in batches] == [False, True, False, False]

    play(lambda: Stage(IN_TURNS, fixed({"file:0": 150}), steps=4, bound=1), script)


@BOTH
def test_a_checkpoint_has_the_tokens_of_what_is_unfinished_and_a_run_goes_on_from_them(mode: str) -> None:
    """It is written while responses are drawn, or wait; what is drawn after it is lost with the run."""
    kept, drawn = list[KeptDraws](), dict[tuple[str, int], list[int]]()

    async def until_then(stage: Stage) -> None:
        await stage.train(1)
        await some_time(9)
        await stage.stream.take_back()
        kept.append(stage.stream.kept)
        for group in kept[0].groups:
            for _, sample in group.samples:
                drawn[sample.prompt_id, sample.index] = sample.tokens.tolist()
        await some_time(4)
        assert stage.active == 0 if stage.in_turns else stage.active > 0, "drawn on at once"
        assert numbers(await stage.train(2)), "or in the next step"

    async def to_the_end(stage: Stage) -> None:
        stage.stream.resume(kept[0], 1)
        stage.version = stage.engines[0].version = 1
        batches = [await stage.train(step) for step in range(2, 5)]
        trained = [number for batch in batches for number in numbers(batch)]
        assert sorted([*trained, *first]) == [*range(8)], "each prompt once"
        (step,) = [at for at, batch in enumerate(batches, 2) if 0 in numbers(batch)]
        assert step - 1 <= 2, "at its age"
        long = [each for each in batches[step - 2].episodes if each.row.id == "file:0"]
        for each in long:
            versions, before = drawn_tokens(each), drawn["0/file:0", each.index]
            assert versions[: len(before)] == before and len(versions) == 70 and {*versions} >= {0, 1}

    ends = fixed({"file:0": 70})
    play(lambda: Stage(mode, ends, steps=4, prompts=30), until_then)
    waiting = {group.row.number for group in kept[0].groups}
    first = {*range(max(waiting) + 1)} - waiting
    assert len(first) == 2 and all(0 < len(drawn["0/file:0", index]) < 70 for index in (0, 1))
    stage = play(lambda: Stage(mode, ends, steps=4, prompts=30), to_the_end)
    again = {each.key: each.so_far for each in reversed(stage.engines[0].asked) if each.prompt.id == "0/file:0"}
    assert {key: each.tokens.tolist() for key, each in again.items() if each} == {
        key: tokens for key, tokens in drawn.items() if key[0] == "0/file:0"
    }


class Agent:
    """Two turns with a tool between them that takes its time; the loop of an episode is never begun twice."""

    def __init__(self) -> None:
        self.begun, self.waits = Counter[str](), EngineWaits()

    def runs(self, row: PromptRow) -> bool:
        return True

    async def conversations(
        self, source: SampleSource, row: PromptRow, name: str, group: int, index: int, sampling: Sampling
    ) -> list[Episode]:
        self.begun[f"{name}#{index}"] += 1
        segments, tokens, end = [prompt_segment(row)], list(row.tokens), None
        for turn in range(2):
            request = Request(prompt=Prompt(id=f"{name}/turn{turn}", tokens=tuple(tokens)), index=index)
            (sample,) = [sample async for sample in source.generate([request], replace(sampling, max_tokens=40))]
            segments.append(drawn_segment(sample))
            tokens += sample.tokens.tolist()
            end = sample.finish
            await some_time(9 + 5 * (row.number % 4))
        assert end is not None
        return [Episode(row=row, prompt_id=name, group=group, index=index, segments=tuple(segments), end=end)]


@BOTH
def test_an_agents_loop_lives_on_and_its_turn_goes_on_from_its_tokens(mode: str) -> None:
    agent = Agent()

    async def script(stage: Stage) -> None:
        episodes = [each for step in range(1, 9) for each in (await stage.train(step)).episodes]
        assert {*agent.begun.values()} == {1} and len(agent.begun) == len(episodes) == 32
        mixed = [each for each in episodes if any(len(part.versions) > 1 for part in each.segments)]
        assert mixed, "some turn was under way when weights changed"
        for each in episodes:
            drawn_tokens(each)
            assert all(len(part.tokens) == 17 for part in each.segments[1:])

    ends: Ends = lambda request, place, draw: place + 1 >= 17  # noqa: E731
    play(lambda: Stage(mode, ends, steps=8, ticks=11, bound=3, agents=agent), script)


@BOTH
@pytest.mark.parametrize("sigma", [0.5, 1.2])
def test_the_lengths_that_are_trained_are_those_that_were_drawn(mode: str, sigma: float) -> None:
    """The oracle is the distribution that the engine draws from: lognormal, rounded up.

    A step trains what is finished first, so the first steps have short responses; over the run none is lost for it.
    """
    median, steps, batch, trained = 12.0, 24, 24, list[list[int]]()

    async def script(stage: Stage) -> None:
        for step in range(1, steps + 1):
            taken = await stage.train(step)
            trained.append([len(drawn_tokens(each)) for each in taken.episodes])
            assert staleness_metrics(taken.episodes, step)["rollout/staleness_max"] <= 4

    play(
        lambda: Stage(
            mode, lognormal(median, sigma), steps=steps, batch=batch, bound=4, share=4.0, ticks=8, seats=400,
            longest=100_000,
        ),
        script,
    )  # fmt: skip
    lengths = np.array([length for of_step in trained for length in of_step])
    assert len(lengths) == steps * batch * 2
    # Kolmogorov and Smirnov's distance; beyond 1.95 / sqrt(n) lies one draw in a thousand, for whole numbers fewer.
    assert distance(lengths, median, sigma) < 1.95 / math.sqrt(len(lengths))
    # And it would see it: what the first step trains, whose unfinished responses are left to later ones, is too short.
    early = np.array(trained[0])
    assert distance(early, median, sigma) > 1.95 / math.sqrt(len(early))


def distance(lengths: NDArray[np.int_], median: float, sigma: float) -> float:
    """The largest difference between the shares of lengths and the probabilities of a lognormal, at any length."""
    at = np.arange(1, lengths.max() + 1)
    shares = np.searchsorted(np.sort(lengths), at, side="right") / len(lengths)
    true = [0.5 * math.erfc(-math.log(length / median) / (sigma * math.sqrt(2))) for length in at]
    return float(np.abs(shares - np.array(true)).max())


@BOTH
@pytest.mark.parametrize(
    "seed", [seed if seed < 10 else pytest.param(seed, marks=pytest.mark.tier("full")) for seed in range(40)]
)
def test_in_any_order_no_token_is_too_old_and_every_prompt_is_trained_once(mode: str, seed: int) -> None:
    """Random lengths, paces, bounds, seats and batches; engines die at random; groups have no signal."""
    draw = random.Random(f"{mode} {seed}")
    bound, batch, steps = draw.randint(1, 5), draw.randint(1, 4), draw.randint(2, 12)
    filtering = FilterGroupsConfig(enable=draw.random() < 0.5, max_num_gen_batches=3)
    deaths = draw.random() < 0.5
    needs_greedy = draw.random() < 0.3

    async def script(stage: Stage) -> None:
        stage.grade = lambda request: float(request.key[1] == 0 and int(request.ground_truth) % 3 > 0)
        trained, dropped, dying = list[int](), 0, asyncio.create_task(die(stage) if deaths else some_time(1))
        for step in range(1, steps + 1):
            taken = await stage.train(step)
            assert len(taken.episodes) == batch * 2
            for each in taken.episodes:
                versions = drawn_tokens(each)
                assert step - 1 - min(versions) <= bound and max(versions) < step
            trained += numbers(taken)
            dropped += taken.num_dropped
        dying.cancel()
        await asyncio.wait([dying])
        counts = Counter(each.number + each.epoch * 10_000 for each in stage.begun)
        assert len(trained) == steps * batch and max(counts.values()) == 1, "each prompt is begun once"
        assert len({*trained}) == len(trained), "and trained once"
        if not filtering.enable:
            assert sorted(trained) == [*range(steps * batch)], "none is passed over"
        assert not stage.stream._live, "nothing is left"

    async def die(stage: Stage) -> None:
        for _ in range(3):
            await some_time(draw.randint(5, 120))
            draw.choice(stage.engines).death = DeadEngineError("it was killed")

    ends = lognormal(draw.choice([3.0, 10.0]), draw.choice([0.3, 1.0]))
    estimator = {"adv_estimator": "remax"} if needs_greedy else {}
    play(
        lambda: Stage(
            mode, ends, bound=bound, batch=batch, steps=steps, ticks=draw.randint(0, 30), seats=draw.randint(1, 20),
            share=draw.choice([0.3, 1.0, float(bound)]), prompts=400, engines=draw.randint(1, 3),
            filter_groups=filtering, **estimator,
        ),
        script,
    )  # fmt: skip


def test_one_step_off_and_others_keep_their_draws() -> None:
    """What a run composes: the fate of draws by mode."""
    run = settings(IN_FLIGHT, 2, 4, 9, 0.5)
    ahead: Any = None
    assert drawing_of(run, 9, ahead).pause is Pause.keep
    assert drawing_of(run, 9, ahead).admission.extra is None
    whole = replace(run, async_=AsyncConfig(partial_rollout=False))
    assert drawing_of(whole, 9, ahead).pause is Pause.wait
    in_turns = drawing_of(settings(IN_TURNS, 2, 5, 9, 0.3), 9, ahead)
    assert in_turns.pause is Pause.abort and in_turns.admission.extra == 2
    assert in_turns.admission.bound == 2 and run.trainer.mode is not Mode.sync
