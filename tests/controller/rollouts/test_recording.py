"""What is recorded of a step is what the trainer was given, and its line of the ledger says what became of it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from mcore_rl.config.asynchrony import AsyncConfig
from mcore_rl.config.data import DataConfig
from mcore_rl.config.run import RunConfig
from mcore_rl.config.trainer import ASYNC, Mode, Placement, TrainerConfig
from mcore_rl.controller.rollouts.recording import Recorder, ReplaySource, read_record, record_file, scheduled_step
from mcore_rl.controller.step.batch_assembly import assemble
from mcore_rl.controller.step.preemption import Preemption
from mcore_rl.controller.step.rollout_collection import FILTERED, SURPLUS, DroppedGroup, RolloutBatch
from mcore_rl.data.prompts import PromptRow
from mcore_rl.data.sampler import PromptSampler
from mcore_rl.ground.errors import CheckpointError
from mcore_rl.rewards.score import Score
from mcore_rl.rollout.episodes import Episode
from mcore_rl.tracking.ledger import audit
from mcore_rl.tracking.schedule import SCHEDULE, ScheduleFile
from tests.controller.rollouts.test_drawn_file import bits
from tests.support.scripted_rollout import answered, lost_episode, row

PROMPTS, BATCH = 6, 2


def prompt(number: int, epoch: int) -> PromptRow:
    return replace(row(number), number=number, epoch=epoch)


def batch_of(places: list[tuple[int, int]], dropped: tuple[DroppedGroup, ...] = ()) -> RolloutBatch:
    """Two responses to each prompt; one of prompt 5 is lost."""
    episodes: list[Episode] = []
    for group, (epoch, number) in enumerate(places):
        for index in range(2):
            made = answered(number, Score(0.1 + index, {"format": 0.2}), group=group, index=index)
            if number == 5 and index:
                made = replace(lost_episode(5, Score(0.0)), group=group, index=1)
            episodes.append(replace(made, row=prompt(number, epoch), prompt_id=f"{group}/{number}"))
    return RolloutBatch(
        episodes=episodes, greedy=[0.1 + 0.2, -0.0], num_batches=2, seconds=1.5, dropped=dropped,
        metrics={"rollout/buffer": 3.0},
    )  # fmt: skip


def config(mode: Mode = Mode.sync, bound: int = 1) -> RunConfig:
    trainer = TrainerConfig(mode=mode, placement=Placement.separate)
    data = DataConfig(train_batch_size=BATCH)
    return RunConfig(data=data, trainer=trainer, async_=AsyncConfig(max_staleness=bound))


def played(directory: Path, steps: int = 4) -> list[RolloutBatch]:
    """Steps over more than an epoch, each recorded; every second step drops a prompt."""
    sampler, batches = PromptSampler(PROMPTS, 0, shuffle=True), list[RolloutBatch]()
    file, said = ScheduleFile(directory / SCHEDULE, keep=-1), list[str]()

    async def record(step: int, batch: RolloutBatch) -> None:
        recorder = Recorder(directory, warn=said.append)
        recorder.begin(step, batch, sampler.state_dict())
        await recorder.end(step)
        await recorder.end(step)  # nothing more is written
        await recorder.close()

    for step in range(1, steps + 1):
        places, dropped = sampler.next_of_epochs(BATCH), ()
        if step % 2:
            ((epoch, number),) = sampler.next_of_epochs(1)
            dropped = (DroppedGroup(number, epoch, f"file:{number}", FILTERED if step == 1 else SURPLUS),)
        batch = batch_of(places, dropped)
        asyncio.run(record(step, batch))
        batches.append(batch)
        trained = [0 if each.lost else each.num_response_tokens for each in batch.episodes]
        assembled = assemble(batch.episodes, batch.greedy)
        assert len(assembled.batch.lengths_S) == len(trained)
        line = scheduled_step(config(), step, batch, sampler.state_dict(), trained, {"actor": 2}, "xxh3:1")
        spans = [replace(each, oldest=step - 1, newest=step - 1) for each in line.groups]  # scripted: version 3
        file.write(replace(line, groups=spans))
    file.close()
    (directory / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in range(1, steps + 1)))
    assert not said
    return batches


def test_the_ledger_of_what_was_drawn_holds(tmp_path: Path) -> None:
    played(tmp_path)
    got = audit(tmp_path)
    assert got.violations == () and got.steps == 4 and got.untrained == {"filter_groups": 1, "surplus": 1}


def test_a_line_says_what_became_of_each_group() -> None:
    sampler = PromptSampler(PROMPTS, 0, shuffle=False)
    batch = batch_of([(0, 5), (0, 1)])
    trained = [2, 0, 0, 0]
    for mode, bound, says in ((Mode.sync, 4, 0), (Mode.one_step_off, 4, 1), (ASYNC, 4, 4), (ASYNC, 0, 0)):
        line = scheduled_step(config(mode, bound), 5, batch, sampler.state_dict(), trained, {}, "")
        assert (line.bound, line.version, line.mode, line.batch) == (says, 4, mode.value, BATCH)
    first, second = line.groups
    assert (first.id, first.number, first.samples, first.lost, first.trained) == ("file:5", 5, 2, 1, 1)
    assert (second.id, second.lost, second.trained, second.oldest, second.newest) == ("file:1", 0, 0, 3, 3)


def test_a_replay_gets_what_was_recorded_to_the_last_bit_and_the_place_after_it(tmp_path: Path) -> None:
    batches = played(tmp_path)
    sampler = PromptSampler(PROMPTS, 0, shuffle=True)
    source, other = ReplaySource(tmp_path, prompt, sampler), PromptSampler(PROMPTS, 0, shuffle=True)

    async def replay() -> None:
        async with source:
            for step, batch in enumerate(batches, 1):
                kept = source.kept
                assert kept.is_empty
                assert bits(await source.next(step)) == bits(batch)
                await source.settle(Preemption())
                await source.take_back()
                other.next_of_epochs(BATCH)
                if step % 2:
                    other.next_of_epochs(1)
                assert source.place == other.state_dict()
            source.return_to(kept)
            assert source.place != other.state_dict()
            assert bits(await source.next(4)) == bits(batches[3]), "an abandoned step is replayed again"

    asyncio.run(replay())
    record_file(tmp_path, 2).write_bytes(b"no parquet")
    with pytest.raises(CheckpointError, match=r"step_2.parquet cannot be read"):
        asyncio.run(source.next(2))
    record_file(tmp_path, 3).unlink()
    with pytest.raises(CheckpointError, match=r"step_3.parquet is missing. Restore it"):
        asyncio.run(source.next(3))


def test_a_record_that_cannot_be_written_is_told_of_and_the_run_goes_on(tmp_path: Path) -> None:
    (tmp_path / "record").write_text("a file in the place of the directory")
    said = list[str]()

    async def record() -> None:
        recorder = Recorder(tmp_path, warn=said.append)
        recorder.begin(7, batch_of([(0, 1), (0, 2)]), {})
        await recorder.end(7)

    asyncio.run(record())
    assert len(said) == 1 and "The rollouts of step 7 are not recorded" in said[0]


def test_a_kill_leaves_no_half_record(tmp_path: Path) -> None:
    played(tmp_path, steps=1)
    assert [path.name for path in (tmp_path / "record").iterdir()] == ["step_1.parquet"]
    (tmp_path / "record" / ".step_2.parquet.incomplete").write_bytes(b"PAR1")  # as a kill leaves it
    batch, _ = read_record(tmp_path, 1, prompt)
    assert len(batch.episodes) == 2 * BATCH
