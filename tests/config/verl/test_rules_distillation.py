"""verl's ``distillation`` is a teacher of ours where it is of drawn tokens, and else said not to be here."""

from __future__ import annotations

import pytest

from tests.config.verl.test_translate import translated

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
