"""What keeps a run from starting is said before a process is started; what follows from other fields is filled in."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from mcore_rl.config.compose import compose
from mcore_rl.config.engine import Device
from mcore_rl.config.lora import LoraConfig
from mcore_rl.config.roles import AdaptedConfig
from mcore_rl.config.run import RunConfig
from mcore_rl.config.trainer import TrainerConfig
from mcore_rl.controller.lifecycle.preparation import (
    Prepared,
    complete,
    demand_steps,
    prepare,
    with_absolute_adapters,
)
from mcore_rl.controller.lifecycle.run_checkpoints import Progress, begin, finish
from mcore_rl.ground.errors import ConfigError, McoreRLError
from mcore_rl.parallel.device import detect
from tests.e2e.test_roles import write_dense
from tests.support import reward_models
from tests.support.run_task import overrides, write_task

CPU = detect(Device.cpu)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_task(tmp_path_factory.mktemp("task"))


def config(task: Path, run_dir: Path, *more: str) -> RunConfig:
    return complete(compose(RunConfig, "train", overrides(task, run_dir, *more)), CPU)


def test_engines_that_share_accelerators_take_all_of_them() -> None:
    trainer = TrainerConfig(n_gpus_per_node=8)
    gpu = replace(CPU, kind=Device.cuda, device_type="cuda")
    assert complete(RunConfig(trainer=trainer), gpu).rollout.dp == 8
    assert complete(RunConfig(trainer=trainer), CPU).rollout.dp == 1


def prepared(task: Path, run_dir: Path, *more: str) -> Prepared:
    return prepare(config(task, run_dir, *more), CPU)


def refusal(task: Path, run_dir: Path, *more: str) -> str:
    with pytest.raises(McoreRLError) as error:
        prepared(task, run_dir, *more)
    return str(error.value)


def test_steps_are_counted_in_epochs_or_as_written(task: Path, tmp_path: Path) -> None:
    preparation = prepared(task, tmp_path)
    assert preparation.train is not None and preparation.validation is not None
    assert (len(preparation.train), len(preparation.validation), preparation.num_steps) == (40, 6, 5)
    assert preparation.data_sources == {"arithmetic"}
    assert preparation.checkpoint is None and preparation.progress == Progress()
    assert prepared(task, tmp_path, "trainer.total_epochs=3").num_steps == 15
    assert prepared(task, tmp_path, "trainer.total_training_steps=7", "trainer.total_epochs=3").num_steps == 7
    assert prepared(task, tmp_path, "trainer.val_only=true", "data.train_files=[]").num_steps == 0


def test_a_run_goes_on_from_its_newest_checkpoint(task: Path, tmp_path: Path) -> None:
    first = prepared(task, tmp_path)
    seen = first.sampler.next(8)
    state = Progress(step=1, sampler=first.sampler.state_dict(), kl=first.kl.state_dict() | {"coef": 0.5}, best=0.25)
    path = finish(begin(tmp_path, state, ["actor"], first.identity.keep), {})
    again = prepared(task, tmp_path, "algorithm.kl_ctrl.type=adaptive")
    assert again.checkpoint == path and again.progress == state and again.kl.coef == 0.5
    assert again.sampler.next(8) == first.sampler.next(8) != seen
    fresh = prepared(task, tmp_path, "trainer.resume_mode=off")
    assert fresh.checkpoint is None and fresh.sampler.next(8) == seen
    assert "data.seed=5: the checkpoint was made with 1" in refusal(task, tmp_path, "data.seed=5")


def trained(task: Path, run_dir: Path, step: int, finished: int | None, *more: str) -> Path:
    """A run directory as a run of five steps leaves it after ``step``; returns its checkpoint."""
    first = prepared(task, run_dir, *more)
    first.sampler.next(8 * step)
    state = Progress(step=step, sampler=first.sampler.state_dict(), kl=first.kl.state_dict())
    path = finish(begin(run_dir, state, ["actor"], first.identity.keep), {})
    (run_dir / "environment.json").write_text(json.dumps({"total_steps": 5, "finished_step": finished}))
    return path


def start(task: Path, run_dir: Path, *more: str) -> Prepared:
    ready = prepared(task, run_dir, *more)
    demand_steps(config(task, run_dir, *more).trainer, ready)
    return ready


@pytest.mark.parametrize(
    ("step", "finished", "override", "said"),
    [
        (5, 5, "", "this run is finished: it was trained to step 5, and no step is left"),
        (5, 5, "actor.optim.lr=3e-5", "this run is finished: it was trained to step 5, and no step is left"),
        (5, 5, "trainer.total_training_steps=3", "this run is finished"),
        (5, None, "actor.optim.lr=3e-5", "step_5 is trained, and of 5 steps none is left"),
        (3, None, "trainer.total_training_steps=3", "step_3 is trained, and of 3 steps none is left"),
        (3, None, "trainer.total_training_steps=2", "step_3 is trained, and of 2 steps none is left"),
        (3, None, "trainer.val_only=true", "holds a run, whose record a validation would replace"),
    ],
)
def test_a_start_after_which_no_step_follows_is_refused(
    step: int, finished: int | None, override: str, said: str, task: Path, tmp_path: Path
) -> None:
    trained(task, tmp_path, step, finished)
    with pytest.raises(ConfigError) as error:
        start(task, tmp_path, *filter(None, [override]))
    (violation,) = error.value.violations
    assert violation.key == "trainer.default_local_dir" and said in violation.problem, violation
    assert "Give another directory" in violation.remedy
    start(task, tmp_path, "trainer.resume_mode=off")


def test_more_steps_and_a_missing_export_may_follow(task: Path, tmp_path: Path) -> None:
    path = trained(task, tmp_path / "finished", 5, 5)
    assert start(task, tmp_path / "finished", "trainer.total_training_steps=6").checkpoint == path
    named = ["trainer.resume_mode=path", f"trainer.resume_from_path={path}"]
    assert start(task, tmp_path / "other", *named, "trainer.val_only=true").checkpoint == path
    with pytest.raises(ConfigError, match="step_5 is trained, and of 5 steps none is left"):
        start(task, tmp_path / "other", *named)
    path = trained(task, tmp_path / "died", 5, None)
    assert start(task, tmp_path / "died").checkpoint == path, "its weights are still to be exported"


def test_a_prompt_that_fits_into_no_microbatch_with_its_response_is_refused(task: Path, tmp_path: Path) -> None:
    """The longest prompt has 23 tokens, and responses may have 12."""
    rows = prepared(task, tmp_path).train
    assert rows is not None and max(len(rows[index].tokens) for index in range(len(rows))) == 23
    said = refusal(task, tmp_path, "actor.microbatch_tokens=34")
    assert "actor.microbatch_tokens=34: " in said and "with the longest response to it. Write 35 or more" in said
    assert prepared(task, tmp_path, "actor.microbatch_tokens=35").num_steps == 5


def test_what_follows_from_other_fields_is_filled_in(task: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(task)
    filled = config(Path(), Path("run"), "algorithm.adv_estimator=gae", "critic.path=model")
    assert filled.model.path == filled.critic.path == str(task / "model")
    assert filled.trainer.default_local_dir == str(task / "run")
    assert filled.actor.loss_agg_constant == filled.critic.loss_agg_constant == 12.0
    written = config(task, task, "algorithm=ppo", "actor.loss_agg_constant=3", "critic.loss_agg_constant=0")
    assert (written.actor.loss_agg_constant, written.critic.loss_agg_constant) == (3.0, 0.0)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("model.path=nowhere", "config.json: cannot be read"),
        ("algorithm=ppo critic.path=nowhere", "config.json: cannot be read"),
        ("data.train_files=[nowhere.parquet]", "nowhere.parquet"),
        ("data.val_files=[nowhere.parquet]", "nowhere.parquet"),
        ("data.max_prompt_length=3", "more than data.max_prompt_length=3 tokens"),
        ("data.max_prompt_length=3 data.filter_overlong_prompts=true", "no prompt is left"),
        ("data.train_batch_size=44", "data.train_batch_size=44: is more than the 40 prompts that there are"),
        (
            "algorithm.filter_groups.enable=true data.gen_batch_size=48",
            "data.gen_batch_size=48: is more than the 40 prompts that there are",
        ),
        ("data.max_response_length=999", "exceeds the model's 256 tokens"),
        ("actor.parallel.tp=4", "actor.parallel."),
        ("algorithm=ppo critic.parallel.ep=8", "critic.parallel."),
        ("rollout.tp=3", "rollout.tp=3: does not divide"),
        ("actor.loss_agg_constant=0", "actor.loss_agg_constant=0.0: must be positive"),
        ("trainer.resume_mode=path trainer.resume_from_path=nowhere", "trainer.resume_from_path=nowhere: is no sound"),
        (
            "trainer.n_gpus_per_node=8 actor.parallel.ep=1 actor.ppo_mini_batch_size=1",
            "actor.ppo_mini_batch_size=1: makes 4 sequences a step, fewer than the 8 data-parallel ranks of the actor. "
            "Write 2 or more",
        ),
    ],
)
def test_a_run_that_cannot_be_is_refused(task: Path, tmp_path: Path, more: str, said: str) -> None:
    assert said in refusal(task, tmp_path, *more.split())


def test_layouts_of_all_roles_are_refused_together(task: Path, tmp_path: Path) -> None:
    said = refusal(task, tmp_path, "algorithm=ppo", "actor.parallel.tp=4", "critic.parallel.pp=3")
    assert "actor.parallel." in said and "critic.parallel." in said


def test_a_tokenizer_without_a_chat_template_is_named(task: Path, tmp_path: Path) -> None:
    shutil.copytree(task / "model", tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(settings))
    assert "chat template" in refusal(task, tmp_path / "run", f"model.path={tmp_path}/model")
    assert prepared(task, tmp_path / "run", f"model.path={tmp_path}/model", f"model.tokenizer_path={task}/model")


@pytest.fixture(scope="module")
def judged(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``task`` with a reward model, and validation rows that ask for it."""
    directory = tmp_path_factory.mktemp("judged")
    shutil.copytree(task, directory, dirs_exist_ok=True)
    reward_models.write_judge(directory / "judge")
    rows = pq.read_table(task / "val.parquet").to_pylist()
    for row in rows:
        row |= {"reward_model": {"style": "model", "ground_truth": None}, "data_source": "chat"}
    reward_models.write_rows(directory / "val.parquet", rows)
    return directory


