"""The wheel, in an environment of its own and outside the repository: everything is there, and everything runs.

The environment borrows the packages of the one that runs the tests, and never writes there: the wheel is installed
first, by itself, and the borrowed folder is made visible afterwards.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from mcore_rl.config.launch import recipe_names
from tests.house.source import ROOT
from tests.support.vllm_device import ON_VLLM_DEVICE

pytestmark = [pytest.mark.tier("full"), pytest.mark.timeout(1200)]
NOT_SOURCE = (".git", ".venv", ".*_cache", "runs", "build", "dist", "*.egg-info", "__pycache__")


@dataclass(frozen=True)
class Installed:
    """python: of the environment.  folder: where commands run."""

    python: Path
    folder: Path
    wheel: Path

    def run(self, *words: str) -> str:
        """What ``mcore-rl words`` prints."""
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        command = [str(self.python.with_name("mcore-rl")), *words]
        done = subprocess.run(
            command, cwd=self.folder, env=environment | {"COLUMNS": "200"}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{words}\n{done.stdout[-2000:]}{done.stderr[-3000:]}"
        return done.stdout


def built(folder: Path) -> Path:
    """The wheel, from a copy of the sources: a build writes among them."""
    shutil.copytree(ROOT, folder / "source", symlinks=True, ignore=shutil.ignore_patterns(*NOT_SOURCE))
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(folder / "source")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    shutil.rmtree(folder / "source")
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("wheel")
    wheel, home = built(folder), folder / "environment"
    venv.create(home, with_pip=False, symlinks=True)
    python = home / "bin" / "python"
    install = ["--python", str(python), "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([sys.executable, "-m", "pip", *install], check=True, env=environment, cwd=folder)
    (site,) = home.glob("lib/python*/site-packages")
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (folder / "elsewhere").mkdir()
    return Installed(python, folder / "elsewhere", wheel)


def test_it_is_the_wheel_that_runs(installed: Installed) -> None:
    where = subprocess.run(
        [installed.python, "-c", "import mcore_rl; print(mcore_rl.__file__)"], cwd=installed.folder,
        env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert Path(where.strip()).is_relative_to(installed.python.parents[1])
    with zipfile.ZipFile(installed.wheel) as wheel:
        assert not {name.partition("/")[0] for name in wheel.namelist()} & {"tests", "tools", "launch", "benchmarks"}


def test_what_is_read_by_name_is_there(installed: Installed) -> None:
    listed = installed.run("recipes")
    assert all(f"\n{name} " in listed for name in recipe_names())
    assert "mistralai/Mixtral-8x22B-Instruct-v0.1" in installed.run("models")
    assert "140.6B parameters on 64 ranks" in " ".join(installed.run("plan", "recipe=mixtral_8x22b_rloo").split())
    assert "PROVEN" in installed.run("verify", "--model", "tiny-mixtral", "--layout", "tp=2,ep=2", "--rollout", "tp=2")


def test_from_data_to_a_trained_model_and_there_and_back(installed: Installed, processes: None) -> None:
    run, folder = installed.run, installed.folder
    run("prepare", "arithmetic", "--difficulty", "1", "--train", "64", "--val", "8", "--out", "data")
    run("prepare", "tiny-model", "--data", "data", "--out", "model")
    words = [
        "model.path=model",
        "data.train_files=[data/train.parquet]",
        "data.val_files=[data/val.parquet]",
        "trainer.default_local_dir=run",
        ON_VLLM_DEVICE["trainer"],
    ]
    script = run("submit", "recipe=arithmetic_grpo", "cluster=cpu", "--dry-run", *words)
    assert script.startswith("#!/usr/bin/env bash") and str(installed.python) in script
    small = ["data.train_batch_size=8", "data.max_prompt_length=40", "data.max_response_length=12", "rollout.n=4"]
    small += ["actor.ppo_mini_batch_size=8", "actor.precision=float32", "actor.optim.lr=1e-3", "algorithm=grpo"]
    small += ["rollout.kv_cache_memory_bytes=16777216", "rollout.max_num_seqs=32", "trainer.total_training_steps=1"]
    assert "a run of 1 steps" in run("train", *words, *small, "--check")
    run("train", *words, *small)
    steps = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps[-1]["step"] == 1 and (folder / "run" / "report.html").is_file()
    run("report", "run")

    trained = "run/hf/final"
    run("convert", "to-megatron", "--hf", trained, "--out", "megatron", "--layout", "ep=2")
    run("convert", "to-hf", "--megatron", "megatron", "--out", "again")
    before, after = ({name: tensor for path in (folder / place).glob("*.safetensors")
                      for name, tensor in load_file(path).items()} for place in (trained, "again"))  # fmt: skip
    assert before.keys() == after.keys()
    assert all(before[name].tobytes() == after[name].tobytes() for name in before)
