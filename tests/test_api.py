"""``mcore_rl.train``: the configuration that a call means, and its errors; tests/e2e/test_notebook.py trains."""

from __future__ import annotations

import asyncio
import multiprocessing
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

import mcore_rl
from mcore_rl.api import overrides_of
from mcore_rl.config.compose import compose
from mcore_rl.config.resources import RECIPES
from mcore_rl.config.reward import Completions, RewardConfig
from mcore_rl.config.run import RunConfig
from mcore_rl.config.trainer import Logger
from mcore_rl.controller.programs import train as program
from mcore_rl.ground.errors import ConfigError
from mcore_rl.rewards.by_value import FOLDERS
from mcore_rl.tracking.run_owner import RunOwner
from tests.tracking.recorded_run import record

TEXTS = ["c's", "\\", "a\\\\", "\\'", "{x}", "1e3", "no", "null", "x,y", "a b", "[1]", "", "=", '"', "8:00:00"]
VALUES: dict[str, Any] = {
    "algorithm": "rloo",
    "model": {"path": "/a b/qwen"},
    "data": {"train_files": ["x,y.parquet", "z.parquet"], "val_files": []},
    "trainer": {"experiment_name": "1e3", "logger": [Logger.wandb], "total_training_steps": 2, "max_to_keep": None},
    "actor": {"optim": {"lr": 1e-5, "betas": (0.9, 0.95)}, "use_kl_loss": True},
    "rollout": {"stop": [text for text in TEXTS if text]},
}


def test_a_dictionary_means_what_is_in_it() -> None:
    run = compose(RunConfig, "train", list(overrides_of(VALUES)))
    assert (run.model.path, run.data.train_files, run.data.val_files) == (
        "/a b/qwen", ["x,y.parquet", "z.parquet"], []
    )  # fmt: skip
    trainer = run.trainer
    assert (trainer.experiment_name, trainer.logger, trainer.max_to_keep) == ("1e3", [Logger.wandb], None)
    assert (run.actor.optim.lr, list(run.actor.optim.betas), run.actor.use_kl_loss) == (1e-5, [0.9, 0.95], True)
    assert run.rollout.stop == VALUES["rollout"]["stop"]
    assert run.algorithm.adv_estimator == "rloo"


