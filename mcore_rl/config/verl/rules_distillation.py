"""The rule of verl's ``distillation``: on-policy distillation from a teacher, of tokens that the policy drew."""

from __future__ import annotations

from mcore_rl.config.verl.answer import Answer, Difference
from mcore_rl.config.verl.written import Verl

BASE = "distillation"
LOSS = f"{BASE}.distillation_loss"
TEACHER = f"{BASE}.teacher_models.teacher_model.model_path"
SAMPLED = ("k1", "kl")  # verl's names of log p_policy - log p_teacher


def distillation(verl: Verl, answer: Answer) -> None:
    """A teacher whose log-ratio is part of the advantages; verl's coefficient counts beside task rewards alone."""
    switch, mode, gradient, rewards, coef = (
        f"{BASE}.enabled", f"{LOSS}.loss_mode", f"{LOSS}.use_policy_gradient", f"{LOSS}.use_task_rewards",
        f"{LOSS}.distillation_loss_coef",
    )  # fmt: skip
    if not verl[switch]:
        return
    if str(verl[mode]) not in SAMPLED or not verl[gradient]:
        text = "a divergence as a loss of its own is not here: write loss_mode=k1 and use_policy_gradient=True"
        answer.tell(Difference.absent, switch, text)
        return
    answer.set("teacher.path", verl[TEACHER], TEACHER, switch)
    answer.set("algorithm.distill.coef", verl[coef] if verl[rewards] else 1.0, coef, rewards, switch)
    if not verl[rewards]:
        answer.set("algorithm.adv_estimator", "none", rewards, switch)
