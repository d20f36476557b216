"""Settings of TRL's are told ours, and the page for people who come from TRL names every one of them."""

from __future__ import annotations

import re
from importlib import import_module

import pytest

from mcore_rl.config.compose import compose
from mcore_rl.config.run import RunConfig, any_run_schema
from mcore_rl.config.trl_names import OURS
from mcore_rl.config.typed import all_keys
from mcore_rl.ground.errors import ConfigError
from tests.house.source import ROOT
from tests.support.oracles import oracles

KEY = re.compile(r"\b(?:actor|algorithm|custom_reward_function|data|model|rollout|trainer)\.[a-z_.]+")


def test_each_remedy_names_keys_that_there_are() -> None:
    known = {*all_keys(any_run_schema())}
    named = {key for remedy in OURS.values() for key in KEY.findall(remedy)}
    assert len(named) > 25 and named <= known


def test_the_page_has_each_name() -> None:
    page = (ROOT / "docs" / "from_trl.md").read_text(encoding="utf-8")
    assert [name for name in OURS if f"`{name}`" not in page] == []


def test_the_command_line_says_it() -> None:
    with pytest.raises(
        ConfigError, match=r"learning_rate=1e-5: there is no such key\. TRL's learning_rate is here: actor"
    ):
        compose(RunConfig, "train", ["learning_rate=1e-5"])


@pytest.mark.tier("ci")
def test_they_are_names_of_trls() -> None:
    """Arguments of GRPOConfig, of GRPOTrainer, or a name of its published scripts."""
    with oracles("TRL"):
        config = import_module("trl").GRPOConfig
        trainer = import_module("inspect").signature(import_module("trl").GRPOTrainer)
    theirs = {*config.__dataclass_fields__, *trainer.parameters, "model_name"}
    gone = {"max_prompt_length", "warmup_ratio"}  # of older versions, which scripts still have
    assert {*OURS} - theirs <= gone