def test_a_reward_model_is_prepared_for_rows_that_ask_for_it(judged: Path, tmp_path: Path) -> None:
    enabled = ["reward_model.enable=true", f"reward_model.model.path={judged}/judge"]
    preparation = prepared(judged, tmp_path, *enabled)
    assert preparation.encoder is not None and preparation.encoder.max_length == 64 + 12
    assert preparation.data_sources == {"arithmetic"}, "nobody need know how to grade chat"
    longer = prepared(judged, tmp_path, *enabled, "reward_model.max_length=99")
    assert longer.encoder is not None and longer.encoder.max_length == 99
    assert prepared(judged, tmp_path).encoder is None, "the task's own function grades every row"


def test_rows_and_reward_models_without_each_other_are_refused(task: Path, judged: Path, tmp_path: Path) -> None:
    said = refusal(judged, tmp_path, "custom_reward_function.path=null")
    assert "reward_model.enable=False: reward_model.style is model in 6 rows, and nobody scores them; " in said
    assert "val.parquet:0 is the first. Write reward_model.enable=true reward_model.model.path=DIR" in said
    enabled = ["reward_model.enable=true", f"reward_model.model.path={judged}/judge"]
    said = refusal(task, tmp_path, *enabled)
    assert "reward_model.enable=True: no row asks for it: reward_model.style is model in none. Write the style" in said


