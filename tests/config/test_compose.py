"""Overrides over yaml over dataclasses: what composes, and what is refused with the place and the nearest key."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from mcore_rl.config.algorithms.gdpo import GdpoConfig
from mcore_rl.config.bounds import settings
from mcore_rl.config.cluster import ClusterConfig
from mcore_rl.config.compose import as_dict, as_yaml, compose
from mcore_rl.config.engine import Precision
from mcore_rl.config.evaluate import EvaluateConfig
from mcore_rl.config.generate import GenerateConfig
from mcore_rl.config.run import RunConfig
from mcore_rl.config.sft import SftConfig
from mcore_rl.config.trainer import Logger
from mcore_rl.config.yaml_files import FREE
from mcore_rl.ground.errors import ConfigError


def refusal(*overrides: str, directory: Path | None = None, name: str | None = None) -> str:
    with pytest.raises(ConfigError) as error:
        compose(RunConfig, "train", overrides, directory, name)
    return str(error.value)


def test_values_have_the_types_of_the_dataclasses(whole_composing: None) -> None:
    run = compose(
        RunConfig,
        "train",
        [
            "actor.precision=float32",
            "actor.optim.lr=1",
            "actor.optim.betas=[0.8,0.99]",
            "trainer.logger=[console,wandb]",
            "data.train_files=[a b.parquet,'c=d.parquet']",
            "data.chat_template_kwargs.enable_thinking=false",
            "algorithm=cispo",
        ],
    )
    assert run.actor.precision is Precision.float32 and run.actor.loss_mode == "cispo"
    assert run.actor.optim.lr == 1.0 and isinstance(run.actor.optim.lr, float)
    assert tuple(run.actor.optim.betas) == (0.8, 0.99)
    assert run.trainer.logger == [Logger.console, Logger.wandb]
    assert run.data.train_files == ["a b.parquet", "c=d.parquet"]
    assert run.data.chat_template_kwargs == {"enable_thinking": False}


def test_where_no_type_is_declared_yaml_and_hydra_read(tmp_path: Path) -> None:
    free = "actor: {megatron: {a: 1e3, b: on, c: 7, d: '7', e: [0.5]}}\ndata: {chat_template_kwargs: {n: no}}\n"
    (tmp_path / "mine.yaml").write_text(
        f"defaults: [train, _self_]\nmodel: {{config_overrides: {{theta: 1e6}}}}\n{free}"
    )
    overrides = ["actor.megatron.c=8", "data.chat_template_kwargs={m: 1e3}", "critic.megatron.f=[1,true]"]
    run = compose(RunConfig, "train", overrides, tmp_path, "mine")
    assert run.actor.megatron == {"a": 1000.0, "b": True, "c": 8, "d": "7", "e": [0.5]}
    assert run.data.chat_template_kwargs == {"n": False, "m": 1000.0}
    assert run.model.config_overrides == {"theta": 1e6} and run.critic.megatron == {"f": [1, True]}


def test_every_group_without_declared_types_is_free() -> None:
    schemas = (RunConfig, SftConfig, GenerateConfig, EvaluateConfig, ClusterConfig)
    undeclared = {each.key.split(".")[-1] for schema in schemas for each in settings(schema) if "Any" in str(each.kind)}
    assert undeclared == set(FREE)


def test_sft_has_a_schema_of_its_own(whole_composing: None) -> None:
    config = compose(SftConfig, "sft", ["trainer.device=cpu", "trainer.experiment_name=x"])
    assert config.actor.device is config.trainer.device
    assert config.trainer.default_local_dir == "runs/x"
    with pytest.raises(ConfigError, match=r"algorithm\.gamma=1: there is no such key"):
        compose(SftConfig, "sft", ["algorithm.gamma=1"])


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("actor.optim.learning_rate=1", "actor.optim.learning_rate=1: there is no such key. Did you mean actor.optim"),
        ("rollout.nn=5", "rollout.nn=5: there is no such key. Did you mean rollout.n"),
        ("+rollout.nn=5", "rollout.nn=5: there is no such key. Did you mean rollout.n"),
        (
            "data.chat_template_kwarg.enable_thinking=false",
            "data.chat_template_kwarg.enable_thinking=false: there is no",
        ),
        ("+zebra.stripes=5", "zebra.stripes=5: there is no such key"),
        ("rollout.n=many", "rollout.n=many: must be a whole number. Write one"),
        ("rollout.n=2.5", "rollout.n=2.5: must be a whole number. Write one"),
        ("rollout.n=null", "rollout.n=null: "),
        ("actor.precision=float12", "actor.precision=float12: is none of its values. Write float32 or bfloat16"),
        ("data.train_files={a:1}", "data.train_files={a:1}: "),
        ("trainer.logger=[console,disk]", "trainer.logger[1]=disk: is none of its values. Write console, wandb,"),
        (
            "rollout.kv_cache_memory_bytes=None",
            "rollout.kv_cache_memory_bytes=None: must be a whole number. Write null",
        ),
        ("rollout.enforce_eager=maybe", "rollout.enforce_eager=maybe: is neither true nor false. Write true or false"),
        ("actor.precision=bf16", "actor.precision=bf16: is none of its values. Write float32 or bfloat16"),
        ("algorithm=GRPO", "algorithm=GRPO: there is none of that name. Did you mean grpo"),
        ("algorithm@actor=grpo", "algorithm=grpo: takes no package, as @actor. Write algorithm=grpo"),
        ("actor.optim.betas=[0.9]", "actor.optim.betas=[0.9]: has too few values. Write one more"),
        ("actor.optim.betas=[0.9,0.9,0.9]", "actor.optim.betas=[0.9,0.9,0.9]: has too many values. Write fewer"),
        ("rollout.n=1,2", "rollout.n=1,2: are several values for one run. Write a list: rollout.n=[a,b]"),
        ("~rollout.n", "rollout.n=: takes a key away, and every key has a value. Leave it out"),
        ("actor=5", "actor=5: "),
        ("algorithm=grop", "algorithm=grop: there is none of that name. Did you mean grpo"),
        ("rollout.n", "rollout.n=: is no override. Write key=value"),
        ("data.train_files=[a", "data.train_files=[a: "),
        ("trainer.default_local_dir=${nothing.there}", "trainer.default_local_dir=${nothing.there}: "),
    ],
)
def test_an_override_that_cannot_be_is_named(override: str, said: str) -> None:
    message = refusal("model.path=m", override)
    assert message.startswith("1 problem in the configuration:\n"), message
    assert f"  - {said}" in message, message
    assert len(message.splitlines()) == 2, message


@pytest.mark.parametrize(
    "text", ["~/x.parquet", "</answer>", "第一", "a=b", "x;y", "http://h:80/?q=1&r=2", "*.parquet"]
)
def test_a_text_needs_no_quotes_that_the_shell_would_take(text: str) -> None:
    run = compose(RunConfig, "train", [f"rollout.stop={text}", f"data.train_files=[{text},b]"])
    assert run.rollout.stop == [text] and run.data.train_files == [text, "b"]


def test_all_overrides_that_cannot_be_are_named_at_once(whole_composing: None) -> None:
    message = refusal("rollout.n=many", "model.path=m", "actor.speed=1", "algorithm=grop")
    assert message.startswith("3 problems")
    assert all(said in message for said in ("rollout.n=many", "actor.speed=1", "algorithm=grop"))


def test_files_of_the_users_may_begin_with_ours(tmp_path: Path) -> None:
    recipe = {"defaults": ["train", "_self_"], "rollout": {"n": 6}, "trainer": {"experiment_name": "mine"}}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(recipe))
    (tmp_path / "algorithm").mkdir()
    (tmp_path / "algorithm" / "own.yaml").write_text("# @package _global_\nactor:\n  clip_ratio: 0.5\n")
    run = compose(RunConfig, "train", ["algorithm=own", "data.seed=9"], tmp_path, "mine")
    assert (run.rollout.n, run.actor.clip_ratio, run.data.seed) == (6, 0.5, 9)
    assert run.trainer.default_local_dir == "runs/mine"
    (tmp_path / "train.yaml").write_text("defaults: [train_schema, algorithm: rloo, _self_]\nrollout: {n: 7}\n")
    run = compose(RunConfig, "train", [], tmp_path)
    assert run.rollout.n == 7 and run.algorithm.use_kl_in_reward, "without a name it begins with the program's"


def test_a_mistake_in_a_file_of_the_users_is_named(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [train, _self_]\nrollout:\n  m: 6\n")
    message = refusal("data.seed=9", directory=tmp_path, name="mine")
    assert "mine.yaml: rollout.m=6: there is no such key. Did you mean rollout.n" in message
    assert "data.seed" not in message
    (tmp_path / "mine.yaml").write_text("defaults: [train, _self_]\nrollout:\n  n: six\n")
    message = refusal(directory=tmp_path, name="mine")
    assert "mine.yaml: rollout.n=six: must be a whole number" in message
    (tmp_path / "mine.yaml").write_text("rollout: [\n")
    assert "mine.yaml" in refusal(directory=tmp_path, name="mine")


def test_a_file_that_is_not_there_is_named_with_those_that_are(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [train]\n")
    assert "--config-name=yours: there is no yours.yaml" in refusal(directory=tmp_path, name="yours")
    assert "Choose one of those there: mine" in refusal(directory=tmp_path, name="yours")
    assert "there is no train.yaml in" in refusal(directory=tmp_path / "nowhere")
    assert "yours" in refusal(name="yours")


def test_a_value_that_others_follow_is_refused_once() -> None:
    message = refusal("actor.precision=bf16", "trainer.device=gpu")
    assert message.count("is none of its values") == 2, "and not again for each role and engine"


def test_the_yaml_composes_to_what_it_is_of(tmp_path: Path) -> None:
    run = compose(RunConfig, "train", ["algorithm=dapo", "rollout.stop=['\n']"])
    (tmp_path / "again.yaml").write_text("defaults: [train_schema, _self_]\n" + as_yaml(run))
    assert compose(RunConfig, "train", [], tmp_path, "again") == run


def test_plain_values_hold_no_enums() -> None:
    values = as_dict(compose(RunConfig, "train", ["actor.precision=float32", "trainer.logger=[wandb]"]))
    assert values["actor"]["precision"] == "float32" and values["trainer"]["logger"] == ["wandb"]
    assert yaml.safe_load(yaml.safe_dump(values)) == values | {"actor": values["actor"]}


def test_one_item_is_a_list_of_it(whole_composing: None) -> None:
    written = ["data.train_files=x.parquet", "trainer.logger=console", "trainer.profile_steps=2"]
    run = compose(RunConfig, "train", written)
    assert run.data.train_files == ["x.parquet"] and run.trainer.logger == [Logger.console]
    assert run.trainer.profile_steps == [2] and set(run.written) == {each.partition("=")[0] for each in written}
    assert compose(RunConfig, "train", ["data.val_files='a b.parquet'"]).data.val_files == ["a b.parquet"]
    run = compose(RunConfig, "train", ["algorithm=gdpo", "algorithm.gdpo_reward_weights=null"])
    assert isinstance(run.algorithm, GdpoConfig) and run.algorithm.gdpo_reward_weights is None


@pytest.mark.parametrize(
    "override", ["x" * 5000 + "=1", "x" * 300 + "=1", "a." * 2000 + "b=1", "algorithm=" + "x" * 300]
)
def test_a_name_that_is_too_long_for_a_file_is_refused(override: str) -> None:
    with pytest.raises(ConfigError) as refused:
        compose(RunConfig, "train", [override])
    assert len(str(refused.value)) < 500
