"""What a checkpoint keeps of a stream, and what a resumed one makes of it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.config.algorithm import FilterGroupsConfig
from mcore_rl.config.asynchrony import Overdue
from mcore_rl.controller.rollouts.kept_draws import KeptDraws, read_kept
from mcore_rl.controller.step.metrics import staleness_metrics
from mcore_rl.controller.step.preemption import Preempted
from mcore_rl.controller.step.rollout_collection import RolloutBatch
from mcore_rl.rollout.episodes import FinishReason
from tests.controller.rollouts.test_stream import BATCH, STEPS, Stage, ages, on, rows, some_time
from tests.controller.rollouts.test_stream_partial import BOTH, drawn_tokens, fixed, numbers, play
from tests.controller.rollouts.test_stream_partial import Stage as PartialStage
from tests.support.scripted_rollout import row


def saved_and_read(stage: Stage, directory: Path) -> KeptDraws:
    """What a checkpoint of now has, through its file."""
    stage.stream.kept.write(directory, {})
    got = read_kept(directory, lambda number, epoch: replace(row(number), number=number, epoch=epoch))
    assert got is not None
    return got[0]


@pytest.mark.parametrize("leave_at", range(1, STEPS))
@pytest.mark.parametrize("filters", [False, True])
def test_a_resumed_run_goes_on_with_the_same_groups_at_their_age(tmp_path: Path, leave_at: int, filters: bool) -> None:
    """It trains what the run that went on trained, to the last token and version, and draws nothing twice."""
    grade = lambda request: float(request.key[1] == 0 and int(request.ground_truth) % 3 > 0)  # noqa: E731
    filtering = FilterGroupsConfig(enable=filters, max_num_gen_batches=2)

    def trained(batch: RolloutBatch) -> list[Any]:
        return [batch.dropped, *((each.prompt_id, each.segments[1].versions, each.score) for each in batch.episodes)]

    async def first(stage: Stage) -> None:
        stage.grade = grade
        for step in range(1, leave_at + 1):
            await stage.train(step)
        kept.append(saved_and_read(stage, tmp_path))
        steps.extend([trained(await stage.train(step)) for step in range(leave_at + 1, STEPS + 1)])

    async def resumed(stage: Stage) -> None:
        stage.grade = grade
        stage.stream.resume(kept[0], leave_at)
        again = [trained(await stage.train(step)) for step in range(leave_at + 1, STEPS + 1)]
        assert again == steps
        assert not {each.row.number for each in kept[0].groups} & {each.number for each in stage.begun}

    kept, steps = list[KeptDraws](), list[list[Any]]()
    on(lambda: Stage(filter_groups=filtering), first)
    stage = on(lambda: Stage(step=leave_at, filter_groups=filtering), resumed)
    assert stage.sampler.state_dict()["again"] == []


@pytest.mark.parametrize("overdue", list(Overdue))
def test_a_group_that_was_unfinished_goes_on_with_the_samples_that_it_has(tmp_path: Path, overdue: Overdue) -> None:
    async def first(stage: Stage) -> None:
        stage.engine.dead = stage.engine.slow = {"file:3"}  # after one of two responses
        await stage.stream.next(1)
        stage.engine.gate.set()
        await some_time()
        kept.append(saved_and_read(stage, tmp_path))

    async def resumed(stage: Stage) -> None:
        stage.stream.resume(kept[0], 1)
        batch = await stage.stream.next(2)
        await some_time()
        asked = [requests for requests, _ in stage.engine.calls if requests[0].prompt.id == "3/file:3"]
        assert [len(requests) for requests in asked] == [1 if overdue is Overdue.wait else 2]
        assert batch.metrics["rollout/redrawn"] >= 1
        await stage.publish(2)
        of_3 = [each for each in batch.episodes if each.row.id == "file:3"] or [
            each for each in (await stage.train(3)).episodes if each.row.id == "file:3"
        ]
        drawn = sorted(each.segments[1].versions[0].version for each in of_3)
        assert drawn == ([0, 1] if overdue is Overdue.wait else [1, 1])

    kept = list[KeptDraws]()
    on(lambda: Stage(overdue=overdue), first)
    assert [len(each.samples) for each in kept[0].groups if each.row.number == 3] == [1]
    on(lambda: Stage(overdue=overdue, step=1), resumed)


@pytest.mark.parametrize("bound", [0, 1, 2, 4])
def test_a_lower_bound_draws_again_what_it_does_not_allow(tmp_path: Path, bound: int) -> None:
    """Of four batches that were drawn with version 0."""

    async def first(stage: Stage) -> None:
        await stage.train(1)
        kept.append(saved_and_read(stage, tmp_path))

    async def resumed(stage: Stage) -> None:
        stage.stream.resume(kept[0], 1)
        trained, redrawn = list[int](), 0.0
        for step in range(2, STEPS + 1):
            batch = await stage.train(step)
            assert max(ages(batch, step)) <= bound
            trained += rows(batch)
            redrawn += batch.metrics["rollout/redrawn"]
        assert sorted(trained) == [*range(BATCH, STEPS * BATCH)], "nothing is lost"
        assert redrawn == max(0, 4 - bound) * BATCH

    kept = list[KeptDraws]()
    on(lambda: Stage(bound=4), first)
    on(lambda: Stage(bound=bound, step=1), resumed)


def test_a_run_that_leaves_keeps_what_was_drawn_and_what_the_abandoned_step_had() -> None:
    async def play(stage: Stage) -> None:
        stage.engine.slow = {"file:5"}
        await stage.stream.next(1)
        stage.engine.gate.set()
        await stage.publish(1)
        kept = stage.stream.kept
        await stage.stream.next(2)
        stage.stream.return_to(kept)

    async def all_of_it() -> KeptDraws:
        stage = Stage()
        async with stage.stream:
            await play(stage)
        return stage.stream.kept

    kept = asyncio.run(all_of_it())
    assert [(each.row.number, len(each.episodes)) for each in kept.groups] == [(2, 2), (3, 2), (4, 2), (5, 2)]
    assert kept.place["position"] == 6 and kept.next_ordinal == 6 and kept.num_trained == BATCH


@BOTH
@pytest.mark.parametrize("leaves", [False, True])
def test_a_resumed_run_goes_on_with_the_tokens_of_unfinished_responses(tmp_path: Path, mode: str, leaves: bool) -> None:
    """leaves: on a signal in the midst of a step, which gives its groups back; else killed after a checkpoint."""
    trained, kept = list[int](), list[KeptDraws]()

    def until(stage: PartialStage) -> None:
        for engine in stage.engines:
            engine.version = 2
        stage.version = 2

    async def first(stage: PartialStage) -> None:
        for step in (1, 2):
            trained.extend(numbers(await stage.train(step)))
        if leaves:
            mark = stage.stream.kept
            await stage.stream.next(3)
            stage.stream.return_to(mark)
            raise Preempted
        await stage.stream.take_back()
        kept.append(stage.stream.kept)
        trained.extend(numbers(await stage.train(3)))  # it went on after the checkpoint, and is abandoned
        del trained[4:]

    async def leaving() -> None:
        stage = PartialStage(mode, ends, steps=6)
        with pytest.raises(Preempted):
            async with stage.stream:
                await first(stage)
        kept.append(stage.stream.kept)

    async def resumed(stage: PartialStage) -> None:
        until(stage)
        stage.stream.resume(replace(read, num_trained=4), 2)
        unfinished = {(each.prompt_id, each.index): each for group in read.groups for _, each in group.samples}
        assert any(each.finish is FinishReason.abort for each in unfinished.values()), "it is tested with some"
        for step in range(3, 7):
            batch = await stage.train(step)
            trained.extend(numbers(batch))
            assert staleness_metrics(batch.episodes, step)["rollout/staleness_max"] <= 2
            for episode in batch.episodes:
                if (before := unfinished.pop((episode.prompt_id, episode.index), None)) is not None:
                    assert drawn_tokens(episode)[: len(before.tokens)] == before.tokens.tolist()
        assert not unfinished, "all of them were trained"
        assert sorted(trained) == [*range(12)], "each once"

    ends = fixed({"file:0": 60, "file:3": 45, "file:5": 70, "file:6": 40, "file:7": 150}, usual=5)
    if leaves:
        asyncio.run(leaving())
    else:
        play(lambda: PartialStage(mode, ends, steps=6), first)
    kept[0].write(tmp_path, {})
    got = read_kept(tmp_path, lambda number, epoch: replace(row(number), number=number, epoch=epoch))
    assert got is not None
    read = got[0]
    play(lambda: PartialStage(mode, ends, steps=6), resumed)
