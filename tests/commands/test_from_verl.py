"""``mcore-rl from-verl``: a script, a command or a yaml file in; a recipe, the list and an exit code out."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import yaml

from mcore_rl.cli import main
from mcore_rl.config.launch import load_recipe

SCRIPT = """#!/usr/bin/env bash
set -x
train_files="['$HOME/a.parquet', '$HOME/b.parquet']"
NODES=${NNODES:-1}
python3 -m verl.trainer.main_ppo --config-path=config \\
    --config-name='ppo_megatron_trainer.yaml'\\
    algorithm.adv_estimator=grpo \\
    data.train_files="$train_files" \\
    actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct \\
    actor_rollout_ref.actor.optim.lr=1e-6 \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \\
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 \\
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2 \\
    actor_rollout_ref.rollout.n=5 \\
    actor_rollout_ref.rollout.name=vllm \\
    trainer.nnodes=$NODES trainer.save_freq=-1 $@ | tee log
"""


def test_a_script_becomes_a_recipe_that_is_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/users/me")
    monkeypatch.setenv("NNODES", "2")
    script, out = tmp_path / "run.sh", tmp_path / "recipes" / "mine.yaml"
    script.write_text(SCRIPT)
    assert main(["from-verl", str(script), "--out", str(out)]) == 0
    told = capsys.readouterr()
    assert told.out == "" and f"mcore-rl plan recipe={out} cluster=nvidia_h100" in told.err
    assert "actor_rollout_ref.rollout.name=vllm" in told.err and "trainer.total_epochs: 30 in verl" in told.err
    values = yaml.safe_load(out.read_text())
    assert values["data"]["train_files"] == ["/users/me/a.parquet", "/users/me/b.parquet"]
    assert values["recipe"] == {"checkpoint": "qwen2-7b-instruct"} and values["trainer"]["nnodes"] == 2
    assert "total_epochs: 30  # verl's default" in out.read_text()
    assert load_recipe(str(out), ["rollout.n=6"]).trainer.n_gpus_per_node == 8
    assert main(["plan", f"recipe={out}", "cluster=nvidia_h100"]) == 0


def test_a_command_in_quotes_and_standard_input(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = "actor_rollout_ref.model.external_lib=mine"
    command = f"python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.n=4 {absent}"
    assert main(["from-verl", command]) == 1
    quoted = capsys.readouterr()
    assert f"Not here, and left out:\n  {absent}" in quoted.err
    assert yaml.safe_load(quoted.out)["rollout"]["n"] == 4
    monkeypatch.setattr("sys.stdin", io.StringIO(command))
    assert main(["from-verl", "-"]) == 1
    assert capsys.readouterr() == quoted


def test_a_version_is_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    command = "python3 -m verl.trainer.main_ppo --config-name=ppo_megatron_trainer algorithm.adv_estimator=gae"
    for version, schedule in (("0.4.1", "linear"), ("0.9.0", None)):
        assert main(["from-verl", command, "--version", version]) == 0
        told = capsys.readouterr()
        assert f"which 0.4.0 to 0.10.0.dev has; defaults of verl {version}" in told.err
        assert yaml.safe_load(told.out).get("actor", {}).get("optim", {}).get("lr_schedule") == schedule
    assert main(["from-verl", command, "--version", "1.0"]) == 2
    assert "is no version of verl that is known. Write one of 0.4.0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("no words", "has neither a command of verl's nor key=value words"),
        ("python3 -m verl.trainer.main_ppo a='1", "unexpected EOF while looking for matching"),
    ],
)
def test_what_cannot_be_read(source: str, problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["from-verl", source]) == 2
    assert problem in capsys.readouterr().err


def test_a_yaml_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "verl.yaml").write_text("actor_rollout_ref: {actor: {megatron: {tensor_model_parallel_size: 4}}}\n")
    assert main(["from-verl", str(tmp_path / "verl.yaml")]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["actor"]["parallel"] == {"tp": 4}


def test_the_help_teaches_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["from-verl", "--help"])
    told = capsys.readouterr().out
    assert ended.value.code == 0
    assert "mcore-rl from-verl run_qwen2-7b_math_megatron.sh --out my_recipes/qwen2.yaml" in told


# A script -> (exit code, what is said, what is in the yaml).
SCRIPTS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=$(ls /m) data.train_files=$FILES trainer.nnodes=2": (
        1, "only a run of that program would tell",
        {"model": {"path": "???"}, "data.train_files": "???", "trainer": {"nnodes": 2}},
    ),
    "python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.n=$N trainer.nnodes=2": (
        1, "a variable of the script is not set", {"rollout": {"n": "???"}},
    ),
    "N=2; for i in 1 2; do N=$((N * 2)); done; torchrun --nproc_per_node=4 -m verl.trainer.sft_trainer model.path=m "
    "data.train_batch_size=$N optim.lr=1e-5": (0, "", {"data.train_batch_size": 8, "trainer": {"n_gpus_per_node": 4}}),
    "{ true || echo no; }; python3 -m verl.trainer.main_ppo trainer.nnodes=2": (0, "", {"trainer": {"nnodes": 2}}),
    "python3 -m verl.trainer.main_ppo trainer.nnodes=2; python3 -m verl.trainer.main_eval data.path=x": (
        1, "verl.trainer.main_eval\n      is started too", {"trainer": {"nnodes": 2}},
    ),
    "if lscpu | grep -q x; then python3 -m verl.trainer.main_ppo trainer.nnodes=2; fi": (
        0, "Not run, and taken to succeed: grep, lscpu", {"trainer": {"nnodes": 2}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_as_bash_reads_it(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, said, expected = SCRIPTS[script]
    assert main(["from-verl", script]) == code
    told = capsys.readouterr()
    values = yaml.safe_load(told.out)
    assert said in told.err and "\0" not in told.err
    for key, value in expected.items():
        group, _, name = key.partition(".")
        if name:
            assert values[group][name] == value
        else:
            assert value.items() <= values[group].items()
    if "model.path" not in script:
        assert "model" not in values, "a model that the script does not name"


def test_what_was_not_understood_is_refused_until_it_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "made.yaml"
    script = "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=$(ls /m) data.train_files=a.parquet"
    assert main(["from-verl", script, "--out", str(out)]) == 1
    capsys.readouterr()
    assert main(["plan", f"recipe={out}", "cluster=nvidia_h100"]) == 2
    assert "model.path" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("python3 -m verl.model_merger merge --backend fsdp", "mcore-rl convert"),
        ("set -u; python3 -m verl.trainer.main_ppo a=$MODEL_X", "MODEL_X: unbound variable"),
        (
            "python3 -m recipe.some.main_thing a=1",
            "is a program of verl's that is not translated: recipe.some.main_thing",
        ),
    ],
)
def test_refusals_leave_no_recipe(source: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["from-verl", source, "--out", str(tmp_path / "made.yaml")]) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "made.yaml").exists()


def test_no_secret_is_written(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "sesame-open-1")
    monkeypatch.setenv("PROXY", "http://me:sesame-open-2@proxy")
    words = "trainer.project_name=$WANDB_API_KEY trainer.experiment_name=x$PROXY"
    main(["from-verl", f"python3 -m verl.trainer.main_ppo {words} data.prompt_key=$(printenv WANDB_API_KEY)"])
    main(["from-verl", "python3 -m verl.trainer.main_ppo trainer.project_name=sesame-open-1"])
    told = capsys.readouterr()
    assert "sesame-open" not in told.out + told.err
