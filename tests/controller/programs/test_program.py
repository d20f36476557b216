"""Around a run's steps: whose directory it is, what a start that fails leaves alone, and a directory that vanishes."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractContextManager, AsyncExitStack, ExitStack, asynccontextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mcore_rl.cli import main
from mcore_rl.config.compose import compose
from mcore_rl.config.engine import Device
from mcore_rl.config.run import RunConfig
from mcore_rl.config.sft import SftConfig
from mcore_rl.config.trainer import TrainerConfig
from mcore_rl.controller import training_run
from mcore_rl.controller.lifecycle import run_checkpoints
from mcore_rl.controller.lifecycle.preparation import complete, prepare
from mcore_rl.controller.lifecycle.run_checkpoints import Progress
from mcore_rl.controller.lifecycle.saving import WriteMore
from mcore_rl.controller.lifecycle.start_plan import forecast
from mcore_rl.controller.programs import program, sft, train
from mcore_rl.controller.step.preemption import REQUEUE
from mcore_rl.controller.training_run import TrainingRun, every_step
from mcore_rl.ground.errors import AlarmError, ConfigError, RunDirectoryError
from mcore_rl.parallel.device import detect
from mcore_rl.tracking.run_directory import finished_step
from mcore_rl.tracking.run_owner import OWNER, RunOwner
from tests.controller.lifecycle.test_hub_pushes import going_on, until
from tests.support.hub_server import TOKEN, HubServer
from tests.support.prompt_files import user, write
from tests.support.run_task import overrides, write_task
from tests.support.vllm_device import ON_VLLM_DEVICE
from tests.tracking.recorded_run import record

CPU = detect(Device.cpu)
NO_RAY = "ray_init.address=127.0.0.1:9"  # nothing listens there


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_task(tmp_path_factory.mktemp("task"))
    rows = [{"prompt": user("1 + 1"), "response": "2"}] * 8
    write(directory / "conversations.parquet", rows)
    return directory


def start_train(task: Path, place: Path, *more: str) -> int:
    return asyncio.run(train.run_training(compose(RunConfig, "train", overrides(task, place, *more))))


def sft_words(task: Path, place: Path) -> list[str]:
    return [
        f"model.path={task}/model", f"data.train_files=[{task}/conversations.parquet]", "data.train_batch_size=8",
        "data.max_length=64", "actor.parallel.ep=2", "trainer.n_gpus_per_node=2", ON_VLLM_DEVICE["trainer"],
        "trainer.logger=[]", f"trainer.default_local_dir={place}",
    ]  # fmt: skip


def start_sft(task: Path, place: Path, *more: str) -> int:
    return asyncio.run(sft.SFT.train(compose(SftConfig, "sft", [*sft_words(task, place), *more])))


STARTS = {"train": start_train, "sft": start_sft}
Start = Callable[..., int]


@pytest.fixture(params=STARTS)
def start(request: pytest.FixtureRequest, processes: None) -> Start:
    return STARTS[request.param]


def records(directory: Path) -> Path:
    """Of a run of long ago, as a run leaves them."""
    (directory / "metrics.jsonl").write_text(json.dumps({"step": 1, "reward/mean": 0.5}) + "\n")
    for name in ("config.yaml", "environment.json", "report.html", "plan.json"):
        (directory / name).write_text(name)
    for name in ("rollouts", "validation", "checkpoints/step_1.incomplete/actor", "hf/final", "logs"):
        (directory / name).mkdir(parents=True)
    (directory / "rollouts" / "step_1.parquet").touch()
    (directory / "logs" / "wandb_id").write_text("abc\n")
    return directory


def content(directory: Path) -> dict[str, str]:
    return {
        str(path.relative_to(directory)): path.read_text() if path.is_file() else "" for path in directory.rglob("*")
    }


def test_a_start_that_fails_changes_nothing(start: Start, task: Path, tmp_path: Path) -> None:
    before = content(records(tmp_path))
    for mode in ("trainer.resume_mode=off", "trainer.resume_mode=auto"):
        with pytest.raises(ConfigError, match=r"ray_init\.address"):
            start(task, tmp_path, NO_RAY, mode)
        assert content(tmp_path) == before


def test_a_second_start_is_refused_before_it_changes_anything(start: Start, task: Path, tmp_path: Path) -> None:
    with RunOwner(records(tmp_path), say=pytest.fail):
        before = content(tmp_path)
        with pytest.raises(ConfigError, match="belongs to another run, which is going on: process") as refused:
            start(task, tmp_path, "trainer.resume_mode=off")
        assert len(refused.value.violations) == 1 and content(tmp_path) == before


@pytest.mark.parametrize(("restarts", "code"), [(None, 2), ("0", 2), ("1", 0)])
def test_a_finished_run_is_refused_unless_slurm_queued_its_job_again(
    processes: None,
    restarts: str | None,
    code: int,
    task: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    words = sft_words(task, tmp_path)
    prepared = sft.SFT.prepare(compose(SftConfig, "sft", words))
    progress = Progress(step=prepared.num_steps, sampler=prepared.sampler.state_dict())
    run_checkpoints.finish(run_checkpoints.begin(tmp_path, progress, ["actor"], prepared.identity.keep), {})
    (tmp_path / "environment.json").write_text(json.dumps({"finished_step": progress.step}))
    before = content(tmp_path)
    if restarts is not None:
        monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
    assert main(["sft", *words]) == code
    said = "".join(capfd.readouterr())
    assert f"this run is finished: it was trained to step {progress.step}" in said
    assert ("Give another directory" in said) is (code == 2)
    assert content(tmp_path) == before


def test_no_directory_is_none(start: Start, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for written in ("", "' '"):
        with pytest.raises(ConfigError, match=r"trainer.default_local_dir= *: names no directory. Write the"):
            start(task, Path("x"), f"trainer.default_local_dir={written}")
    assert not list(tmp_path.iterdir())


class Writer:
    """Saves checkpoints without ranks."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.saved_step, self.failed, self.saved = directory, 0, False, list[Path]()

    def metrics(self) -> dict[str, float]:
        return {}

    def move_to(self, directory: Path) -> None:
        self.directory, self.saved_step = directory, -1

    async def conclude(self, progress: Progress, write_more: WriteMore) -> None:
        assert self.saved_step != progress.step
        self.saved.append(run_checkpoints.finish(run_checkpoints.begin(self.directory, progress, ["actor"]), {}))

    save = conclude


