"""What tests compose is what a user composes: values, keys that were written, and words of refusals.

Wherever one stands for many, the others are of the tier ``test``: here every composition is done by hydra too.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.commands.programs import PROGRAMS
from mcore_rl.config import compose as composing
from mcore_rl.config.algorithm_registry import algorithms
from mcore_rl.config.launch import load_recipe, recipe_names
from mcore_rl.config.run import RunConfig
from mcore_rl.errors import ConfigError
from tests.support import quick_composing
from tests.support.own_algorithm import MEDIAN

Outcome = tuple[Any, frozenset[str] | None, str]

# Of ``mcore-rl train``: numbers, texts, lists, enums, mappings, null, interpolations, whole groups, free groups.
SOUND = [
    [],
    ["model.path=m", "data.train_files=[a,b]", "data.max_response_length=77", "trainer.device=auto"],
    ["algorithm=ppo", "actor.optim.lr=1e-3", "rollout.stop=['[/x]']", "rollout.kv_cache_memory_bytes=null"],
    ["actor.optim={lr: 2.0e-3}", "algorithm=dapo", "algorithm.kl_ctrl.kl_coef=0.5", "rollout.n=7", "rollout.n=9"],
    ["+data.chat_template_kwargs.enable_thinking=false", "model.path=''", "actor.megatron.c=8", "rollout.engine.a=[1]"],
    ["actor.ppo_mini_batch_size=8", "critic.ppo_mini_batch_size=${rollout.n}", "trainer.experiment_name=${model.path}"],
    ["teacher.by_source={a: b, c: d}", "trainer.logger=console", "data.val_files='a b.parquet'", "rollout.seed=007"],
    ["algorithm=rloo", "algorithm=gspo", "actor.precision=float32", "actor.optim.betas=[0.8,0.99]", "data.seed=1_000"],
]
REFUSED = [
    ["rollout.nn=5"],
    ["+rollout.nn=5"],
    ["+rollout.n=3"],
    ["rollout.n=many"],
    ["rollout.n=2.5"],
    ["rollout.n=null"],
    ["rollout.n=1,2"],
    ["~rollout.n"],
    ["actor=5"],
    ["zebra=1"],
    ["+zebra.stripes=5"],
    ["actor.optim.learning_rate=1"],
    ["data.chat_template_kwarg.enable_thinking=false"],
    ["algorithm=grop"],
    ["algorithm={name: grpo}"],
    ["algorithm@actor=grpo"],
    ["hydra.run.dir=x"],
    ["rollout.n"],
    ["data.train_files=[a"],
    ["data.train_files={a:1}"],
    ["trainer.logger=[console,disk]"],
    ["actor.precision=float12"],
    ["trainer.default_local_dir=${nothing.there}"],
    ["rollout.n=many", "model.path=m", "actor.speed=1", "algorithm=grop"],
]
CHEAP = 3  # of the refusals, how many are of the tier `check`


def both(monkeypatch: pytest.MonkeyPatch, make: Callable[[], Any]) -> tuple[Outcome, Outcome]:
    """(what ``make`` composes quickly; what it composes with hydra, and merged over the schema, needed or not)."""

    def outcome() -> Outcome:
        try:
            made = make()
        except ConfigError as error:
            return None, None, str(error)
        return made, getattr(made, "written", None), composing.as_yaml(made)

    quick = outcome()
    with monkeypatch.context() as patch:
        patch.setattr(composing, "_compose", quick_composing.whole)
        patch.setattr(composing, "_has_types_of", lambda *_: False)
        return quick, outcome()


@pytest.mark.parametrize("overrides", SOUND, ids=range(len(SOUND)))
def test_values_are_those_of_hydra(overrides: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    quick, whole = both(monkeypatch, lambda: composing.compose(RunConfig, "train", overrides))
    assert quick == whole and quick[0] is not None


@pytest.mark.parametrize("program", [each for each in PROGRAMS if each != "train"])
def test_every_program_has_hydras_values(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    schema = PROGRAMS[program].schema
    overrides = ["ray_init.num_cpus=3"] if program in ("generate", "evaluate") else ["actor.optim.lr=1", "data.seed=2"]
    quick, whole = both(monkeypatch, lambda: composing.compose(schema, program, overrides))
    assert quick == whole and quick[0] is not None


@pytest.mark.parametrize(
    "overrides",
    [pytest.param(each, marks=[pytest.mark.tier("test")] * (place >= CHEAP)) for place, each in enumerate(REFUSED)],
    ids=range(len(REFUSED)),
)
def test_refusals_have_the_words_of_the_package(overrides: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    quick, whole = both(monkeypatch, lambda: composing.compose(RunConfig, "train", overrides))
    assert quick == whole and quick[0] is None


@pytest.mark.tier("test")
@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_is_that_of_hydra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    quick, whole = both(monkeypatch, lambda: load_recipe(name, ["data.seed=5", "trainer.experiment_name=x"]))
    assert quick == whole and quick[0] is not None


@pytest.mark.tier("test")
@pytest.mark.parametrize("name", algorithms())
def test_every_algorithm_is_that_of_hydra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    quick, whole = both(
        monkeypatch, lambda: composing.compose(RunConfig, "train", [f"algorithm={name}", "rollout.n=6"])
    )
    assert quick == whole and quick[0] is not None


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
    assert composing._compose is quick_composing.whole


def test_other_tests_are_quick() -> None:
    assert composing._compose is quick_composing.quick
