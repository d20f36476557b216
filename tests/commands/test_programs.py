"""``--check`` of the main programs: all that is read and planned before a process starts, and then nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import ray

from mcore_rl.cli import main
from tests.support.prompt_files import save_to_disk, write_as
from tests.support.run_task import overrides, write_task

LENGTHS = ("data.max_prompt_length=64", "data.max_response_length=12")


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_task(tmp_path_factory.mktemp("task"))


def check(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main([*words, "--check"])
    said = capsys.readouterr()
    assert not ray.is_initialized()
    return code, " ".join((said.out + said.err).split())


@pytest.fixture
def words(task: Path, tmp_path: Path, processes: None) -> list[str]:
    return ["train", *overrides(task, tmp_path / "run")]


def test_a_run_that_would_begin_is_planned(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = check(capsys, *words, "trainer.total_training_steps=7")
    assert code == 0 and "nothing is wrong: a run of 7 steps, which begins anew. Nothing was started" in said
    assert said.index("nothing is wrong") < said.index("2 ranks") < said.index(" GiB"), "the plan comes after it"
    assert not (tmp_path / "run").exists()


def test_what_nothing_forbids_and_nobody_means_is_said_first(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = check(capsys, *words, "actor.optim.lr=1")
    assert code == 0 and "a doubt, below: a run of 5 steps, which begins anew. Nothing was started" in said
    assert said.index("actor.optim.lr=1: AdamW moves every weight") < said.index("2 ranks")


def test_what_only_the_data_and_the_model_can_tell_is_refused(
    words: list[str], task: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = check(capsys, *words, "actor.parallel.ep=1", "actor.parallel.tp=8", "trainer.n_gpus_per_node=8")
    assert code == 2 and "actor.parallel.tp=8" in said
    reward = task / "no_reward.py"
    reward.write_text("def compute_score(**given):\n    return 'much'\n")
    code, said = check(capsys, *words, f"custom_reward_function.path={reward}")
    assert code == 2 and "much" in said


def test_rows_of_every_kind_of_file(
    words: list[str], task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = {name: pq.read_table(task / f"{name}.parquet").to_pylist() for name in ("train", "val")}
    write_as(tmp_path / "train.jsonl.gz", rows["train"])
    save_to_disk(tmp_path / "saved" / "test", rows["val"])
    train, val = f"data.train_files={tmp_path / 'train.jsonl.gz'}", f"data.val_files=[{tmp_path / 'saved'}]"
    assert check(capsys, *words, train, val)[0] == 0
    write_as(tmp_path / "train.jsonl.gz", [*rows["train"], {**rows["train"][0], "prompt": []}])
    code, said = check(capsys, *words, train, val)
    assert code == 2 and "train.jsonl.gz:40" in said
    write_as(tmp_path / "train.jsonl.gz", rows["train"])
    (tmp_path / "saved" / "test" / "state.json").write_text("{}")
    code, said = check(capsys, *words, train, val)
    assert code == 2 and f"data.val_files[0]={tmp_path / 'saved'}: has no .parquet, .jsonl, .jsonl.gz files" in said


def test_a_logger_that_is_not_installed_is_told_before_torch_is_loaded(
    task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    monkeypatch.setitem(sys.modules, "wandb", None)
    words = ["train", *overrides(task, tmp_path / "run"), "trainer.logger=[mlflow,console,wandb]"]
    code, said = check(capsys, *words)
    assert code == 2 and "2 problems" in said and "loading torch" not in said
    packages = "'mlflow-skinny<4,>=3.17' 'sqlalchemy<3,>=2' 'alembic<2,>=1.16'"
    assert f"trainer.logger=mlflow: the package mlflow is not installed. Run `pip install {packages}`" in said


def test_the_other_programs(task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], processes: None) -> None:
    model, data = f"model.path={task / 'model'}", str(task / "val.parquet")
    code, said = check(
        capsys, "generate", model, f"data.files={data}", f"out={tmp_path / 'o.parquet'}", "rollout.n=3", *LENGTHS
    )
    assert code == 0 and "nothing is wrong: 18 responses. Nothing was started" in said
    assert list(tmp_path.iterdir()) == []
    code, said = check(capsys, "evaluate", f"path={data}")
    assert code == 2 and "no column responses" in said, "the file has prompts alone"
