"""Every key of verl's yaml files, of every version that was recorded, has one row; and what rows name is there."""

from __future__ import annotations

from functools import cache

import pytest

from mcore_rl.config.evaluate import EvaluateConfig
from mcore_rl.config.generate import GenerateConfig
from mcore_rl.config.run import any_run_schema
from mcore_rl.config.sft import SftConfig
from mcore_rl.config.typed import all_keys
from mcore_rl.from_verl.facts import (
    CONFIGS,
    EARLY_SFT,
    EVALUATION,
    FSDP,
    GENERATION,
    MEGATRON,
    PROGRAM,
    SFT,
    defaults,
    keys_of,
    span,
    versions,
)
from mcore_rl.from_verl.row import KeyRow, absent, gone, to
from mcore_rl.from_verl.rules import PER_ROLE, RULES
from mcore_rl.from_verl.table import row_for, rows_for, rows_of

SCHEMAS = {"train": any_run_schema(), "sft": SftConfig, "generate": GenerateConfig, "evaluate": EvaluateConfig}


@cache
def ours(program: str) -> frozenset[str]:
    return frozenset(all_keys(SCHEMAS[program]))


@pytest.mark.parametrize("config", CONFIGS)
def test_every_key_of_verls_has_one_row(config: str) -> None:
    keys = keys_of(config)
    assert len(keys) > {MEGATRON: 900, FSDP: 800, GENERATION: 40, EVALUATION: 8, SFT: 200, EARLY_SFT: 70}[config]
    wrong = {key: [row.verl for row in rows_for(key, PROGRAM[config])] for key in keys}
    assert {key: rows for key, rows in wrong.items() if len(rows) != 1} == {}


@pytest.mark.parametrize("version", versions())
def test_both_generations_are_recorded(version: str) -> None:
    """Facts that were read in verl's repository at the tags of both generations."""
    keys = defaults(MEGATRON, version)
    late = versions().index(version) >= versions().index("0.6.0")
    assert keys["actor_rollout_ref.rollout.tensor_model_parallel_size"] == (2 if late else 1)
    assert ("ray_kwargs.ray_init.num_cpus" in keys) is late and ("ray_init.num_cpus" in keys) is not late
    assert keys.get("actor_rollout_ref.actor.optim.lr_decay_style") == {"0.4.0": None, "0.4.1": "linear"}.get(
        version, "constant"
    )


def test_where_keys_come_and_go() -> None:
    assert span("trainer.nnodes") == "" and span("trainer.profile_steps") == "0.4.1 to 0.5"
    assert span("ray_init.num_cpus") == "until 0.5" and span("trainer.use_v1") == "since 0.9"
    assert span("algorithm.rollout_is_mode") == "0.6 to 0.6" and span("no.such.key") == ""


@pytest.mark.parametrize("program", SCHEMAS)
def test_what_rows_name_is_there(program: str) -> None:
    rules = {*RULES, *PER_ROLE}
    for row in rows_of(program):
        assert set(row.ours) <= ours(program), row
        assert not row.rule or row.rule in rules, row
        assert bool(row.ours) or bool(row.note), f"{row.verl} says neither ours nor why"


def test_every_rule_is_asked_for() -> None:
    assert {row.rule for program in SCHEMAS for row in rows_of(program) if row.rule} == {*RULES, *PER_ROLE}


@pytest.mark.parametrize("program", SCHEMAS)
def test_no_row_is_about_nothing(program: str) -> None:
    """A row is about a key that was recorded, or about one that verl's scripts add."""
    keys = [key for config in CONFIGS if PROGRAM[config] == program for key in keys_of(config)]
    idle = [row.verl for row in rows_of(program) if not any(row.matches(key) for key in keys)]
    added = (
        "override_",
        "_kwargs",
        "overlong_buffer",
        "dpo_",
        "ref_update_freq",
        "chat_template",
        "mbridge_config",
        "model_engine",
        "ref.model",
        "async_training",
        "rollout.n",
        "rollout.{nnodes",
        "rollout.total",
        "ray_init",
        "policy_loss.tau",
        "standalone",
        "moe_tensor",
        "{optim,model}",
        "gradient_checkpointing",
        "use_remove_padding",
        "limit_images",
        "image_",
        "video_key",
        "multi_modal",
    )
    assert [verl for verl in idle if not any(each in verl for each in added)] == []


@pytest.mark.parametrize(
    ("verl", "key", "matches"),
    [
        ("a.b", "a.b", True),
        ("a.b", "a.bc", False),
        ("a.b", "a.b.c", False),
        ("a.{b,c-d}", "a.c-d", True),
        ("a.{b,c}", "a.d", False),
        ("a.{b,c}.*", "a.c.d.e", True),
        ("a.{b,c}.*", "a.c", False),
        ("a.m_*", "a.m_x", True),
        ("a.m_*", "a.m_x.y", False),
    ],
)
def test_patterns(verl: str, key: str, matches: bool) -> None:
    assert KeyRow(verl).matches(key) is matches
    assert gone(verl, "why").names == {"a.{b,c-d}": ["a.b", "a.c-d"]}.get(verl, gone(verl, "why").names)


def test_a_name_goes_before_a_pattern_and_a_narrow_one_before_a_wide_one() -> None:
    fields = "actor_rollout_ref.actor.megatron.override_transformer_config"
    rules = {name: getattr(row_for(f"{fields}.{name}"), "rule", None) for name in ("recompute_method", "some_field")}
    assert rules == {"recompute_method": "recompute", "some_field": "transformer_field"}
    caches = "actor_rollout_ref.rollout.engine_kwargs.vllm.{}".format
    assert row_for(caches("mm_processor_cache_gb")) == row_for(caches("disable_mm_preprocessor_cache"))
    assert row_for("actor_rollout_ref.rollout.no_such") is None


def test_kinds_of_rows() -> None:
    assert (to("a", "b").ours, gone("a", "why").absent, absent("a", "why").absent) == (("b",), False, True)
