"""Who reads a key is held against numbers: an algorithm reads it if another value gives other numbers of a step."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_rl.algorithms.advantages.estimation import estimate, final_advantages
from mcore_rl.algorithms.correction import mean_weight
from mcore_rl.algorithms.kl import KlController
from mcore_rl.algorithms.policy import policy_loss as actor_loss
from mcore_rl.algorithms.process_rewards import LOGPROBS, REF_LOGPROBS, centred, stats_of, token_rewards
from mcore_rl.algorithms.selection import num_selected
from mcore_rl.algorithms.shaping import has_signal
from mcore_rl.algorithms.token_advantages import TEACHER_LOGPROBS, Outcomes, compute_advantages
from mcore_rl.algorithms.value import value_loss
from mcore_rl.config.algorithm import (
    CorrectionLevel,
    CorrectionMode,
    KlControl,
    KlPenalty,
    KlUnit,
    OffPolicy,
)
from mcore_rl.config.algorithm_registry import algorithms, policy_loss
from mcore_rl.config.algorithms.prime import ProcessNorm
from mcore_rl.config.names import has_key, value_at
from mcore_rl.config.run import RunConfig
from mcore_rl.ground.types import TrainBatch
from tests.algorithms.loss_cases import drawn, whole
from tools.configuration import as_condition, changed, named, readers, readers_text, run_with, runs

# Other values of each key that advantages, losses and gradients are computed with.  The others, which the controller,
# the engine or the optimizer reads, are in tests/config/test_unread_keys.py.
OTHER: dict[str, tuple[Any, ...]] = {
    "algorithm.gamma": (0.5,),
    "algorithm.lam": (0.4,),
    "algorithm.whiten_advantages": (True, False),
    "algorithm.kl_penalty": (KlPenalty.k2, KlPenalty.k3),
    "algorithm.kl_ctrl.type": (KlControl.adaptive,),
    "algorithm.kl_ctrl.kl_coef": (0.7,),
    "algorithm.kl_ctrl.target_kl": (9.0,),
    "algorithm.kl_ctrl.target_kl_per": (KlUnit.response,),
    "algorithm.kl_ctrl.horizon": (50,),
    "algorithm.off_policy": (OffPolicy.bypass, OffPolicy.decoupled),
    "algorithm.rollout_correction.level": (CorrectionLevel.sequence, CorrectionLevel.geometric),
    "algorithm.rollout_correction.mode": (CorrectionMode.zero,),
    "algorithm.rollout_correction.upper": (1.05,),
    "algorithm.rollout_correction.lower": (0.95,),
    "algorithm.rollout_correction.batch_normalize": (True, False),
    "algorithm.rollout_correction.reject_upper": (50.0,),
    "algorithm.rollout_correction.reject_lower": (0.001,),
    "algorithm.mask_truncated": (True, False),
    "algorithm.masked_in_baseline": (False, True),
    "algorithm.gdpo_reward_keys": (["format", "score"],),
    "algorithm.gdpo_reward_weights": ([3.0, 0.5],),
    "algorithm.pass_k": (2, 3),
    "algorithm.process_coef": (0.5,),
    "algorithm.outcome_coef": (0.5,),
    "algorithm.process_norm": (ProcessNorm.none,),
    "algorithm.sppo_eta": (1.0, 2.0),
    "actor.clip_ratio": (0.05,),
    "actor.clip_ratio_low": (0.07,),
    "actor.clip_ratio_high": (0.06,),
    "actor.clip_ratio_c": (1.3,),
    "actor.tau_pos": (3.0,),
    "actor.tau_neg": (3.0,),
    "actor.clip_cov_ratio": (0.3,),
    "actor.clip_cov_lb": (-3.0,),
    "actor.clip_cov_ub": (0.5,),
    "actor.kl_cov_ratio": (0.3,),
    "actor.ppo_kl_coef": (7.0,),
    "actor.entropy_coeff": (0.3,),
    "actor.preference.beta": (0.9,),
    "actor.preference.label_smoothing": (0.2,),
    "actor.preference.length_normalized": (True,),
    "actor.preference.sft_coef": (0.5,),
    "actor.kl_loss_coef": (0.9,),
    "actor.kl_loss_type": (KlPenalty.k2, KlPenalty.k3),
    "critic.cliprange_value": (0.01,),
}
reading = cache(readers)  # of all algorithms at once
LENGTHS = (6, 5, 7, 4, 6, 5)
GROUP_S = torch.tensor([0, 0, 0, 1, 1, 1])
SCORES = {name: torch.tensor(row) for name, row in (
    ("score", [1.0, 0.3, 0.0, 0.5, 0.1, 0.9]), ("acc", [1.0, 0, 0, 1, 0, 1]), ("format", [0.5, 1, 0, 1, 0.2, 0.1]),
)}  # fmt: skip


@cache
def batch() -> TrainBatch:
    """Three samples of each of two prompts, because two are normalized to the same whatever they are; log-probs far
    enough apart to meet every bound."""
    random, count = torch.Generator().manual_seed(0), sum(LENGTHS)

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(count, generator=random)

    old_T, mask_T = normal(1) - 2, torch.rand(count, generator=random) < 0.8
    mask_T[[sum(LENGTHS[:index]) for index in range(len(LENGTHS))]] = False
    return TrainBatch(
        lengths_S=LENGTHS,
        tokens_T=torch.arange(count),
        mask_T=mask_T,
        rollout_logprobs_T=old_T + normal(0.4),
        old_logprobs_T=old_T,
        ref_logprobs_T=old_T + normal(0.6),
        old_values_T=normal(1),
        extra_T={LOGPROBS: normal(1), REF_LOGPROBS: normal(1), TEACHER_LOGPROBS: normal(1)},
    )


def advantages(run: RunConfig, kl_coef: float) -> list[Tensor]:
    """What a step trains with: mask, advantages, returns, weights and old log-probs."""
    algorithm, step = run.algorithm, batch()
    keys = algorithm.reward_parts
    outcomes = Outcomes(
        scores_S=SCORES["score"],
        truncated_S=torch.tensor([True, False, False, False, False, False]),
        greedy_S=torch.tensor([0.25] * 3 + [0.75] * 3),
        parts_SK=torch.stack([SCORES[key] for key in keys], dim=1) if keys else None,
    )
    if "process_reward" in run.roles:
        there_S, beta = torch.ones(len(LENGTHS), dtype=torch.bool), 0.05
        rewards = centred(stats_of(step), GROUP_S, outcomes.scores_S, there_S, beta=beta, config=algorithm)
        outcomes = replace(outcomes, scores_S=rewards.outcomes_S, compared_S=rewards.compared_S)
        values = {"process_scales": rewards.scales_S, "process_shifts": rewards.shifts_S}
        step = replace(step, extra_T={**step.extra_T, **token_rewards(step, values, run)})
    tokens, stats = compute_advantages(step, outcomes, algorithm, kl_coef)
    of_step = estimate(
        GROUP_S, stats.scores_S, stats.counts_S, stats.advantages, algorithm,
        members_S=stats.members_S, parts_SK=outcomes.parts_SK,
    )  # fmt: skip
    final_T = None  # pairs have none
    if tokens.advantages_T is not None or of_step.advantages_S is not None:
        final_T = final_advantages(
            tokens.advantages_T, of_step.advantages_S, of_step.whitening, tokens.mask_T, list(LENGTHS),
            tokens.teacher_advantages_T,
        )  # fmt: skip
    returns_T = None if tokens.returns_T is None else tokens.returns_T * tokens.mask_T
    made = [tokens.mask_T, final_T, returns_T, tokens.old_logprobs_T]
    if tokens.weights_T is not None and stats.correction is not None:
        made.append(tokens.weights_T / mean_weight(stats.correction, algorithm.rollout_correction))
    return [each for each in made if each is not None]


def numbers(run: RunConfig) -> list[list[float]]:
    """Everything that the settings of an algorithm can change in two steps."""
    kl, minibatch = KlController(run.algorithm.kl_ctrl), drawn(1, lengths=(9, 6, 8, 5))
    if policy_loss(run.actor.loss_mode).pairs:
        minibatch = replace(minibatch, pairs=((0, 2),))
    made = advantages(run, kl.coef)
    kl.update(per_token=0.09, per_response=0.115, num_samples=5000)
    made += advantages(run, kl.coef)
    losses = [actor_loss(run.actor)] + ([value_loss(run.critic)] if "critic" in run.roles else [])
    for loss in losses:
        total = loss(whole(minibatch)).total
        made += [total.detach(), *minibatch.gradients(total)]
    if run.algorithm.filter_groups.enable:  # the trained response is better, or worse, than one that was cut off
        made += [torch.tensor(has_signal(scores, [False, True], run.algorithm)) for scores in ([1.0, 0.0], [0.0, 1.0])]
    selection = policy_loss(run.actor.loss_mode).selection
    if selection is not None:
        keys_M = selection.load()(torch.linspace(-4, 4, 9), torch.linspace(0, 1, 9), run.actor)
        made += [keys_M, torch.tensor(num_selected(run.actor, 1000))]
    return [each.double().flatten().tolist() for each in made]


def at(run: RunConfig, key: str) -> Any:
    return value_at(run, key)


@cache
def given(name: str, overrides: tuple[str, ...]) -> tuple[RunConfig, list[list[float]]]:
    """The algorithm with ``overrides`` and the bound that rejection requires, where that is on, and its numbers."""
    run = changed(run_with(name, *overrides), "algorithm.rollout_correction.reject_upper", 1.01)
    return run, numbers(run)


def matters(key: str, name: str, *overrides: str) -> bool:
    """Whether another value of ``key`` gives other numbers."""
    run, before = given(name, overrides)
    if not has_key(run, key):
        return False
    value = next(each for each in OTHER[key] if each != at(run, key))
    return numbers(changed(run, key, value)) != before


@pytest.mark.parametrize("name", list(algorithms()))
def test_an_algorithm_reads_what_changes_its_numbers(name: str) -> None:
    wrong = {key: reading(key).get(name) for key in OTHER if matters(key, name) != (reading(key).get(name) == ())}
    assert wrong == {}


@pytest.mark.parametrize("name", list(algorithms()))
def test_a_key_is_read_with_what_is_said_and_with_nothing_less(name: str) -> None:
    asked = {key: reading(key)[name] for key in OTHER if reading(key).get(name)}
    assert len(asked) > 5 or policy_loss(runs()[name].actor.loss_mode).pairs  # which refuse what the others may add
    unread = [key for key, needed in asked.items() if not matters(key, name, *needed)]
    needless = [
        (key, left_out)
        for key, needed in asked.items()
        for left_out in needed
        if matters(key, name, *(each for each in needed if each != left_out))
    ]
    assert (unread, needless) == ([], [])


def test_the_words_for_it() -> None:
    assert readers_text("data.train_batch_size") == "" and readers_text("actor.entropy_coeff") == ""
    assert readers_text("algorithm.gdpo_reward_keys") == "`gdpo`"
    assert readers_text("critic.optim.lr") == "`ppo`"
    assert readers_text("critic.shuffle") == "`ppo` with `critic.ppo_epochs=2`, say"
    pairs = "but `online_dpo`, `spin` with"
    assert readers_text("actor.kl_loss_coef").endswith(f"; the others {pairs} `actor.use_kl_loss=true`")
    lower = readers_text("algorithm.rollout_correction.lower")
    assert lower.startswith(f"all {pairs} `algorithm.off_policy=decoupled`")
    assert "gdpo" not in readers("algorithm.kl_penalty"), "it refuses a KL in the reward"
    assert readers("algorithm.masked_in_baseline")["remax"] == (
        "algorithm.mask_truncated=true", "algorithm.filter_groups.enable=true",
    ), "its baseline is no group's"  # fmt: skip
    weighs = as_condition("algorithm.off_policy=decoupled", "algorithm.rollout_correction.mode")
    assert weighs == "`algorithm.off_policy=decoupled`"
    assert named(["a", "b"], "abc", "all") == "all but `c`" and named(["a"], "abc", "all") == "`a`"
