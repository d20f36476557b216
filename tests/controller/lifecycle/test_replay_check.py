"""What a replay may change and what it may not, and what must be recorded: said before anything is started."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.config.compose import as_dict, compose
from mcore_rl.config.engine import Device
from mcore_rl.config.run import RunConfig, run_violations
from mcore_rl.controller.lifecycle.preparation import complete, weights_of_roles
from mcore_rl.controller.lifecycle.replay_check import keep_identity, last_recorded, settings_sum
from mcore_rl.controller.lifecycle.resume_check import Identity, flat_settings
from mcore_rl.controller.rollouts.recording import record_file
from mcore_rl.ground.errors import ConfigError
from mcore_rl.parallel.device import detect
from mcore_rl.tracking.schedule import SCHEDULE, ScheduledStep, ScheduleFile
from tests.support.run_task import overrides, write_task

STEPS = 4


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_task(tmp_path_factory.mktemp("task"))


def config(task: Path, *more: str) -> RunConfig:
    return complete(compose(RunConfig, "train", overrides(task, task / "run", *more)), detect(Device.cpu))


def identity(task: Path, *more: str) -> Identity:
    of = config(task, *more)
    return Identity.of(as_dict(of), ["actor"], weights_of_roles(of))


@pytest.fixture
def recorded(task: Path, tmp_path: Path) -> Path:
    """A run of four steps, all of them recorded."""
    keep_identity(identity(task), tmp_path)
    file = ScheduleFile(tmp_path / SCHEDULE, keep=-1)
    for step in range(1, STEPS + 1):
        file.write(line(step, settings_sum(identity(task))))
        record_file(tmp_path, step).touch()
    file.close()
    return tmp_path


def line(step: int, settings: str) -> ScheduledStep:
    return ScheduledStep(
        step=step, version=step - 1, mode="sync", batch=8, bound=0, num_prompts=40, groups=(), epoch=0, position=0,
        settings=settings,
    )  # fmt: skip


def refusal(identity: Identity, recorded: Path, after: int = 0, num_steps: int = STEPS) -> str:
    with pytest.raises(ConfigError) as error:
        last_recorded(identity, recorded, after, num_steps)
    return str(error.value)


def test_the_same_run_is_replayed_to_where_its_record_ends(
    task: Path, recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert last_recorded(identity(task), recorded, 0, STEPS) == STEPS
    assert "layout" not in (said := capsys.readouterr().err) and "nothing is drawn or graded" in said
    assert last_recorded(identity(task), recorded, 2, STEPS) == STEPS
    assert last_recorded(identity(task), recorded, 0, STEPS + 3) == STEPS
    assert "ends with step 4 of 7: so does its replay" in capsys.readouterr().err


def test_every_setting_that_a_step_depends_on_must_be_as_it_was(task: Path, recorded: Path) -> None:
    changed = (
        "actor.optim.lr=0.5",
        "algorithm.whiten_advantages=true",
        "rollout.temperature=0.7",
        "data.seed=7",
        "rollout.n=8",
    )
    said = refusal(identity(task, *changed), recorded)
    assert said.startswith("5 problems")
    for each in changed:
        assert each.partition("=")[0] in said
    assert "was 4 in the run that trainer.replay names. Write rollout.n=4" in said


def test_what_changes_no_number_may_differ_and_another_layout_is_noted(
    task: Path, recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    free = (
        "trainer.default_local_dir=elsewhere", "trainer.save_freq=7", "trainer.logger=[]", "rollout.max_num_seqs=3",
        "trainer.placement=separate", "trainer.guards.window=3",
    )  # fmt: skip
    assert last_recorded(identity(task, *free), recorded, 0, STEPS) == STEPS
    assert settings_sum(identity(task, *free)) == settings_sum(identity(task))
    assert "layout" not in capsys.readouterr().err
    layout = ("trainer.n_gpus_per_node=1", "actor.parallel.ep=1", "actor.microbatch_tokens=99")
    assert last_recorded(identity(task, *layout), recorded, 0, STEPS) == STEPS
    said = " ".join(capsys.readouterr().err.split())
    assert "in another layout" in said and "actor.parallel.ep: 2 then, 1 now" in said and "microbatch_tokens" in said


def test_every_key_is_free_layout_or_compared_and_few_are_free(task: Path) -> None:
    """A key that is added is compared until somebody says that it changes no number."""
    of = identity(task)
    for key, value in flat_settings(of.config).items():
        group, _, name = key.partition(".")
        if group not in ("algorithm", "actor", "data", "reward") or value is None:
            continue
        other = replace(of, config=json.loads(json.dumps(of.config)))
        at: Any = other.config[group]
        *path, last = name.split(".")
        for part in path:
            at = at[part]
        at[last] = "another"
        named = ("data.train_files", "data.val_files", "data.val_batch_size", "data.val_max_samples")
        of_layout = (
            "parallel.",
            "recompute",
            "microbatch_",
            "share_prompts",
            "overlap_",
            "moe.dispatcher",
            "moe.flex",
            "moe.permute",
        )
        may = (
            key in (*named, "reward.num_workers", "reward.timeout_s", "actor.device", "actor.layer_spec")
            or key.startswith("reward.judge.engines.")  # what was judged is in the recorded rollouts
            or (group == "actor" and name.startswith((*of_layout, "gradient_accumulation_fusion", "tp_comm_overlap")))
        )  # fmt: skip
        assert (settings_sum(other) == settings_sum(of)) == may, key


def test_other_files_are_refused_wherever_they_are(task: Path, recorded: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(task, copy, ignore=shutil.ignore_patterns("run"))
    moved = (f"model.path={copy / 'model'}", f"data.train_files=[{copy / 'train.parquet'}]")
    assert last_recorded(identity(task, *moved), recorded, 0, STEPS) == STEPS
    with (copy / "train.parquet").open("ab") as file:
        file.write(b"x")
    settings = json.loads((copy / "model" / "config.json").read_text()) | {"rms_norm_eps": 0.5}
    (copy / "model" / "config.json").write_text(json.dumps(settings))
    weights = next((copy / "model").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-4] + b"\1\2\3\4")
    said = refusal(identity(task, *moved), recorded)
    assert "are other data than those of the run" in said and "rms_norm_eps" in said and "model.safetensors" in said


def test_what_is_not_recorded_is_named(task: Path, recorded: Path, tmp_path: Path) -> None:
    of = identity(task)
    assert "Name a run that was run with trainer.record_rollouts=true" in refusal(of, tmp_path / "none")
    assert "its record ends with step 4, and the replay would go on after step 4" in refusal(of, recorded, after=4)
    record_file(recorded, 2).unlink()
    assert "step 2: schedule.jsonl has no line, or record/ no file of it" in refusal(of, recorded)
    assert last_recorded(of, recorded, 2, STEPS) == STEPS, "a replay from a checkpoint of step 2 needs no more"
    for step in (1, 3, 4):
        record_file(recorded, step).unlink()
    assert "step 1, 2, 3, 4: " in refusal(of, recorded)
    (recorded / "record" / "run.json").write_text("{")
    assert "record/run.json cannot be read" in refusal(of, recorded)


def test_a_run_that_was_resumed_with_other_settings_is_no_one_run(task: Path, recorded: Path) -> None:
    file = ScheduleFile(recorded / SCHEDULE, keep=2)
    for step in (3, 4):
        file.write(line(step, "xxh3:other"))
    file.close()
    assert "step 3 was trained with other settings than those before it" in refusal(identity(task), recorded)
    assert last_recorded(identity(task), recorded, 2, STEPS) == STEPS


def test_what_contradicts_a_replay_is_refused(task: Path) -> None:
    here = config(task, f"trainer.replay={task / 'run'}", "trainer.record_rollouts=true", "trainer.val_only=true")
    said = [str(each) for each in run_violations(here) if each.key == "trainer.replay"]
    assert [each.partition(": ")[2].split(".")[0][:24] for each in said] == [
        "is the run directory its", "draws nothing, and train", "reads rollouts that are ",
    ]  # fmt: skip
