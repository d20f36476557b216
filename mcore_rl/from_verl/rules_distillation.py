"""The rule of verl's ``distillation``: on-policy distillation from teachers, of tokens that the policy drew."""

from __future__ import annotations

from mcore_rl.from_verl.answer import Answer, Difference
from mcore_rl.from_verl.written import Verl

BASE = "distillation"
LOSS = f"{BASE}.distillation_loss"
MODELS = f"{BASE}.teacher_models"
ONE = "teacher_model"  # verl's name of the only teacher, which it drops where others are named
TEACHER, KEY = f"{MODELS}.{ONE}.model_path", f"{BASE}.teacher_key"
SAMPLED = ("k1", "kl")  # verl's names of log p_policy - log p_teacher
OF_LARGEST = ("forward_kl_topk", "reverse_kl_topk", "jsd_topk")  # over some tokens of the vocabulary


def distillation(verl: Verl, answer: Answer) -> None:
    """Teachers whose log-ratio is part of the advantages; verl's coefficient counts beside task rewards alone."""
    switch, mode, gradient, rewards, coef = (
        f"{BASE}.enabled", f"{LOSS}.loss_mode", f"{LOSS}.use_policy_gradient", f"{LOSS}.use_task_rewards",
        f"{LOSS}.distillation_loss_coef",
    )  # fmt: skip
    if not verl[switch]:
        return
    name = str(verl[mode])
    if name not in SAMPLED or not verl[gradient]:
        text = f"loss_mode={name} as a loss of its own, of drawn tokens, is not here"
        if name in OF_LARGEST:
            text = f"loss_mode={name} is over the topk largest log-probs, and algorithm.distill.divergence over all"
        elif name not in SAMPLED:
            text = f"loss_mode={name} is not here: of a drawn token the teacher's part is k1"
        answer.tell(Difference.absent, switch, f"{text}. Write loss_mode=k1 and use_policy_gradient=True")
        return
    _teachers(verl, answer, switch)
    answer.set("algorithm.distill.coef", verl[coef] if verl[rewards] else 1.0, coef, rewards, switch)
    if not verl[rewards]:
        answer.set("algorithm.adv_estimator", "none", rewards, switch)


def _teachers(verl: Verl, answer: Answer, switch: str) -> None:
    """The one teacher, or several by data source; where others are named verl drops ``ONE``."""
    written = [key for key in verl.written if key.startswith(f"{MODELS}.")]
    names = list(dict.fromkeys(key.removeprefix(f"{MODELS}.").partition(".")[0] for key in written))
    others = [name for name in names if name != ONE]
    if len(others) < 2:  # the only one teaches every row, whatever its key
        path = f"{MODELS}.{others[0]}.model_path" if others else TEACHER
        answer.set("teacher.path", verl[path], path, switch)
        return
    sources = [f"{MODELS}.{name}.{each}" for name in others for each in ("key", "model_path")]
    named = {verl[f"{MODELS}.{name}.key"]: verl[f"{MODELS}.{name}.model_path"] for name in others}
    if verl[KEY] != "data_source":
        answer.tell(Difference.absent, KEY, "a row's teacher is that of its data_source")
    if None in named or None in named.values() or len(named) < len(others):
        answer.tell(Difference.absent, switch, f"each of {MODELS} needs a key of its own and a model_path")
        return
    answer.set("teacher.by_source", {str(source): path for source, path in named.items()}, *sources, KEY, switch)
