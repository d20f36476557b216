"""The escape hatch's tables against Megatron's dataclass: every field has one place, and every value the right type."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields
from typing import get_args, get_type_hints

import pytest
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend

from mcore_rl.config import megatron_fields, megatron_versions
from mcore_rl.config.compose import compose
from mcore_rl.config.megatron_fields import ALLOWED, REFUSED, TAKEN, megatron_violations
from mcore_rl.config.megatron_versions import absent_fields
from mcore_rl.config.run import RunConfig, run_violations

HINTS = get_type_hints(TransformerConfig)


def test_every_field_of_megatron_has_one_place() -> None:
    named = Counter([*ALLOWED, *(name for table in (TAKEN, REFUSED) for names in table.values() for name in names)])
    assert not [name for name, count in named.items() if count > 1]
    theirs = {field.name for field in fields(TransformerConfig)}
    assert named.keys() - theirs == absent_fields(), "Megatron has no such field"
    assert theirs - named.keys() == set(), "a field of Megatron has no place in the tables"


@pytest.mark.parametrize("name", [name for name in ALLOWED if name in HINTS])
def test_types_are_those_of_megatron_s_annotations(name: str) -> None:
    kind, hint = ALLOWED[name], HINTS[name]
    hints = [each for each in (get_args(hint) or (hint,)) if each is not type(None)]
    if isinstance(kind, type):
        assert [getattr(each, "__origin__", each) for each in hints] == [kind]
    elif name == "attention_backend":
        assert hint is AttnBackend and set(kind) == {each.name for each in AttnBackend}
    elif name == "cp_comm_type":
        assert str in hints  # its values are in the docstring alone
    else:
        assert kind == tuple(get_args(hints[0]))


def test_each_kind_of_mistake_is_said_with_its_remedy() -> None:
    wrong = {
        "tensor_model_parallel_size": 2,
        "hidden_size": 64,
        "hidden_dropout": 0.1,
        "activation_func": "gelu",
        "deallocate_pipeline_output": True,
        "moe_deepep_num_sms": True,
        "bias_dropout_fusion": 1,
        "attention_backend": "fast",
        "offload_modules": "attn",
    }
    said = {each.key: f"{each.problem}. {each.remedy}" for each in megatron_violations(wrong, "actor.megatron")}
    assert said.keys() == {f"actor.megatron.{name}" for name in wrong}
    for name, words in {
        "tensor_model_parallel_size": "actor.parallel.tp sets it. Leave it out, and write actor.parallel.tp",
        "hidden_size": "config.json says it",
        "activation_func": "config.json says it",
        "hidden_dropout": "makes log-probs random",
        "deallocate_pipeline_output": "has no such field. Write deallocate_pipeline_outputs, perhaps",
        "moe_deepep_num_sms": "must be a whole number",
        "bias_dropout_fusion": "must be true or false",
        "attention_backend": "must be one of flash, fused",
        "offload_modules": "must be a list",
    }.items():
        assert words in said[f"actor.megatron.{name}"], name
    assert not megatron_violations({"moe_deepep_num_sms": 24, "bias_dropout_fusion": True, "cp_comm_type": "a2a"})


@pytest.mark.parametrize(("version", "absent"), [("0.16.1", ["flash_attention_version"]), ("0.19.2", [])])
def test_what_the_installed_version_lacks_is_said_beside_all_else(
    version: str, absent: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (megatron_fields, megatron_versions):
        monkeypatch.setattr(module, "megatron_version", lambda: version)
    violations = megatron_violations({"flash_attention_version": 3, "hidden_dropout": 0.1})
    assert [each.key for each in violations] == [f"megatron.{name}" for name in ["hidden_dropout", *absent]]
    assert all(each.problem == f"megatron-core {version} has no such field" for each in violations[1:])


def composed(*more: str) -> RunConfig:
    more = more if any(each.startswith("algorithm=") for each in more) else ("algorithm=ppo", *more)
    settings = ["model.path=m", "data.train_files=[t]", "data.val_files=[v]", *more]
    return compose(RunConfig, "train", settings)


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_every_role_has_the_hatch(role: str) -> None:
    run = composed(f"{role}.megatron={{bias_dropout_fusion:true}}")
    assert run.role_config({each.name: each for each in run.role_rows}[role]).megatron == {"bias_dropout_fusion": True}
    (violation,) = run_violations(composed(f"{role}.megatron={{fp8:e4m3}}"))
    assert violation.key == f"{role}.megatron.fp8"
    (violation,) = run_violations(composed(f"{role}.megatron={{context_parallel_size:2}}"))
    assert f"write {role}.parallel.cp" in violation.remedy


@pytest.mark.parametrize("mark", ["", "+", "++"])
def test_a_single_field_may_be_written_too(mark: str) -> None:
    assert composed(f"{mark}actor.megatron.bias_dropout_fusion=true").actor.megatron == {"bias_dropout_fusion": True}


def test_a_field_of_a_role_that_the_run_has_not_is_refused() -> None:
    run = composed("algorithm=grpo", "critic.megatron.bias_dropout_fusion=true")
    (violation,) = run_violations(run)
    assert (violation.key, violation.value) == ("critic.megatron.bias_dropout_fusion", True)
    assert "there is no critic" in violation.problem