class Counting(TrainingRun[Any, Any]):
    """Steps that only count."""

    validates_first = False

    def __init__(self, directory: Path) -> None:
        sampler = SimpleNamespace(state_dict=dict, load_state_dict=lambda state: None)
        trainer = TrainerConfig(default_local_dir=str(directory))
        self.config = SimpleNamespace(trainer=trainer)
        self.prepared = SimpleNamespace(num_steps=5, sampler=sampler)  # type: ignore[assignment]
        told: Any = {"log": lambda step, metrics: None, "timeline": lambda step, spans, lanes: None}
        self.tracker = SimpleNamespace(**told)  # type: ignore[assignment]
        self.groups, self.directory, self.progress = {}, directory, Progress()
        self.preemption, self.clock, self.device_peak = training_run.Preemption(), training_run.Clock(), None
        self.saver: Any = Writer(directory)
        self.owner, self.lanes = None, ()

    async def validate(self, step: int) -> dict[str, float]:
        return {}

    def rates(self, metrics: Any, seconds: Any) -> dict[str, float]:
        return {}


def lose(directory: Path, how: str) -> None:
    if how == "moved":
        directory.rename(directory.with_name("elsewhere"))
        return
    shutil.rmtree(directory)
    if how == "the place is taken":
        directory.with_name("run-rescued").touch()


@pytest.mark.parametrize(
    ("how", "place"), [("moved", "elsewhere"), ("removed", "run-rescued"), ("the place is taken", "home/run-rescued")]
)
def test_a_run_whose_directory_vanishes_says_so_at_the_next_step_and_saves_elsewhere(
    how: str,
    place: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    processes: None,
) -> None:
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path / "home")
    run = Counting(tmp_path / "run")

    @asynccontextmanager
    async def open_run(config: Any) -> AsyncIterator[Counting]:
        yield run

    async def step(run: Counting, number: int) -> dict[str, float]:
        assert number <= 3, "it ends with the step in which it is noticed"
        if number == 3:
            lose(run.directory, how)
        return {}

    config = compose(RunConfig, "train", [f"trainer.default_local_dir={tmp_path}/run", "trainer.max_restarts=3"])
    monkeypatch.setattr(program, "run_violations", lambda config: [])
    monkeypatch.setattr(training_run, "utilization", lambda *_: {})
    with pytest.raises(RunDirectoryError) as error:
        asyncio.run(program.run_program(replace(config), open_run, lambda run: every_step(run, step)))
    saved = tmp_path / place
    assert run.saver.saved == [saved / "checkpoints" / "step_3"]
    assert f"trainer.default_local_dir={saved} goes on from there" in str(error.value)
    assert run_checkpoints.to_resume(replace(config.trainer, default_local_dir=str(saved)), pytest.fail) is not None
    assert how != "the place is taken" or "run-rescued: the run cannot be saved there" in capsys.readouterr().err
    assert not (tmp_path / "run" / OWNER).exists() and os.path.isdir(tmp_path)


def opened(task: Path, place: Path, *more: str) -> None:
    """Does what a start does with the run directory, without its processes."""
    config = compose(RunConfig, "train", overrides(task, place, "trainer.logger=[]", *more))
    config = complete(config, CPU)
    prepared = prepare(config, CPU)
    planned = forecast(config, CPU, prepared.models)
    with ExitStack() as closing:
        stack = AsyncExitStack()
        tracker = training_run.open_directory(config, prepared, CPU, stack, None)
        closing.callback(tracker.close)
        training_run.begin_records(config, prepared, planned, tracker)


