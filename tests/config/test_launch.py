"""Recipes and clusters by name and by path, and what is said of those that are wrong."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mcore_rl.config.engine import Device
from mcore_rl.config.launch import (
    cluster_names,
    cluster_yaml,
    load_cluster,
    load_recipe,
    program_of,
    recipe_names,
    recipe_path,
)
from mcore_rl.config.run import RunConfig
from mcore_rl.config.sft import SftConfig
from mcore_rl.ground.errors import ConfigError


def refusal(load: Callable[..., object], *arguments: object) -> str:
    with pytest.raises(ConfigError) as error:
        load(*arguments)
    return str(error.value)


def recipe(directory: Path, text: str, name: str = "mine") -> str:
    path = directory / f"{name}.yaml"
    path.write_text(text)
    return str(path)


def test_recipes_are_found_by_name_with_their_program() -> None:
    assert {"arithmetic_grpo", "arithmetic_sft"} <= set(recipe_names())
    trained = load_recipe("arithmetic_grpo", ["rollout.n=4", "algorithm=rloo"])
    assert isinstance(trained, RunConfig)
    assert trained.rollout.n == 4 and trained.algorithm.adv_estimator == "rloo"
    assert trained.data.train_batch_size == 32, "a value of the recipe"
    assert isinstance(load_recipe("arithmetic_sft"), SftConfig)


def test_a_recipe_of_ones_own_may_stand_on_another(tmp_path: Path) -> None:
    first = recipe(tmp_path, "defaults: [sft, _self_]\ndata: {max_length: 77}\n", "first")
    second = recipe(tmp_path, "defaults: [first, _self_]\nmodel: {path: m}\n", "second")
    assert program_of(Path(first)) == program_of(Path(second)) == "sft"
    loaded = load_recipe(second)
    assert isinstance(loaded, SftConfig) and loaded.data.max_length == 77 and loaded.model.path == "m"


def test_everything_wrong_in_a_recipe_is_told_with_its_file(tmp_path: Path) -> None:
    path = recipe(tmp_path, "defaults: [train, _self_]\nactor: {ppo_minibatch_size: 3}\nrollout: {n: many}\n")
    said = refusal(load_recipe, path)
    assert "2 problems" in said
    assert f"{path}: actor.ppo_minibatch_size=3: there is no such key. Did you mean actor.ppo_mini_batch_size" in said
    assert f"{path}: rollout.n=many: must be a whole number" in said
    path = recipe(tmp_path, "defaults: [train, _self_]\nmodel: {config_overrides: {a: 1}}\nactor: {lr: 1}\n")
    said = refusal(load_recipe, path)
    assert "1 problem" in said and f"{path}: actor.lr=1: there is no such key" in said, (
        "any field of config.json may be"
    )
    assert "rollout.nn=4: there is no such key. Did you mean rollout.n" in refusal(
        load_recipe, "arithmetic_grpo", ["rollout.nn=4"]
    )


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("arithmetic_grp", "recipe=arithmetic_grp: there is no arithmetic_grp.yaml in "),
        ("arithmetic_grp", "Did you mean arithmetic_grpo"),
        ("zebra", "Choose one of those there: arithmetic_grpo"),
        ("", "Choose one of those there: "),
        ("nowhere/x.yaml", "recipe=nowhere/x.yaml: there is no file nowhere/x.yaml"),
        ("nowhere/x", "recipe=nowhere/x: there is no file nowhere/x.yaml"),
    ],
)
def test_recipes_that_are_not_there(name: str, said: str) -> None:
    assert said in refusal(recipe_path, name)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model: {path: m}\n", "defaults=[]: name neither train, sft, prefer nor reward. Begin the file with"),
        ("defaults: [_self_]\n", "name neither train, sft, prefer nor reward"),
        ("defaults: [mine, _self_]\n", "name neither train, sft, prefer nor reward"),  # itself
        ("", "name neither train, sft, prefer nor reward"),
        ("just words\n", "holds no keys"),
        ("a: [1\n", "mine.yaml=: "),
    ],
)
def test_files_that_are_no_recipe(tmp_path: Path, text: str, said: str) -> None:
    path = recipe(tmp_path, text)
    message = refusal(load_recipe, path)
    assert said in message and path in message


def test_recipes_that_stand_on_each_other(tmp_path: Path) -> None:
    recipe(tmp_path, "defaults: [mine, _self_]\n", "other")
    assert "name neither train, sft, prefer nor reward" in refusal(
        load_recipe, recipe(tmp_path, "defaults: [other, _self_]\n")
    )


def test_clusters_are_found_by_name_and_by_path(tmp_path: Path) -> None:
    assert "nvidia_h100" in cluster_names()
    cluster = load_cluster("nvidia_h100", ["slurm.partition=gpu", "slurm.extra=[--constraint=ib]", "environment.A=1"])
    assert cluster.name == "nvidia_h100" and cluster.device is Device.cuda and cluster.gpus_per_node == 8
    assert cluster.slurm.partition == "gpu" and cluster.slurm.extra == ["--constraint=ib"]
    assert cluster.environment == {"A": "1"}
    path = tmp_path / "home.yaml"
    path.write_text("cpus_per_node: 2\nhost_memory_gib: 24\n")
    assert load_cluster(str(path)).name == "home" and load_cluster(str(path)).host_memory_gib == 24.0


@pytest.mark.parametrize("text", ["8:00:00", "0123", "1e3", "0x1F", "1_000", "on", "yes", "true", "1.50", "2026-01-01"])
def test_what_is_declared_a_text_stays_what_was_written(tmp_path: Path, text: str) -> None:
    """yaml alone reads 28800, 83, 1000.0, 31, 1000, true, true, true, 1.5 and a date."""
    path = tmp_path / "home.yaml"
    path.write_text(f"slurm: {{account: {text}, qos: '{text}', extra: [{text}]}}\nenvironment: {{A: {text}}}\n")
    for cluster in (
        load_cluster(str(path)),
        load_cluster(
            "cpu", [f"slurm.account={text}", f"slurm.qos='{text}'", f"slurm.extra=[{text}]", f"environment.A={text}"]
        ),
    ):
        slurm = cluster.slurm
        assert (slurm.account, slurm.qos, slurm.extra, cluster.environment) == (text, text, [text], {"A": text})
    path.write_text(cluster_yaml(cluster))
    assert load_cluster(str(path)) == cluster, "what a job is given is read as the same"
    path = Path(
        recipe(tmp_path, f"defaults: [train, _self_]\ntrainer: {{project_name: {text}}}\nrollout: {{stop: [{text}]}}\n")
    )
    run = load_recipe(str(path), [f"trainer.experiment_name={text}", f"data.train_files=[{text},'{text}']"])
    assert isinstance(run, RunConfig)
    assert (run.trainer.project_name, run.trainer.experiment_name) == (text, text)
    assert (run.rollout.stop, run.data.train_files) == ([text], [text, text])


def test_time_limits_are_slurms_own(tmp_path: Path) -> None:
    assert load_cluster("nvidia_h100", ["slurm.time_limit=8:00:00"]).slurm.time_limit == "8:00:00"
    path = tmp_path / "home.yaml"
    path.write_text("slurm: {time_limit: 1:30:00, port: 1024, requeue: off}\n")
    slurm = load_cluster(str(path)).slurm
    assert (slurm.time_limit, slurm.port, slurm.requeue) == ("1:30:00", 1024, False), "the declared type reads"


def test_everything_wrong_in_a_cluster_is_told(tmp_path: Path) -> None:
    path = tmp_path / "home.yaml"
    path.write_text("gpu_per_node: 2\ncpus_per_node: few\n")
    said = refusal(load_cluster, str(path))
    assert f"{path}: gpu_per_node=2: there is no such key. Did you mean gpus_per_node" in said
    assert f"{path}: cpus_per_node=few: must be a whole number" in said
    said = refusal(load_cluster, "nvidia_h100", ["slurm.particion=a", "slurm.port=x"])
    assert "slurm.particion=a: there is no such key. Did you mean slurm.partition" in said and "slurm.port=x: " in said
    assert "z=: is no override. Write key=value" in refusal(load_cluster, "nvidia_h100", ["z"])
    assert "cpus_per_node=0: must be positive" in refusal(load_cluster, "nvidia_h100", ["cpus_per_node=0"])
    assert "Did you mean nvidia_h100" in refusal(load_cluster, "nvidia_h10")


def test_no_torch_is_imported() -> None:
    """submit.py --dry-run must answer in less than a second."""
    code = "import sys, mcore_rl.config.launch as l; l.load_recipe('arithmetic_grpo'); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
