"""The scale of adapters, and settings that contradict each other."""

from __future__ import annotations

import pytest

from mcore_rl.config.compose import compose
from mcore_rl.config.lora import LoraConfig, lora_violations
from mcore_rl.config.role import Role
from mcore_rl.config.roles import CriticConfig
from mcore_rl.config.run import RunConfig, run_violations
from mcore_rl.config.sft import ACTOR, SftConfig
from mcore_rl.ground.errors import Violation


def test_scale_is_that_of_the_papers() -> None:
    assert LoraConfig(rank=8, alpha=32.0).scale == 4.0
    assert LoraConfig(rank=16, alpha=32.0, use_rslora=True).scale == 8.0


@pytest.mark.parametrize(
    ("targets", "words"),
    [([], "adapts no layer"), (["all-linear", "q_proj"], "which is all of them")],
)
def test_targets_that_contradict_each_other(targets: list[str], words: str) -> None:
    (violation,) = lora_violations(LoraConfig(rank=8, target_modules=targets), "actor.lora.")
    assert violation.key == "actor.lora.target_modules" and words in str(violation)


def test_dropout_is_refused_with_the_reason() -> None:
    (violation,) = lora_violations(LoraConfig(rank=8, dropout=0.05), "actor.lora.")
    assert violation.key == "actor.lora.dropout" and "another policy" in str(violation) and "Write 0" in str(violation)


def _of(*overrides: str) -> list[Violation]:
    words = ("algorithm=ppo", "model.path=m", "data.train_files=[t]", "data.val_files=[v]", *overrides)
    return run_violations(compose(RunConfig, "train", words))


def test_keys_of_adapters_are_read_with_a_rank_alone() -> None:
    (violation,) = _of("actor.lora.alpha=32")
    assert violation.key == "actor.lora.alpha" and "there are no adapters" in str(violation)
    assert _of("actor.lora.alpha=32", "actor.lora.rank=8", "critic.lora.rank=4") == []


def test_engines_apply_adapters_by_default_where_they_can() -> None:
    """bfloat16 rounds most of a step's change away where weights are merged."""
    sound = ["model.path=m", "data.train_files=[t.parquet]", "data.val_files=[v.parquet]"]
    assert compose(RunConfig, "train", sound).rollout.lora.value == "auto"


def test_the_published_form_is_read_with_adapters_alone() -> None:
    (violation,) = _of("rollout.lora=adapter")
    assert violation.key == "rollout.lora" and "actor.lora.rank=32" in str(violation)
    assert _of("rollout.lora=adapter", "actor.lora.rank=8") == []


def test_sft_refuses_settings_of_adapters_that_there_are_none_of() -> None:
    words = ("model.path=m", "data.train_files=[t]", "actor.lora.path=.", "actor.lora.init=gaussian")
    said = compose(SftConfig, "sft", words).violations()
    assert {each.key for each in said} == {"actor.lora.path", "actor.lora.init"}
    assert all("there are no adapters" in str(each) for each in said)
    assert compose(SftConfig, "sft", (*words, "actor.lora.rank=8")).violations() == []


def test_shared_experts_that_overlap_leave_their_adapters_out() -> None:
    keys = [each.key for each in _of("actor.lora.rank=8", "+actor.megatron.moe_shared_expert_overlap=true")]
    assert keys == ["actor.megatron.moe_shared_expert_overlap"]
    assert _of("+actor.megatron.moe_shared_expert_overlap=true") == []
    (violation,) = _of("actor.lora.rank=8", "actor.optim.optimizer=muon")
    assert violation.key == "actor.optim.optimizer" and "Write adamw, or train all weights" in str(violation)
    assert _of("actor.optim.optimizer=muon") == []


def test_muon_refuses_layers_whose_cuts_it_does_not_know() -> None:
    (violation,) = _of("actor.optim.optimizer=muon", "actor.layer_spec=transformer_engine")
    assert violation.key == "actor.optim.optimizer" and "Write actor.layer_spec=auto or local" in str(violation)
    assert _of("actor.layer_spec=transformer_engine") == _of("actor.optim.optimizer=muon") == []


def test_every_trained_role_has_the_group() -> None:
    assert isinstance(ACTOR, Role) and SftConfig().actor.lora.rank == CriticConfig().lora.rank == 0