def test_a_start_says_whether_it_goes_on(task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Off a terminal too; and where only the weights are still to be exported, no record is written again."""
    opened(task, tmp_path)
    assert "goes on" not in (said := capsys.readouterr().err) and "begins anew" not in said
    first = prepare(complete(compose(RunConfig, "train", overrides(task, tmp_path)), CPU), CPU)
    for step in (3, first.num_steps):
        progress = Progress(step=step, sampler=first.sampler.state_dict(), kl=first.kl.state_dict())
        run_checkpoints.finish(run_checkpoints.begin(tmp_path, progress, ["actor"], first.identity.keep), {})
        before = content(tmp_path)
        opened(task, tmp_path)
        said = f"goes on from {tmp_path}/checkpoints/step_{step}: step {step} of 5 is trained"
        assert said in capsys.readouterr().err
        assert (content(tmp_path) == before) == (step == first.num_steps)
    opened(task, tmp_path, "trainer.total_training_steps=6")
    assert "trainer.total_training_steps: None when the checkpoint was made, now 6" in capsys.readouterr().err
    opened(task, tmp_path, "trainer.resume_mode=off")
    assert f"begins anew: the records of the run that was in {tmp_path} are moved" in capsys.readouterr().err
    assert (tmp_path / "earlier" / "1" / "config.yaml").exists()


class Exporting(Counting):
    """Every step is the best so far; exports have a file, and no weights."""

    async def export(self, name: str) -> Path:
        fresh, target = self.directory / "hf" / f"{name}.new", self.directory / "hf" / name
        fresh.mkdir(parents=True)
        (fresh / "model.safetensors").write_bytes(b"of %d" % self.progress.step)
        run_checkpoints.publish_export(fresh, target, self.progress.step)
        return target


@pytest.fixture
def pushing(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: None
) -> Callable[..., Coroutine[Any, Any, int]]:
    """A run of five steps that pushes to ``team/tuned``; its argument is called before each step."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(program, "run_violations", lambda config: [])
    monkeypatch.setattr(training_run, "utilization", lambda *_: {})
    monkeypatch.setattr("mcore_rl.controller.lifecycle.hub_pushes.CLOSE_S", 0.05)
    record(tmp_path / "run")

    def begin(before: Callable[[Exporting], None]) -> Coroutine[Any, Any, int]:
        @asynccontextmanager
        async def open_run(config: Any) -> AsyncIterator[Exporting]:
            yield Exporting(tmp_path / "run")

        async def step(run: Exporting, number: int) -> dict[str, float]:
            before(run)
            if number == 1:
                run.progress.best_step = number
                await run.export("best")
            return {}

        words = [f"trainer.default_local_dir={tmp_path}/run", "trainer.push_to_hub=team/tuned"]
        config = compose(RunConfig, "train", words)
        return program.run_program(config, open_run, lambda run: every_step(run, step))

    return begin


@pytest.mark.parametrize("how", ["asked", "alarmed"])
def test_a_run_that_is_stopped_leaves_no_upload_behind(
    how: str, pushing: Callable[..., Coroutine[Any, Any, int]], hub: HubServer
) -> None:
    def before(run: Exporting) -> None:
        if run.progress.step == 3 and how == "asked":
            run.preemption.ask("a test")
        elif run.progress.step == 3:
            raise AlarmError("of a test")

    hub.open.clear()
    ends: AbstractContextManager[object] = pytest.raises(AlarmError) if how == "alarmed" else nullcontext()
    with ends:
        assert asyncio.run(pushing(before)) == REQUEUE
    hub.open.set()
    asyncio.run(until(lambda: not going_on()))


def test_a_run_is_finished_when_its_last_upload_is(
    pushing: Callable[..., Coroutine[Any, Any, int]],
    hub: HubServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    directory, notes = tmp_path / "run", list[str]()
    monkeypatch.setattr(program, "note", notes.append)

    async def interrupted() -> None:
        running = asyncio.create_task(pushing(lambda run: None))
        await until(lambda: any("waiting for the uploads" in each for each in notes))
        running.cancel()
        await running

    hub.open.clear()
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(interrupted())
    said = capsys.readouterr().out
    assert f"final weights: {directory}/hf/final" in said and finished_step(directory) is None
    assert f"not pushed: step 5, the last; upload it with: hf upload team/tuned {directory}/hf/final --private" in said
    hub.open.set()
    asyncio.run(until(lambda: not going_on()))
    shutil.rmtree(directory / "hf")
    assert asyncio.run(pushing(lambda run: None)) == 0 and finished_step(directory) == 5
    assert hub.repos["models/team/tuned"].files["model.safetensors"] == b"of 5"
    assert "pushed: step 5, the last: " in capsys.readouterr().out
