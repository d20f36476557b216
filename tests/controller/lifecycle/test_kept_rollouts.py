"""Whether a resumed run goes on with the rollouts of its checkpoint: with the settings that they were drawn with."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.config.compose import as_dict, compose
from mcore_rl.config.engine import Device
from mcore_rl.config.run import RunConfig
from mcore_rl.controller.lifecycle.kept_rollouts import draw_settings, kept_rollouts
from mcore_rl.controller.lifecycle.preparation import complete, weights_of_roles
from mcore_rl.controller.lifecycle.resume_check import Identity
from mcore_rl.controller.rollouts.drawn_file import DrawnGroup
from mcore_rl.controller.rollouts.kept_draws import FILE, KeptDraws
from mcore_rl.controller.step.rollout_collection import RolloutBatch
from mcore_rl.data.prompts import PromptSet
from mcore_rl.ground.errors import CheckpointError
from mcore_rl.parallel.device import detect
from mcore_rl.rewards.score import Score
from mcore_rl.rollout.episodes import prompt_segment
from mcore_rl.rollout.single_turn import single_turn
from tests.support import prompt_files
from tests.support.ahead_runs import APART
from tests.support.run_task import overrides, write_task
from tests.support.scripted_rollout import sample

AHEAD = ("trainer.mode=async", "async.max_staleness=4")
STEP = 3


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_task(tmp_path_factory.mktemp("task"))


def config_of(task: Path, *more: str) -> RunConfig:
    mode = () if any(each.startswith("trainer.mode=") for each in more) else AHEAD
    words = overrides(task, task / "run", *APART, *mode, *more)
    return complete(compose(RunConfig, "train", words), detect(Device.cpu))


@cache
def prompts(task: Path) -> PromptSet:
    files = [str(task / "train.parquet")]
    of = config_of(task).data
    return PromptSet.load(files, of, prompt_files.tokenizer(), max_samples=None, title="data.train_files")


def settings(task: Path, *more: str) -> dict[str, Any]:
    of = config_of(task, *more)
    return draw_settings(of, Identity.of(as_dict(of), ["actor"], weights_of_roles(of)))


def kept(task: Path, *, ahead: bool = False) -> KeptDraws:
    row = replace(prompts(task)[7], epoch=1)
    drawn = sample("0/x", 0)  # of version 3
    episode = single_turn(row, prompt_segment(row), drawn, 0).with_score(Score(1.0))
    facts = {"ordinal": 30, "oldest": 3}
    groups = (
        DrawnGroup(row=row, episodes=(episode,), facts=facts),
        DrawnGroup(row=row, samples=((row.tokens, drawn),), facts=facts | {"ordinal": 31}),
    )
    if ahead:
        batch = RolloutBatch(episodes=[episode], greedy=None, num_batches=1, seconds=1.0)
        return KeptDraws(place={"a": 1}, batch=batch, before={"a": 0})
    return KeptDraws(place={"a": 1}, groups=groups, next_ordinal=32, num_trained=5)


def read(task: Path, directory: Path, *more: str, step: int = STEP) -> KeptDraws | None:
    return kept_rollouts(directory, step, config_of(task, *more), settings(task, *more), prompts(task))


def test_they_are_kept_whatever_the_layout_and_the_engines(task: Path, tmp_path: Path) -> None:
    assert read(task, tmp_path) is None, "a checkpoint without any, as older versions wrote"
    assert kept(task).write(tmp_path, settings(task)) == (tmp_path / FILE).stat().st_size
    other = ("rollout.dp=2", "trainer.n_gpus_per_node=2", "actor.parallel.ep=2", "data.train_batch_size=4")
    for more in ((), (*other, "actor.ppo_mini_batch_size=4", "async.max_staleness=1", "actor.optim.lr=0.5")):
        got = read(task, tmp_path, *more)
        assert got is not None and [each.facts["ordinal"] for each in got.groups] == [30, 31]
        assert got.groups[0].row.epoch == 1 and got.groups[0].row.number == 7
        assert got.num_trained == STEP * (4 if more else 8), "of the batch of today"


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("rollout.n=2", "rollout.n"),
        ("rollout.temperature=0.5", "rollout.temperature"),
        ("data.max_response_length=7", "rollout.max_response_length"),
        ("reward.error_score=1.0", "reward.error_score"),
        ("algorithm=remax", "greedy samples"),
        ("async.max_staleness=0", "groups of any age, and trainer.mode=async as it is written draws none"),
        ("trainer.mode=one_step_off", "trainer.mode=one_step_off as it is written"),
        ("trainer.mode=sync", "trainer.mode=sync as it is written"),
    ],
)
def test_they_are_drawn_again_with_other_settings_and_a_note_says_so(
    task: Path, tmp_path: Path, more: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    kept(task).write(tmp_path, settings(task))
    assert read(task, tmp_path, more) is None
    said = " ".join(capsys.readouterr().err.split())
    assert "Their prompts are drawn again" in said and says in said


def test_a_reward_function_that_was_changed_grades_anew(
    task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text((task / "reward.py").read_text())
    more = f"custom_reward_function.path={reward}"
    kept(task).write(tmp_path, settings(task, more))
    assert read(task, tmp_path, more) is not None
    moved = tmp_path / "elsewhere.py"
    moved.write_text(reward.read_text())
    reward.write_text(reward.read_text() + "\n# another\n")
    assert read(task, tmp_path, more) is None
    assert "the files of custom_reward_function.path" in " ".join(capsys.readouterr().err.split())


def test_a_batch_that_was_drawn_ahead_is_kept_for_a_step_of_its_size(
    task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mode = "trainer.mode=one_step_off"
    kept(task, ahead=True).write(tmp_path, settings(task, mode))
    got = read(task, tmp_path, mode)
    assert got is not None and got.batch is not None and got.before == {"a": 0} and got.groups == ()
    assert read(task, tmp_path, mode, "data.train_batch_size=4", "actor.ppo_mini_batch_size=4") is None
    assert "data.train_batch_size" in " ".join(capsys.readouterr().err.split())


def test_what_is_damaged_or_foreign_is_one_message(task: Path, tmp_path: Path) -> None:
    kept(task).write(tmp_path, settings(task))
    with pytest.raises(CheckpointError, match="has tokens of version 3, and the checkpoint is of step 2"):
        read(task, tmp_path, step=2)
    (tmp_path / FILE).write_bytes((tmp_path / FILE).read_bytes()[:-9])
    with pytest.raises(CheckpointError, match=r"drawn.parquet cannot be read: .*Resume from another step"):
        read(task, tmp_path)


def test_nothing_is_written_where_nothing_was_drawn(task: Path, tmp_path: Path) -> None:
    assert KeptDraws(place={}).write(tmp_path, {}) == 0
    assert not [*tmp_path.iterdir()]