@pytest.mark.parametrize(
    "config", [{"trainer": {"total_training_steps": 0}}, ["trainer.total_training_steps=0"]]
)  # fmt: skip
def test_a_mistake_is_the_command_lines(config: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        mcore_rl.train(config)
    said = [str(each) for each in caught.value.violations]
    assert "trainer.total_training_steps=0: must be positive. Write 1 or more" in said
    assert any(line.startswith("model.path=: is not set") for line in said), "all at once"
    with pytest.raises(ConfigError, match="there is no such key"):
        mcore_rl.train({"trainer": {"total_steps": 1}})


def test_what_is_run_is_what_the_command_line_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.parquet").touch()
    seen: list[tuple[RunConfig, Any]] = []

    async def run_training(config: RunConfig, callbacks: Any = ()) -> int:
        await asyncio.sleep(0)
        seen.append((config, callbacks))
        return 75 if callbacks else 0

    monkeypatch.setattr(program, "run_training", run_training)
    values = {
        "model": {"path": str(tmp_path)},
        "data": {"train_files": [str(tmp_path / "train.parquet")]},
        "trainer": {"default_local_dir": str(tmp_path / "run")},
    }
    by_values = mcore_rl.train(values)
    by_overrides = mcore_rl.train(list(overrides_of(values)))
    by_config = mcore_rl.train(seen[0][0])
    assert by_values == by_overrides == by_config == mcore_rl.RunResult(tmp_path / "run", finished=True)
    assert seen[0] == seen[1] == seen[2]

    async def in_a_notebook() -> Any:
        return mcore_rl.train(values, callbacks=[print])

    assert not asyncio.run(in_a_notebook()).finished, "a callback or a signal ended it"
    assert seen[3] == (seen[0][0], [print])


def test_a_recipe_is_what_the_rest_comes_on_top_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[RunConfig] = []

    async def run_training(config: RunConfig, callbacks: Any = ()) -> int:
        seen.append(config)
        return 0

    monkeypatch.setattr(program, "run_training", run_training)
    name = "qwen25_15b_grpo_xml"
    values: dict[str, Any] = {
        "recipe": name, "model": {"path": str(tmp_path)}, "data": {"train_files": [__file__], "val_files": [__file__]}
    }  # fmt: skip
    mcore_rl.train(values)
    words = list(overrides_of({key: value for key, value in values.items() if key != "recipe"}))
    assert seen == [compose(RunConfig, "train", words, RECIPES, name)]
    assert seen[0].actor.optim.warmup_ratio == 0.1
    with pytest.raises(ConfigError, match="Write one of the two"):
        mcore_rl.train(values, config_name=name)


def right(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    return [float(text == gold) for text, gold in zip(completions, answer, strict=True)]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """The configurations that would have been trained."""
    configs: list[RunConfig] = []

    async def run_training(config: RunConfig, callbacks: Any = ()) -> int:
        configs.append(config)
        return 0

    monkeypatch.setattr(program, "run_training", run_training)
    return configs


def test_rows_and_functions_become_files_of_the_run(tmp_path: Path, seen: list[RunConfig]) -> None:
    rows = [{"prompt": "Two and two?", "answer": "4"}]
    trainer = {"default_local_dir": str(tmp_path / "run")}
    values: dict[str, Any] = {"algorithm": "dr_grpo", "rollout": {"n": 4}, "trainer": trainer}
    for _ in range(2):
        result = mcore_rl.train(
            {"trainer.save_freq": 5}, model=tmp_path, dataset=rows, eval_dataset=rows, reward=[right, len], **values
        )
    assert result.directory == tmp_path / "run" and seen[0] == seen[1], "the same call names the same files"
    run, custom = seen[0], seen[0].custom_reward_function
    assert (run.model.path, run.trainer.save_freq, run.rollout.n) == (str(tmp_path), 5, 4)
    assert run.algorithm.adv_estimator == "dr_grpo"
    files = [*run.data.train_files, *run.data.val_files, str(custom.path)]
    folders = str(tmp_path / "run" / "inputs" / FOLDERS)
    assert sorted([*files, folders]) == sorted(map(str, (tmp_path / "run" / "inputs").iterdir()))
    assert (custom.functions, custom.completions) == (["right", "len"], Completions.text)
    as_messages = [{"prompt": [{"role": "user", "content": "Two?"}]}]
    mcore_rl.train(model=tmp_path, dataset=as_messages, reward=right, **values)
    assert seen[2].custom_reward_function.completions is Completions.messages
    mcore_rl.train(
        model={"path": str(tmp_path)}, dataset=__file__, reward={"num_workers": 3}, custom_reward_function={}, **values
    )
    assert (seen[3].data.train_files, seen[3].reward.num_workers) == ([__file__], 3)
    assert seen[3].custom_reward_function.path is None


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"learning_rate": 1e-6},
            "learning_rate=1e-06: there is no such key. TRL's learning_rate is here: actor.optim",
        ),
        ({"reward_funcs": [right]}, "TRL's reward_funcs is here: reward=FUNCTION or a list of them, in Python"),
        ({"data": {"train_files": [__file__]}}, "dataset=: and data.train_files say the same. Write one of the two"),
        ({"custom_reward_function": {"path": __file__}}, "reward=: and custom_reward_function.path say the same"),
        ({"config": RunConfig()}, "dataset=: stands beside a whole configuration. Set it in the configuration"),
    ],
)
def test_what_contradicts_the_call_is_refused(tmp_path: Path, values: dict[str, Any], said: str) -> None:
    values = {"trainer": {"default_local_dir": str(tmp_path / "run")}} | values
    with pytest.raises(ConfigError) as caught:
        mcore_rl.train(dataset=[{"prompt": "Two?"}], reward=right, **values)
    assert said in str(caught.value) and not (tmp_path / "run").exists()


def test_everything_that_is_wrong_is_said_at_once_and_nothing_is_written(tmp_path: Path, seen: list[RunConfig]) -> None:
    values: dict[str, Any] = {"trainer": {"default_local_dir": str(tmp_path / "run"), "total_training_steps": 0}}
    with pytest.raises(ConfigError) as caught:
        mcore_rl.train(model=tmp_path, dataset=[{"question": "Two?"}], eval_dataset=[], reward=[right, 3], **values)
    said = str(caught.value)
    assert "4 problems" in said, said
    for each in ("reward=3: is no function", "dataset=row 0: has no prompt", "eval_dataset=: has no rows"):
        assert each in said
    assert "trainer.total_training_steps=0: must be positive" in said
    with pytest.raises(ConfigError, match=r"^1 problem in the configuration:\n  - trainer\.total_training_steps=0"):
        mcore_rl.train(model=tmp_path, dataset=[{"prompt": "Two?"}], reward=right, **values)
    assert not (tmp_path / "run").exists() and not seen


