"""Why prompts are not shared, each reason from one setting."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mcore_rl.config.compose import compose
from mcore_rl.config.engine import EngineConfig, SharePrompts, why_not_shared
from mcore_rl.config.parallel import ParallelConfig, parse_layout
from mcore_rl.config.prefer import PreferConfig
from mcore_rl.config.role_table import ROLES
from mcore_rl.config.run import RunConfig
from mcore_rl.ground.errors import ConfigError
from tests.support import models

SHARING = EngineConfig(microbatch_tokens=64, share_prompts=SharePrompts.auto)


def test_each_reason_alone() -> None:
    dense, plain = models.dense(), ParallelConfig()
    assert why_not_shared(SHARING, dense, parse_layout("tp=2,pp=2"), transformer_engine=False) is None
    assert why_not_shared(SHARING, models.deepseek_v3(), plain, transformer_engine=False) is None
    off = why_not_shared(replace(SHARING, share_prompts=SharePrompts.off), dense, plain, transformer_engine=False)
    unpacked = replace(SHARING, microbatch_tokens=None, microbatch_sequences=2)
    reasons = [
        off,
        why_not_shared(unpacked, dense, plain, transformer_engine=False),
        why_not_shared(SHARING, dense, parse_layout("cp=2"), transformer_engine=False),
        why_not_shared(SHARING, dense, plain, transformer_engine=True),
        why_not_shared(SHARING, models.qwen3_next(), plain, transformer_engine=False),
    ]
    words = ["off", "not packed", "cp=2", "Transformer Engine", "linear attention"]
    for reason, word in zip(reasons, words, strict=True):
        assert reason is not None and word in reason


def test_other_roles_share_as_the_actor_does() -> None:
    run = compose(RunConfig, "train", ["model.path=m", "algorithm=ppo", "actor.share_prompts=auto"])
    assert run.role_config(ROLES["critic"]).share_prompts is SharePrompts.auto
    run = compose(RunConfig, "train", ["model.path=m", "algorithm=ppo"])
    assert run.actor.share_prompts is run.role_config(ROLES["critic"]).share_prompts is SharePrompts.off


def test_what_learns_from_files_refuses_it() -> None:
    config = compose(PreferConfig, "prefer", ["model.path=m", "data.train_files=[f]", "actor.share_prompts=auto"])
    with pytest.raises(ConfigError, match="share_prompts"):
        raise ConfigError([each for each in config.violations(planned=True) if "share" in each.key])
