"""Responses drawn and graded: order, seeds, dynamic sampling with its bound, greedy baselines, and the overlap."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from mcore_rl.agents.engine_waits import EngineWaits
from mcore_rl.config.agent import ProgramReward
from mcore_rl.config.algorithm import FilterGroupsConfig, FilterMetric
from mcore_rl.config.data import DataConfig
from mcore_rl.config.rollout import RolloutConfig, ValidationConfig
from mcore_rl.config.run import RunConfig
from mcore_rl.controller.step.batch_assembly import assemble
from mcore_rl.controller.step.rollout_collection import RolloutBatch, RolloutCollector
from mcore_rl.data.prompts import PromptRow
from mcore_rl.ground.errors import DeadEngineError, RolloutError
from mcore_rl.rewards.score import RewardRequest, Score
from mcore_rl.rollout.episodes import AgentCounts, Author
from mcore_rl.rollout.pool import PrefixHits
from mcore_rl.rollout.protocol import Prompt, Request, Sample, Sampling, aborted
from tests.support import models
from tests.support.scripted_rollout import ScriptedEngine, ScriptedScorer, conversation, lost_episode, row, turn
from tests.support.settings import algorithm_config

Rows = Callable[[int], list[PromptRow]]


def config(
    wanted: int = 3, n: int = 2, attempts: int | None = None, drawn: int | None = None, greedy: bool = False
) -> RunConfig:
    filtering = FilterGroupsConfig(enable=attempts is not None, max_num_gen_batches=attempts or 1)
    estimator = "remax" if greedy else "grpo"
    return RunConfig(
        data=DataConfig(train_batch_size=wanted, gen_batch_size=drawn),
        algorithm=algorithm_config(adv_estimator=estimator, filter_groups=filtering),
        rollout=RolloutConfig(n=n, max_response_length=20, seed=4, val_kwargs=ValidationConfig(n=2)),
    )


def endless() -> tuple[Rows, list[int]]:
    """Rows 0, 1, 2, ... and how many were asked for at a time."""
    numbers, asked = itertools.count(), []

    def next_rows(count: int) -> list[PromptRow]:
        asked.append(count)
        return [row(next(numbers)) for _ in range(count)]

    return next_rows, asked


def differing(*numbers: int) -> Callable[[RewardRequest], float]:
    """The samples of these rows have different scores: 1 for the first, 0 for others."""
    return lambda request: float(int(request.ground_truth) in numbers and request.key[1] == 0)


def step(
    run: RunConfig, value: Callable[[RewardRequest], float | Score], number: int = 1, cut_from: int | None = None
) -> tuple[RolloutBatch, ScriptedEngine]:
    engine = ScriptedEngine(cut_from=cut_from)
    collector = RolloutCollector(engine, ScriptedScorer(value), run)  # type: ignore[arg-type]
    return asyncio.run(collector.collect(number, endless()[0], lambda done, of: None)), engine


def groups(collected: RolloutBatch) -> list[tuple[int, str]]:
    return [(each.group, each.row.id) for each in collected.episodes]


def test_groups_come_in_the_order_of_their_rows_whatever_finishes_first() -> None:
    drawn, engine = step(config(), differing())
    assert groups(drawn) == [(number, f"file:{number}") for number in range(3) for _ in range(2)]
    assert [each.index for each in drawn.episodes] == [0, 1] * 3
    assert all(each.prompt_id.endswith(each.row.id) for each in drawn.episodes)
    assert (drawn.num_batches, drawn.num_dropped, drawn.greedy) == (1, 0, None)
    ((requests, sampling),) = engine.calls
    assert len(requests) == 6 and sampling.max_tokens == 20 and sampling.temperature == 1.0


def test_each_step_draws_anew_and_the_same_when_repeated() -> None:
    seeds = [step(config(), differing(), number)[1].calls[0][1].seed for number in (1, 2, 1)]
    assert seeds[0] == seeds[2] != seeds[1]


def test_a_step_tells_the_hits_of_the_caches_since_the_step_before() -> None:
    hits = PrefixHits()
    collector = RolloutCollector(ScriptedEngine(), ScriptedScorer(differing()), config(), hits=hits)  # type: ignore[arg-type]
    request = Request(prompt=Prompt(id="p", tokens=(1,) * 30))
    drawn = replace(aborted(request), tokens=np.ones(3, dtype=np.int32), cached_tokens=16)
    shares = []
    for _ in range(2):
        hits.add(request, drawn)
        collected = asyncio.run(collector.collect(1, endless()[0], lambda done, of: None))
        shares.append(collected.metrics["rollout/prefix_hit_share"])
    assert shares == [16 / 30] * 2


def test_a_prompt_that_comes_twice_is_two_groups() -> None:
    engine = ScriptedEngine()
    collector = RolloutCollector(engine, ScriptedScorer(differing()), config())  # type: ignore[arg-type]
    drawn = asyncio.run(collector.collect(1, lambda count: [row(7)] * count, lambda done, of: None))
    assert groups(drawn) == [(number, "file:7") for number in range(3) for _ in range(2)]
    assert len({(each.prompt_id, each.index) for each in drawn.episodes}) == 6


def test_graders_are_told_all_of_a_row() -> None:
    engine, scorer = ScriptedEngine(), ScriptedScorer(differing())
    collector = RolloutCollector(engine, scorer, config(wanted=1))  # type: ignore[arg-type]
    asyncio.run(collector.collect(1, endless()[0], lambda done, of: None))
    request = min(scorer.requests, key=lambda each: each.key[1])
    assert request.data_source == "sums" and request.ground_truth == "0"
    assert request.extra_info == {"ability": "math", "index": 0}
    assert (request.num_tokens, request.max_tokens, request.truncated) == (1, 20, False)
    assert request.response.endswith("file:0#0")


def test_groups_without_signal_make_room_for_fresh_prompts() -> None:
    # Of rows 0 to 2 only 1 has signal, of 3 to 5 only 4 and 5.
    drawn, engine = step(config(attempts=5), differing(1, 4, 5))
    assert groups(drawn) == [(place, f"file:{number}") for place, number in enumerate((1, 4, 5)) for _ in range(2)]
    assert (drawn.num_batches, drawn.num_dropped, len(engine.calls)) == (2, 3, 2)


def test_attempts_are_bounded_and_the_step_is_whole_nevertheless() -> None:
    drawn, engine = step(config(attempts=2), differing(4))
    assert groups(drawn)[::2] == [(0, "file:4"), (1, "file:0"), (2, "file:1")], "signal first, then what is there"
    assert len(engine.calls) == 2
    assert (drawn.num_batches, drawn.num_dropped) == (2, 3), "of six groups three are trained"


@pytest.mark.parametrize(
    ("metric", "correct", "kept"),
    [
        (FilterMetric.acc, (1.0, 1.0), [1, 2]),  # right and right: of rows 0, 1 and 2 the last two differ in that
        (FilterMetric.acc, (None, None), [1, 2]),  # the grader does not say: its scores, without the penalty
        (FilterMetric.score, (1.0, 0.0), [1, 2]),
        (FilterMetric.acc, (1.0, 0.0), [0, 1]),  # right and wrong, of one score
    ],
)
def test_the_filter_asks_for_correctness_and_not_for_the_overlong_penalty(
    metric: FilterMetric, correct: tuple[float | None, float | None], kept: list[int]
) -> None:
    """Row 0: two answers of one score, the longer of which is punished.  Rows 1 and 2 differ in all."""

    def value(request: RewardRequest) -> Score:
        index = request.key[1]
        if request.ground_truth == "0":
            return Score(1.0 - 0.5 * index, {"overlong": -0.5 * index}, correct=correct[index])
        return Score(1.0 - index, correct=1.0 - index)

    run = config(wanted=2, attempts=2, drawn=3)
    run.algorithm.filter_groups.metric = metric
    assert [name for _, name in groups(step(run, value)[0])][::2] == [f"file:{number}" for number in kept]


@pytest.mark.parametrize(("masks", "in_baseline", "dropped"), [(True, False, 3), (True, True, 0), (False, False, 0)])
def test_the_filter_sees_a_group_as_training_will(masks: bool, in_baseline: bool, dropped: int) -> None:
    """Four right answers, four that were cut off."""
    run = config(n=8, attempts=2)
    run.algorithm.mask_truncated, run.algorithm.masked_in_baseline = masks, in_baseline
    drawn, _ = step(run, lambda request: float(request.key[1] < 4), cut_from=4)
    assert (drawn.num_dropped, drawn.num_batches) == (dropped, 2 if dropped else 1)


def test_a_generation_batch_has_its_own_size() -> None:
    rows, asked = endless()
    collector = RolloutCollector(ScriptedEngine(), ScriptedScorer(differing(0, 2, 4)), config(attempts=9, drawn=2))  # type: ignore[arg-type]
    drawn = asyncio.run(collector.collect(1, rows, lambda done, of: None))
    assert asked == [2, 2, 2]
    assert [name for _, name in groups(drawn)][::2] == ["file:0", "file:2", "file:4"]


def test_without_filtering_nothing_is_looked_at_twice() -> None:
    drawn, engine = step(config(), differing())
    assert len(engine.calls) == 1 and len(drawn.episodes) == 6


def test_greedy_responses_are_baselines_and_not_trained() -> None:
    def value(request: RewardRequest) -> float:
        return 10.0 + int(request.ground_truth) if request.key[0].startswith("greedy/") else float(request.key[1])

    drawn, engine = step(config(greedy=True), value)
    assert drawn.greedy == [10.0, 11.0, 12.0]
    assert [each.reward for each in drawn.episodes] == [0.0, 1.0] * 3
    by_temperature = {sampling.temperature: requests for requests, sampling in engine.calls}
    assert len(by_temperature[1.0]) == 6 and len(by_temperature[0.0]) == 3


def test_greedy_baselines_follow_the_groups_that_are_kept() -> None:
    def value(request: RewardRequest) -> float:
        if request.key[0].startswith("greedy/"):
            return 10.0 + int(request.ground_truth)  # differs from the samples: no signal by itself
        return differing(2, 3, 5)(request)

    drawn, _ = step(config(greedy=True, attempts=5), value)
    assert [name for _, name in groups(drawn)][::2] == ["file:2", "file:3", "file:5"]
    assert drawn.greedy == [12.0, 13.0, 15.0]


def test_grading_overlaps_drawing() -> None:
    scorer = ScriptedScorer(differing())

    class Watching(ScriptedEngine):
        async def generate(self, requests, sampling):  # type: ignore[no-untyped-def]
            scorer.gate = asyncio.Event()
            async for each in super().generate(requests, sampling):
                yield each
            await asyncio.sleep(0)
            self.graded_before_the_end = scorer.running
            scorer.gate.set()

    engine, reports = Watching(), []
    collector = RolloutCollector(engine, scorer, config())  # type: ignore[arg-type]
    asyncio.run(collector.collect(1, endless()[0], lambda done, of: reports.append((done, of))))
    assert engine.graded_before_the_end == 6, "all were being graded while the engine was not done"
    assert reports == [(done, 6) for done in range(1, 7)]


def test_an_engine_that_fails_leaves_no_grading_behind() -> None:
    scorer = ScriptedScorer(differing())

    async def fail() -> None:
        scorer.gate = asyncio.Event()
        collector = RolloutCollector(ScriptedEngine(fails_after=3), scorer, config())  # type: ignore[arg-type]
        with pytest.raises(RuntimeError, match="the engine is gone"):
            await collector.collect(1, endless()[0], lambda done, of: None)
        await asyncio.sleep(0)
        assert scorer.running == 0

    asyncio.run(fail())


class Judge:
    """A reward model that gives 100 and remembers whom it was told of; or dies of it."""

    def __init__(self, dies: bool = False) -> None:
        self.dies = dies
        self.told: list[tuple[object, str]] = []

    async def score(self, request: RewardRequest) -> Score:
        self.told.append((request.messages, request.response))
        if self.dies:
            raise DeadEngineError("reward engine 0 died")
        return Score(100.0)


def judged(number: int) -> PromptRow:
    columns = {"reward_model": {"style": "model" if number % 2 else "rule"}}
    return replace(row(number), messages=[{"role": "user", "content": str(number)}], columns=columns)


def test_rows_that_ask_for_the_reward_model_are_scored_by_it_and_others_are_not() -> None:
    judge, scorer = Judge(), ScriptedScorer(lambda request: 1.0)
    collector = RolloutCollector(ScriptedEngine(), scorer, config(wanted=4), judge)  # type: ignore[arg-type]
    drawn = asyncio.run(collector.collect(1, lambda count: [judged(i) for i in range(count)], lambda done, of: None))
    assert [each.reward for each in drawn.episodes] == [1.0, 1.0, 100.0, 100.0] * 2
    assert {messages[0]["content"] for messages, _ in judge.told} == {"1", "3"}  # type: ignore[index]
    assert sorted(response for _, response in judge.told) == [f"0.{i}/file:{i}#{n}" for i in (1, 3) for n in (0, 1)]
    assert {request.ground_truth for request in scorer.requests} == {"0", "2"}
    episodes = asyncio.run(collector.collect_validation([judged(1)], lambda done, of: None))
    assert [each.reward for each in episodes] == [100.0, 100.0]


def test_without_a_reward_model_the_scorer_has_them_all() -> None:
    collector = RolloutCollector(ScriptedEngine(), ScriptedScorer(lambda request: 1.0), config())  # type: ignore[arg-type]
    drawn = asyncio.run(collector.collect(1, lambda count: [judged(1)] * count, lambda done, of: None))
    assert {each.reward for each in drawn.episodes} == {1.0}


def test_a_reward_model_that_dies_ends_the_drawing_at_once() -> None:
    class Endless(ScriptedEngine):
        async def generate(self, requests, sampling):  # type: ignore[no-untyped-def]
            async for each in super().generate(requests, sampling):
                yield each
                await asyncio.sleep(3600 if len(judge.told) else 0)

    judge = Judge(dies=True)
    collector = RolloutCollector(Endless(), ScriptedScorer(differing()), config(wanted=4), judge)  # type: ignore[arg-type]
    with pytest.raises(DeadEngineError, match="reward engine 0 died"):
        asyncio.run(collector.collect(1, lambda count: [judged(i) for i in range(count)], lambda done, of: None))


def test_validation_draws_as_it_is_told_and_the_same_every_time() -> None:
    engine = ScriptedEngine()
    collector = RolloutCollector(engine, ScriptedScorer(differing(0)), config())  # type: ignore[arg-type]
    rows = [row(number) for number in range(2)]
    first, second = (asyncio.run(collector.collect_validation(rows, lambda done, of: None)) for _ in range(2))
    assert [(each.row.id, each.index) for each in first] == [
        ("file:0", 0), ("file:0", 1), ("file:1", 0), ("file:1", 1)
    ]  # fmt: skip
    assert [each.response for each in first] == [each.response for each in second]
    samplings = [sampling for _, sampling in engine.calls]
    assert samplings[0] == samplings[1] and samplings[0].temperature == 0


class RecordingEngine(ScriptedEngine):
    """Reports experts of a prompt of two tokens, of two layers and two of four experts."""

    async def generate(self, requests: Sequence[Request], sampling: Sampling) -> AsyncIterator[Sample]:
        async for sample in super().generate(requests, sampling):
            count = 2 + len(sample.tokens) - 1
            experts = np.array([[[token % 4, (token + 1) % 4], [3, 0]] for token in range(count)])
            yield replace(sample, experts=experts + 9 * (sample.prompt_id == self.wrong))

    wrong = ""


@pytest.mark.parametrize("greedy", [False, True])
def test_experts_travel_with_the_episodes_that_are_trained(greedy: bool) -> None:
    model = models.moe(num_layers=2)
    collector = RolloutCollector(RecordingEngine(), ScriptedScorer(differing()), config(1, greedy=greedy), None, model)  # type: ignore[arg-type]
    episodes = asyncio.run(collector.collect(1, endless()[0], lambda done, of: None)).episodes
    for episode in episodes:
        assert episode.experts is not None and episode.experts.dtype == np.uint8
        assert episode.experts[:, 0, 0].tolist() == [token % 4 for token in range(episode.num_tokens - 1)]
    validated = asyncio.run(collector.collect_validation([row(3)], lambda done, of: None))
    assert [episode.experts for episode in validated] == [None] * 2


def test_experts_that_are_wrong_end_the_sampling() -> None:
    engine = RecordingEngine()
    engine.wrong = "0.0/file:0"
    collector = RolloutCollector(engine, ScriptedScorer(differing()), config(1), None, models.moe(num_layers=2))  # type: ignore[arg-type]
    with pytest.raises(RolloutError, match=r"prompt 0\.0/file:0, sample .: token 0 went to the experts"):
        asyncio.run(collector.collect(1, endless()[0], lambda done, of: None))


def test_without_replay_what_engines_report_is_dropped() -> None:
    collector = RolloutCollector(RecordingEngine(), ScriptedScorer(differing()), config(1))  # type: ignore[arg-type]
    episodes = asyncio.run(collector.collect(1, endless()[0], lambda done, of: None)).episodes
    assert [episode.experts for episode in episodes] == [None] * 2


class Agents:
    """Runs rows with an even number: two turns each, the later ones first."""

    waits = EngineWaits()

    def runs(self, row: PromptRow) -> bool:
        return int(row.id.rpartition(":")[2]) % 2 == 0

    async def run(self, source, row, prompt_id, group, index, sampling):  # type: ignore[no-untyped-def]
        await asyncio.sleep(0.01 * (3 - group))
        turns = [turn(Author.model, (9,)), turn(Author.tool, (8,)), turn(Author.model, (7,))]
        of = replace(conversation(0, turns), row=row, prompt_id=prompt_id, group=group, index=index)
        return replace(of, agent=AgentCounts(reason="answered", turns=2))

    async def conversations(self, *args):  # type: ignore[no-untyped-def]
        return [await self.run(*args)]

    def scores(self, row: PromptRow) -> ProgramReward:
        return ProgramReward.grader


def test_rows_of_agents_are_run_by_them_among_the_others() -> None:
    engine, seen = ScriptedEngine(), []
    scorer = ScriptedScorer(lambda request: 1.0)
    collector = RolloutCollector(engine, scorer, config(wanted=4), agents=Agents())  # type: ignore[arg-type]
    drawn = asyncio.run(collector.collect(1, endless()[0], lambda done, of: seen.append((done, of))))
    assert groups(drawn) == [(number, f"file:{number}") for number in range(4) for _ in range(2)]
    assert [each.index for each in drawn.episodes] == [0, 1] * 4
    assert [each.is_single_turn for each in drawn.episodes] == [False, False, True, True] * 2
    assert [each.prompt_id for each in drawn.episodes][::2] == [f"0.{place}/file:{place}" for place in range(4)]
    assert {each.graded.value for each in drawn.episodes} == {1.0} and len(scorer.requests) == 8
    ((requests, _),) = engine.calls
    assert {request.prompt.id for request in requests} == {"0.1/file:1", "0.3/file:3"}
    assert seen == [(done, 8) for done in range(1, 9)]


class Losing(Agents):
    """Loses the episodes with an index in ``lost``, of the rows that it runs."""

    def __init__(self, lost: tuple[int, ...]) -> None:
        self.lost = lost

    async def run(self, source, row, prompt_id, group, index, sampling):  # type: ignore[no-untyped-def]
        if index not in self.lost:
            return await super().run(source, row, prompt_id, group, index, sampling)
        return replace(lost_episode(0), row=row, prompt_id=prompt_id, group=group, index=index)


def test_lost_episodes_are_neither_graded_nor_trained() -> None:
    scorer = ScriptedScorer(lambda request: 1.0)
    collector = RolloutCollector(ScriptedEngine(), scorer, config(wanted=2), agents=Losing((1,)))  # type: ignore[arg-type]
    drawn = asyncio.run(collector.collect(1, endless()[0], lambda done, of: None))
    assert [each.lost for each in drawn.episodes] == [False, True, False, False]
    assert len(scorer.requests) == 3 and drawn.episodes[1].graded == Score(0.0)
    masks = assemble(drawn.episodes).batch.mask_T.tolist()
    first, second = (each.num_tokens for each in drawn.episodes[:2])
    assert any(masks[:first]) and not any(masks[first : first + second])


def test_a_lost_episode_is_no_signal() -> None:
    """It has the score 0 where the other has 1: a group without another score has none to compare with."""
    scorer = ScriptedScorer(lambda request: 1.0)
    collector = RolloutCollector(ScriptedEngine(), scorer, config(wanted=1, attempts=3), agents=Losing((1,)))  # type: ignore[arg-type]
    assert asyncio.run(collector.collect(1, endless()[0], lambda done, of: None)).num_batches > 1


def test_a_step_without_any_other_episode_ends_the_run() -> None:
    class All(Losing):
        def runs(self, row: PromptRow) -> bool:
            return True

    scorer = ScriptedScorer(lambda request: 1.0)
    collector = RolloutCollector(ScriptedEngine(), scorer, config(), agents=All((0, 1)))  # type: ignore[arg-type]
    with pytest.raises(RolloutError, match=r"step 1: every episode was lost \(interaction_failed\)"):
        asyncio.run(collector.collect(1, endless()[0], lambda done, of: None))


def test_an_agent_that_fails_ends_the_step() -> None:
    class Failing(Agents):
        async def run(self, *args):  # type: ignore[no-untyped-def]
            raise RuntimeError("a loop")

    scorer = ScriptedScorer(lambda request: 1.0)
    collector = RolloutCollector(ScriptedEngine(), scorer, config(), agents=Failing())  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="a loop"):
        asyncio.run(collector.collect(1, endless()[0], lambda done, of: None))


class Programs(Agents):
    """Runs all rows by a program of two conversations, which says what it is worth."""

    def __init__(self, reward: ProgramReward) -> None:
        self.reward = reward

    def runs(self, row: PromptRow) -> bool:
        return True

    def scores(self, row: PromptRow) -> ProgramReward:
        return self.reward

    async def conversations(self, source, row, prompt_id, group, index, sampling):  # type: ignore[no-untyped-def]
        first = await super().run(source, row, prompt_id, group, index, sampling)
        if self.reward is not ProgramReward.grader:
            first = first.with_score(Score(0.5 * index, parts={"program": 0.5 * index}))
        return [first, replace(first, part=1)]


@pytest.mark.parametrize(
    ("reward", "values", "num_graded"),
    [
        (ProgramReward.grader, [1, 1, 1, 1], 4),
        (ProgramReward.program, [0, 0, 0.5, 0.5], 0),
        (ProgramReward.sum, [1, 1, 1.5, 1.5], 4),
    ],
)
def test_a_program_is_graded_once_by_whoever_is_asked(
    reward: ProgramReward, values: list[float], num_graded: int
) -> None:
    scorer = ScriptedScorer(lambda request: Score(1.0, turn_rewards=(0.25, 0.25)))
    collector = RolloutCollector(ScriptedEngine(), scorer, config(wanted=2), agents=Programs(reward))  # type: ignore[arg-type]
    drawn = asyncio.run(collector.collect(1, endless()[0], lambda done, of: None))
    assert [(each.index, each.part) for each in drawn.episodes] == [(0, 0), (0, 1), (1, 0), (1, 1)] * 2
    assert [each.graded.value for each in drawn.episodes] == values * 2 and len(scorer.requests) == num_graded
    assert not any(each.turn_rewards for each in drawn.episodes if each.part)
    sums = assemble(drawn.episodes)
    assert sums.sample_S is not None and sums.sample_S.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