def test_a_directory_that_cannot_be_written_or_is_taken_is_refused(tmp_path: Path, seen: list[RunConfig]) -> None:
    def refused() -> str:
        trainer = {"default_local_dir": str(tmp_path / "run")}
        with pytest.raises(ConfigError) as caught:
            mcore_rl.train(model=tmp_path, dataset=[{"prompt": "Two?"}], reward=right, trainer=trainer)
        return str(caught.value)

    (tmp_path / "run").touch()
    assert "1 problem in the configuration:\n  - trainer.default_local_dir=" in refused()
    (tmp_path / "run").unlink()
    with RunOwner(tmp_path / "run", say=print):
        assert "belongs to another run, which is going on" in refused()
        assert not (tmp_path / "run" / "inputs").exists()
    (tmp_path / "run").mkdir(exist_ok=True)
    (tmp_path / "run" / "inputs").touch()
    assert "trainer.default_local_dir=" in (said := refused()) and "cannot be written: " in said
    assert not seen


@pytest.mark.tier("ci")
def test_equal_processes_may_write_the_inputs_at_once(
    tmp_path: Path, seen: list[RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    context = multiprocessing.get_context("fork")
    all_have_written = context.Barrier(3)
    write = Path.write_bytes

    def write_and_wait(path: Path, data: bytes) -> int:
        length = write(path, data)
        all_have_written.wait(60)
        return length

    def call() -> None:
        trainer = {"default_local_dir": str(tmp_path / "run")}
        mcore_rl.train(model=tmp_path, dataset=[{"prompt": "Two?"}], trainer=trainer)

    monkeypatch.setattr(Path, "write_bytes", write_and_wait)
    equal = [context.Process(target=call) for _ in range(3)]
    for each in equal:
        each.start()
    for each in equal:
        each.join()
    assert [each.exitcode for each in equal] == [0, 0, 0]
    assert len(list((tmp_path / "run" / "inputs").iterdir())) == 1


@pytest.mark.parametrize("config", ["Qwen/Qwen2.5-0.5B", RewardConfig(), {"rollout.n"}, [{"rollout.n": 8}], None, 3])
@pytest.mark.parametrize("call", [mcore_rl.train, mcore_rl.sft, mcore_rl.prefer, mcore_rl.reward])
def test_what_is_no_dictionary_of_settings_is_refused(call: Any, config: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        call(config)
    (violation,) = caught.value.violations
    shown = config if isinstance(config, str) else type(config).__name__
    assert str(violation).startswith(f'config={shown}: is no dictionary of settings. Write {{"model.path": MODEL}}')


def test_values_of_numpy_are_numbers() -> None:
    given = {"lr": np.float64(1e-6), "n": np.int64(4), "on": np.bool_(True), "betas": np.array([0.5, 0.75])}
    assert list(overrides_of(given)) == ["lr=1e-06", "n=4", "on=true", "betas=[0.5,0.75]"]


@pytest.mark.parametrize("count", [20, 20_000])
def test_rows_by_trls_name_are_not_shown(count: int) -> None:
    with pytest.raises(ConfigError) as caught:
        mcore_rl.train(train_dataset=[{"prompt": "Two and two?", "answer": "4"}] * count)
    assert "TRL's train_dataset is here: dataset=ROWS, in Python" in str(caught.value)
    assert max(map(len, str(caught.value).splitlines())) < 300


def test_a_notebook_shows_the_curves_of_a_run(tmp_path: Path) -> None:
    record(tmp_path)
    shown = ElementTree.fromstring(mcore_rl.RunResult(tmp_path, finished=True)._repr_html_())
    assert (shown.tag, shown.get("sandbox")) == ("iframe", "allow-scripts")
    page = ElementTree.fromstring(shown.get("srcdoc", ""))
    titles = {each.get("aria-label") for each in page.iter("svg")}
    assert {"Validation accuracy", "Reward"} <= titles


def test_an_error_in_the_thread_of_a_run_is_the_callers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run_training(config: RunConfig, callbacks: Any = ()) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(program, "run_training", run_training)
    run = compose(RunConfig, "train", [f"model.path={tmp_path}", f"data.train_files=[{__file__}]"])

    async def in_a_notebook() -> Any:
        return mcore_rl.train(run)

    with pytest.raises(ZeroDivisionError):
        asyncio.run(in_a_notebook())


def test_importing_the_package_loads_nothing() -> None:
    said = "import sys, mcore_rl; print(len([each for each in sys.modules if each.startswith('mcore_rl')]))"
    assert subprocess.check_output([sys.executable, "-c", said], text=True) == "1\n"
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        mcore_rl.trian  # noqa: B018
