"""What tests compose is what a user composes: what hydra reads of files is remembered as it was read."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_rl.config import compose as composing
from mcore_rl.config.algorithm_registry import algorithms
from mcore_rl.config.launch import load_recipe, recipe_names
from mcore_rl.config.run import RunConfig
from tests.support import quick_composing
from tests.support.own_algorithm import MEDIAN


def test_a_recipe_and_an_algorithm_are_those_of_hydra(monkeypatch: pytest.MonkeyPatch) -> None:
    name, algorithm = recipe_names()[0], f"algorithm={next(iter(algorithms()))}"
    quick = load_recipe(name, ["data.seed=5"]), composing.compose(RunConfig, "train", [algorithm])
    monkeypatch.setattr(composing, "read", quick_composing.whole)
    assert quick == (load_recipe(name, ["data.seed=5"]), composing.compose(RunConfig, "train", [algorithm]))


def test_nothing_of_a_users_is_remembered(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(MEDIAN)
    (tmp_path / "mine.yaml").write_text("defaults: [train, _self_]\nrollout: {n: 6}\n")
    chosen = [f"algorithm={tmp_path}/own.py"]

    def read() -> tuple[int, float]:
        of_file = composing.compose(RunConfig, "train", [], tmp_path, "mine")
        return of_file.rollout.n, composing.compose(RunConfig, "train", chosen).actor.optim.lr

    first = read()
    (tmp_path / "mine.yaml").write_text("defaults: [train, _self_]\nrollout: {n: 7}\n")
    assert (first[0], read()[0]) == (6, 7)


def test_what_a_test_changes_no_other_gets() -> None:
    def fresh() -> RunConfig:
        return composing.compose(RunConfig, "train", ["data.train_files=[a]", "actor.megatron={a: [1]}"])

    changed, untouched = fresh(), composing.as_yaml(fresh())
    changed.data.train_files.append("b")
    changed.actor.megatron["a"].append(2)
    changed.actor.optim.lr = 9.0
    changed.trainer.logger.clear()
    assert composing.as_yaml(fresh()) == untouched


def test_a_test_may_ask_for_hydra(whole_composing: None) -> None:
    assert composing.read is quick_composing.whole


def test_other_tests_are_quick() -> None:
    assert composing.read is quick_composing.quick
