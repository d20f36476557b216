"""verl's ``distillation`` is teachers of ours where it is of drawn tokens, and else said not to be here."""

from __future__ import annotations

import pytest

from mcore_rl.from_verl.answer import Difference
from tests.from_verl.test_translate import translated

DISTILLED = (
    "distillation.enabled=True", "distillation.distillation_loss.loss_mode=k1",
    "distillation.distillation_loss.use_policy_gradient=True",
    "distillation.distillation_loss.distillation_loss_coef=0.3",
    "distillation.teacher_models.teacher_model.model_path=/t",
    "distillation.teacher_models.teacher_model.inference.tensor_model_parallel_size=4",
)  # fmt: skip


def test_a_teacher_of_drawn_tokens_is_ours() -> None:
    """verl's coefficient counts beside task rewards alone (distillation_ppo_loss, 0.9)."""
    beside = translated("algorithm.adv_estimator=grpo", *DISTILLED)
    assert beside.is_whole and beside.run is not None and beside.run.teacher.path == "/t"
    assert (beside.run.algorithm.adv_estimator, beside.run.algorithm.distill.coef) == ("grpo", 0.3)
    alone = translated(
        "algorithm.adv_estimator=grpo", *DISTILLED, "distillation.distillation_loss.use_task_rewards=False"
    )
    assert alone.is_whole and alone.run is not None
    assert (alone.run.algorithm.adv_estimator, alone.run.algorithm.distill.coef) == ("none", 1.0)


@pytest.mark.parametrize(
    "other", ["loss_mode=k3", "loss_mode=forward_kl_topk", "use_policy_gradient=False", "loss_max_clamp=10"]
)
def test_a_loss_of_its_own_is_not_here(other: str) -> None:
    assert not translated(*DISTILLED, f"distillation.distillation_loss.{other}").is_whole


@pytest.mark.parametrize("mode", ["forward_kl_topk", "reverse_kl_topk", "jsd_topk", "k3", "abs"])
def test_a_loss_that_is_not_here_is_named(mode: str) -> None:
    entries = translated(*DISTILLED, f"distillation.distillation_loss.loss_mode={mode}").of_kind(Difference.absent)
    assert [each.text.split()[0] for each in entries] == [f"loss_mode={mode}"]


MODELS = "+distillation.teacher_models"
SEVERAL = (
    f"{MODELS}.t1.key=openai/gsm8k", f"{MODELS}.t1.model_path=/math", f"{MODELS}.t1.num_replicas=2",
    f"{MODELS}.t1.inference.tensor_model_parallel_size=2", f"{MODELS}.t2.key=code.x", f"{MODELS}.t2.model_path=/code",
)  # fmt: skip


def test_several_teachers_are_chosen_by_data_source() -> None:
    """verl drops ``teacher_model`` beside others (DistillationConfig._resolve_teacher_models, 0.9)."""
    translation = translated(
        "algorithm.adv_estimator=grpo", *DISTILLED, *SEVERAL, "distillation.teacher_key=data_source"
    )
    assert translation.is_whole and translation.run is not None
    assert translation.run.teacher.by_source == {"openai/gsm8k": "/math", "code.x": "/code"}
    assert translation.run.teacher.path is None
    one = translated("algorithm.adv_estimator=grpo", *DISTILLED[:4], *SEVERAL[:4])
    assert one.is_whole and one.run is not None and (one.run.teacher.path, one.run.teacher.by_source) == ("/math", {})


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("distillation.teacher_key=domain", "a row's teacher is that of its data_source"),
        (f"{MODELS}.t3.key=chat", "needs a key of its own and a model_path"),
        (f"{MODELS}.t2.key=openai/gsm8k", "needs a key of its own and a model_path"),
        (f"{MODELS}.t2.external.base_url=x", "a teacher has a key and a model_path"),
    ],
)
def test_teachers_that_are_not_ours_are_said(more: str, said: str) -> None:
    translation = translated(*DISTILLED, *SEVERAL, more)
    assert not translation.is_whole
    assert any(said in each.text for each in translation.of_kind(Difference.absent))