def test_a_reward_model_s_problems_are_told_with_the_others(judged: Path, tmp_path: Path) -> None:
    wrong = [f"reward_model.model.path={judged}/model", "reward_model.tp=3", "actor.parallel.tp=4"]
    said = refusal(judged, tmp_path, "reward_model.enable=true", *wrong)
    assert "['MixtralForCausalLM']: is a language model" in said and "actor.parallel." in said


def test_a_template_that_refuses_the_rows_is_named_with_the_first(judged: Path, tmp_path: Path) -> None:
    shutil.copytree(judged / "judge", tmp_path / "judge")
    (tmp_path / "judge" / "chat_template.jinja").write_text(
        "{% if '?' in messages[0]['content'] %}{{ raise_exception('no questions') }}{% endif %}"
        "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    )
    said = refusal(judged, tmp_path, "reward_model.enable=true", f"reward_model.model.path={tmp_path}/judge")
    assert "val.parquet:0: the chat template refuses the conversation: no questions" in said


def test_experts_that_no_engine_records_are_refused_before_anything_starts(task: Path, tmp_path: Path) -> None:
    message = refusal(task, tmp_path, "actor.router_replay=r3")
    assert "actor.router_replay=r3: vLLM records experts on accelerators only. Write actor.router_replay=r2" in message
    assert prepared(task, tmp_path, "actor.router_replay=r2").models


def test_a_dense_model_replays_nothing(task: Path, tmp_path: Path) -> None:
    write_dense(tmp_path / "dense", task / "model", 1)
    settings = (f"model.path={tmp_path / 'dense'}", "actor.parallel.ep=1", "actor.router_replay=r2")
    assert "actor.router_replay=r2: the model is dense" in refusal(task, tmp_path, *settings)


def test_the_path_of_adapters_means_the_same_in_every_process() -> None:
    """``sft`` too: its workers may begin elsewhere."""
    made = with_absolute_adapters(AdaptedConfig(lora=LoraConfig(rank=4, path="there")))
    assert made.lora == LoraConfig(rank=4, path=str(Path("there").resolve()))
    assert with_absolute_adapters(AdaptedConfig()) == AdaptedConfig()


def test_a_teacher_of_other_tokens_is_refused_before_anything_starts(task: Path, tmp_path: Path) -> None:
    """Of the policy's size and tokenizer, but for two tokens that are exchanged."""
    other = tmp_path / "other"
    shutil.copytree(task / "model", other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary: dict[str, int] = tokenizer["model"]["vocab"]
    (first, low), (second, high) = sorted(vocabulary.items(), key=lambda each: each[1])[20:22]
    vocabulary |= {first: high, second: low}
    taught = ("algorithm.distill.coef=1", f"teacher.path={other}")
    assert prepared(task, tmp_path / "run", *taught).models.keys() == {"actor", "teacher"}
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    said = refusal(task, tmp_path / "run", *taught)
    assert f"teacher.path={other}: the numbers of 2 tokens differ, first of {first!r}: {high} there" in said
    assert "Name a model with the policy's tokenizer" in said


def test_rows_without_a_teacher_are_refused_before_anything_starts(task: Path, tmp_path: Path) -> None:
    """All rows of the task are of the data source "arithmetic"."""
    other, wider = tmp_path / "other", tmp_path / "wider"
    for directory, changes in ((other, {}), (wider, {"num_hidden_layers": 1})):
        shutil.copytree(task / "model", directory)
        values = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(values | changes))
    run_dir, distilled = tmp_path / "run", "algorithm.distill.coef=1"
    taught = f"teacher.by_source={{arithmetic: {other}}}"
    preparation = prepared(task, run_dir, distilled, taught)
    assert preparation.models.keys() == {"actor", "teacher"}
    assert "teacher.by_source.arithmetic" in preparation.identity.contents
    said = refusal(task, run_dir, distilled, f"teacher.by_source={{math: {other}}}")
    assert "teacher.by_source=math: names no teacher of the rows of arithmetic" in said
    assert "no row of data.train_files has the data source math; they have arithmetic" in said
    said = refusal(task, run_dir, distilled, f"teacher.path={other}", f"teacher.by_source={{arithmetic: {wider}}}")
    assert (
        f"teacher.by_source.arithmetic={wider}: is another architecture than teacher.path={other}: num_layers 1" in said
    )
    (other / "tokenizer.json").unlink()
    said = refusal(task, run_dir, distilled, f"teacher.path={task}/model", taught)
    assert f"teacher.by_source.arithmetic={other}: " in said and "tokenizer" in said
