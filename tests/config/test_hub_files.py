"""Hub ids on the command line: what is read, what is recorded, and what is refused before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from huggingface_hub import constants

from mcore_rl.cli import main
from mcore_rl.config.compose import as_dict, compose
from mcore_rl.config.hub_files import fetched
from mcore_rl.config.run import RunConfig
from mcore_rl.controller.lifecycle.resume_check import Identity
from mcore_rl.ground.errors import ConfigError
from mcore_rl.tracking.run_directory import prepare
from tests.support import checkpoints, prompt_files
from tests.support.engines import same_bits
from tests.support.hub_server import HubServer, Repo
from tests.support.run_task import overrides, write_task
from tests.support.settings import any_run


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_task(tmp_path_factory.mktemp("task"))


@pytest.fixture
def words(hub: HubServer, task: Path, tmp_path: Path) -> list[str]:
    """Of a run on a model and data of the Hub."""
    model = {path.name: path.read_bytes() for path in (task / "model").iterdir()}
    hub.repos["models/owner/tiny"] = Repo({**model, "modeling_tiny.py": b"raise SystemExit('read')"})
    rows = {
        "data/train.parquet": (task / "train.parquet").read_bytes(),
        "data/test.parquet": (task / "val.parquet").read_bytes(),
    }
    hub.repos["datasets/owner/sums"] = Repo(rows)
    named = ["model.path=owner/tiny", "data.train_files=owner/sums", "data.val_files=[owner/sums]"]
    return [*overrides(task, tmp_path / "run"), *named]


def said(capsys: pytest.CaptureFixture[str]) -> str:
    shown = capsys.readouterr()
    return " ".join((shown.out + shown.err).split())


def test_a_run_of_the_hubs_model_and_data(
    hub: HubServer,
    words: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    processes: None,
) -> None:
    assert main(["train", "--check", *words]) == 0
    shown = said(capsys)
    commits = hub.repos["models/owner/tiny"].head, hub.repos["datasets/owner/sums"].head
    assert f"is owner/tiny@{commits[0]}" in shown and f"is owner/sums@{commits[1]}:data/train.parquet" in shown
    assert "nothing is wrong: a run of" in shown
    assert not any(path.endswith(".py") for path in hub.paths("GET"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.requests.clear()
    assert main(["train", "--check", *words]) == 0 and hub.requests == []


def test_everything_that_cannot_be_had_is_said_at_once(
    hub: HubServer, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    del hub.repos["models/owner/tiny"]
    assert main(["train", *words, "data.val_files=[owner/none,owner/sums@v2]"]) == 2
    shown = said(capsys)
    assert "3 problems in the configuration" in shown
    assert "model.path=owner/tiny: there is no such path here, and" in shown
    assert "data.val_files[0]=owner/none: there is no such path here, and" in shown and "no such data set" in shown
    assert "data.val_files[1]=owner/sums@v2: has no revision v2" in shown


def test_nothing_is_downloaded_for_a_run_that_is_wrong(
    hub: HubServer, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *words, "rollout.n=0"]) == 2
    assert "rollout.n=0" in said(capsys) and hub.requests == []


def test_a_run_that_goes_on_keeps_its_commits(hub: HubServer, words: list[str], tmp_path: Path) -> None:
    """The owner of the model changes it while the job waits in its queue."""
    before = hub.repos["models/owner/tiny"].head
    config = any_run()
    config.trainer.default_local_dir = str(tmp_path / "run")
    config.model.path = "owner/tiny"
    assert Path(fetched(config).model.path).name == before
    hub.repos["models/owner/tiny"].files["config.json"] = b"{}"
    after = hub.repos["models/owner/tiny"].commit()
    assert Path(fetched(config).model.path).name == after, "another run"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(f"model:\n  path: owner/tiny@{before}\n")
    assert Path(fetched(config).model.path).name == before
    config.model.path = "owner/tiny@main"
    assert Path(fetched(config).model.path).name == after, "what is written counts"


def test_the_names_in_config_yaml_are_ids(hub: HubServer, words: list[str], tmp_path: Path) -> None:
    config = any_run()
    config.model.path, config.data.train_files = "owner/tiny", ["owner/sums"]
    local = fetched(config)
    prepare(tmp_path / "run", {"model": local.model, "data": local.data}, 1, None, {})
    written = (tmp_path / "run" / "config.yaml").read_text()
    assert f"path: owner/tiny@{hub.repos['models/owner/tiny'].head}\n" in written
    assert f"- owner/sums@{hub.repos['datasets/owner/sums'].head}:data/train.parquet\n" in written
    assert str(tmp_path) not in written
    identity = Identity.of(as_dict(local), ["actor"], {"model.path": Path(local.model.path)})
    assert f"path: {identity.config['model']['path']}\n" in written
    assert identity.data[0][0] == "train.parquet" and identity.config["data"]["train_files"][0] in written


def test_convert_verify_models_and_plan_take_ids(
    hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints.write("mixtral", tmp_path / "hf")
    hub.repos["models/owner/mix"] = Repo({path.name: path.read_bytes() for path in (tmp_path / "hf").iterdir()})
    assert main(["models", "owner/mix"]) == 0
    assert "family mixtral" in said(capsys)
    assert main(["verify", "recipe=mixtral_8x22b_rloo", "--check", "model.path=owner/mix"]) == 2
    assert "tp=8" in said(capsys), "of the tiny model, not of Mixtral-8x22B"
    cluster = ["cluster=cpu", "trainer.n_gpus_per_node=1", "trainer.nnodes=1", "actor.parallel.tp=1"]
    small = ["actor.parallel.pp=1", "actor.parallel.ep=1", "rollout.tp=1", "rollout.dp=1"]
    capsys.readouterr()
    main(["plan", "recipe=mixtral_8x22b_rloo", *cluster, *small, "model.path=owner/mix"])
    assert not any(path.endswith(".safetensors") for path in hub.paths("GET")), "config.json is enough"
    assert main(["convert", "to-megatron", "--hf", "owner/mix", "--out", str(tmp_path / "megatron")]) == 0
    assert main(["convert", "to-hf", "--megatron", str(tmp_path / "megatron"), "--out", str(tmp_path / "again")]) == 0
    assert same_bits(checkpoints.tensors(tmp_path / "again"), checkpoints.tensors(tmp_path / "hf"))
    capsys.readouterr()
    assert main(["convert", "to-megatron", "--hf", "owner/none", "--out", str(tmp_path / "no")]) == 2
    assert "--hf=owner/none: there is no such path here" in said(capsys)


def test_generate_computes_in_the_dtype_of_the_hubs_model(
    hub: HubServer, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ["model.path=owner/tiny", "data.files=owner/sums:data/test.parquet", f"out={tmp_path / 'o.parquet'}"]
    config = json.loads(hub.repos["models/owner/tiny"].files["config.json"])
    assert config.get("dtype", config.get("torch_dtype")) == "float32", "not the default"
    assert main(["generate", "--cfg", "all", *files]) == 0
    assert "dtype: float32" in said(capsys)


def test_folders_of_rows_stand_for_their_files(tmp_path: Path) -> None:
    config = any_run()
    for name in ("train", "test"):
        prompt_files.write(tmp_path / "rows" / f"{name}.parquet", [prompt_files.row("1 + 1", "2")])
    config.data.train_files = config.data.val_files = [str(tmp_path / "rows")]
    data = fetched(config).data
    assert data.train_files == [str(tmp_path / "rows" / "train.parquet")]
    assert data.val_files == [str(tmp_path / "rows" / "test.parquet")]


def test_teachers_of_data_sources_may_be_of_the_hub(hub: HubServer, words: list[str], tmp_path: Path) -> None:
    """Each of a mapping by itself; a directory stays, and one that is not there is named with its source."""
    taught = ["algorithm.distill.coef=1", f"teacher.by_source={{a.b: owner/tiny, c: {tmp_path}}}"]
    config = compose(RunConfig, "train", [*words, *taught])
    local = fetched(config)
    assert local.teacher.by_source == {"a.b": local.model.path, "c": str(tmp_path)}  # type: ignore[attr-defined]
    config.teacher.by_source["d/e"] = "owner/missing"  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"teacher.by_source\[d/e\]=owner/missing"):
        fetched(config)
