"""verl's own functions against ours, on random ragged batches; skipped where verl is not installed.

It is no dependency: ``tools/set_up_oracles.sh`` puts it, and what it imports, beside the environment, of the versions
in ``tests/oracles.txt``.

Batches have holes in their masks, empty and masked responses and groups of one member.  ``KNOWN`` lists in what we
differ on purpose; a test that leaves something out of a comparison names the entry.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mcore_rl.algorithms.advantages.estimation import estimate_advantages
from mcore_rl.algorithms.advantages.ragged import sequence_counts
from mcore_rl.algorithms.correction import correct, correction_metrics, mean_weight
from mcore_rl.algorithms.kl import PENALTIES, KlController
from mcore_rl.algorithms.losses.aggregation import loss_denominator
from mcore_rl.algorithms.value import value_loss
from mcore_rl.config.algorithm import (
    CorrectionLevel,
    CorrectionMode,
    KlControl,
    KlControlConfig,
    KlPenalty,
    Rejection,
    RolloutCorrectionConfig,
)
from mcore_rl.config.roles import CriticConfig, LossAggregation
from tests.algorithms import cases, loss_cases
from tests.support.loss_parity import CONSTANT, NEAR, TIGHT, actor, minibatches, ours_and_theirs, rows_of
from tests.support.oracles import oracles
from tests.support.settings import algorithm_config

KNOWN = {
    "only members": "the only member of a group gets 0 here; verl passes its raw reward on, divided by 1",
    "empty responses": "a response without a token is no member of its group here; in verl it is one, of reward 0",
    "gpg's alpha": "the paper takes groups of equal scores out of the average; verl takes responses whose score is 0",
    "gdpo's whitening": "over responses, as in the paper and TRL; verl's is over tokens, less a mean over tokens",
    "k3_plus": "has the value of our k3, which is not clamped; verl's k3 is its low_var_kl, which is here, too",
    "gmpo's mean": "over sequences that are trained; verl's counts those that are masked, too",
    "gmpo's weights": "importance weights multiply tokens; verl multiplies a response by their geometric mean",
    "cov": "tokens are selected over the step, before its updates; verl selects in each microbatch",
    "ratios of k1": "bounds are of p_trainer / p_sampler; verl holds the inverse against them",
    "masked share": "the mean weight of mode=mask is over what is trained; verl has no such mode",
    "zeros alone": "where all weights are 0 they stay so; verl divides by 0 for its effective sample size",
    "ess": "of the ratio before truncation; verl's is of the weights after it",
    "horizon": "a batch counts as the horizon at most; verl's factor turns negative for one of 5 horizons",
}


@pytest.fixture(scope="module")
def core() -> Iterator[Any]:
    with oracles("verl"):
        yield import_module("verl.trainer.ppo.core_algos")


@pytest.fixture(scope="module")
def helper(core: Any) -> Any:
    return import_module("verl.trainer.ppo.rollout_corr_helper")


# ---- advantages: verl has one row a sequence, padded on the right


@dataclass(frozen=True)
class Padded:
    """A case as verl has it; groups of two or more members that all have tokens (``only members``, ``empty``)."""

    case: cases.Case
    rewards: Tensor
    mask: Tensor
    values: Tensor
    index: np.ndarray  # type: ignore[type-arg]

    def flat(self, x: Tensor) -> Tensor:
        """[S, longest] as [T]."""
        return torch.cat([row[:n] for row, n in zip(x, self.case.lengths, strict=True)])


def padded(case: cases.Case) -> Padded:
    def rows(x: Tensor) -> Tensor:
        return pad_sequence(list(x.split(list(case.lengths))), batch_first=True)

    inputs = case.inputs()
    assert inputs.values_T is not None
    mask = rows(inputs.mask_T.double())
    return Padded(case, rows(inputs.rewards_T), mask, rows(inputs.values_T) * mask, np.array(case.groups))


def steps(least: int = 2) -> Iterator[Padded]:
    """Random steps without the responses and groups that the two treat apart."""
    for seed in range(200, 320):
        case = cases.drawn(seed)
        full = [i for i, mask in enumerate(case.masks) if any(mask)]
        members = [case.groups[i] for i in full]
        kept = [i for i in full if members.count(case.groups[i]) >= least]
        if len(kept) > 2:
            chosen = {
                name: [getattr(case, name)[i] for i in kept]
                for name in ("masks", "rewards", "values", "groups", "greedy", "parts")
            }
            yield padded(cases.Case(**chosen))


def ours(step: Padded, estimator: str, **changes: Any) -> Any:
    config = algorithm_config(adv_estimator=estimator, gamma=0.9, lam=0.8, **changes)
    return estimate_advantages(step.case.inputs(), step.case.group_S, config, step.case.parts_SK())


GROUP_ESTIMATORS = [
    ("grpo", "grpo", {}),
    ("dr_grpo", "grpo", {"norm_adv_by_std_in_grpo": False}),
    ("rloo", "rloo", {}),
    ("rloo", "rloo_vectorized", {}),
    ("opo", "opo", {}),
    ("reinforce_plus_plus_baseline", "reinforce_plus_plus_baseline", {}),
]


@pytest.mark.parametrize(("estimator", "name", "changes"), GROUP_ESTIMATORS)
def test_group_advantages_are_verl_s(core: Any, estimator: str, name: str, changes: dict[str, Any]) -> None:
    for step in steps():
        arguments = dict(token_level_rewards=step.rewards, response_mask=step.mask, index=step.index, **changes)
        theirs, _ = core.get_adv_estimator_fn(name)(**arguments)
        torch.testing.assert_close(ours(step, estimator).advantages_T, step.flat(theirs), **NEAR)


def test_advantages_without_groups_are_verl_s(core: Any) -> None:
    for step in steps(least=1):
        config = SimpleNamespace(gamma=0.9)
        theirs, returns = core.compute_gae_advantage_return(step.rewards, step.values, step.mask, 0.9, 0.8)
        advantages = ours(step, "gae")
        torch.testing.assert_close(advantages.advantages_T, step.flat(theirs * step.mask), **NEAR)
        mask_T = step.flat(step.mask).bool()
        torch.testing.assert_close(advantages.returns_T[mask_T], step.flat(returns)[mask_T], **TIGHT)
        theirs, _ = core.compute_reinforce_plus_plus_outcome_advantage(step.rewards, step.mask, config=config)
        torch.testing.assert_close(ours(step, "reinforce_plus_plus").advantages_T, step.flat(theirs), **NEAR)
        greedy = torch.tensor(step.case.greedy, dtype=torch.float64)
        theirs, _ = core.compute_remax_outcome_advantage(step.rewards, greedy, step.mask)
        torch.testing.assert_close(ours(step, "remax").advantages_T, step.flat(theirs * step.mask), **TIGHT)


def test_gpg_s_alpha_is_the_paper_s(core: Any) -> None:
    """``gpg's alpha``: what is left of the difference is one factor for the whole step."""
    for step in steps():
        arguments = dict(token_level_rewards=step.rewards, response_mask=step.mask, index=step.index)
        theirs = step.flat(core.compute_gpg_outcome_advantage(**arguments)[0])
        mine = ours(step, "gpg").advantages_T
        if not mine.any():
            continue
        factor = float(theirs.abs().max() / mine.abs().max())
        torch.testing.assert_close(mine * factor, theirs, **TIGHT)


def test_gdpo_differs_from_verl_s_in_its_whitening_alone(core: Any) -> None:
    """``gdpo's whitening``: both are one straight line of the same sum of normalised parts."""
    for step in steps():
        total = torch.zeros_like(step.mask)
        for scores in step.case.parts_SK().unbind(1):
            rewards = torch.zeros_like(step.mask)
            rewards[:, 0] = scores
            arguments = dict(token_level_rewards=rewards, response_mask=step.mask, index=step.index)
            total = total + core.compute_grpo_outcome_advantage(**arguments)[0]
        mine, sums = ours(step, "gdpo").advantages_T, step.flat(total)
        of_response = torch.tensor([row.abs().max() * row.sum().sign() for row in total])
        torch.testing.assert_close(mine, sums / (of_response.std() + 1e-6), **NEAR)


def test_the_only_member_of_a_group_gets_nothing(core: Any) -> None:
    """``only members``: verl's is the raw reward."""
    case = cases.EDGES["only_one_member_groups"]
    step = padded(case)
    arguments = dict(token_level_rewards=step.rewards, response_mask=step.mask, index=step.index)
    theirs, _ = core.compute_grpo_outcome_advantage(**arguments)
    assert theirs.abs().max() > 0.9 and not ours(step, "grpo").advantages_T.any()


# ---- losses


AGGREGATIONS = {
    LossAggregation.token_mean: "token-mean",
    LossAggregation.seq_mean_token_sum: "seq-mean-token-sum",
    LossAggregation.seq_mean_token_mean: "seq-mean-token-mean",
    LossAggregation.sum_over_constant: "seq-mean-token-sum-norm",
}
LOSSES = {
    "ppo_clip": "vanilla",
    "gspo": "gspo",
    "cispo": "cispo",
    "gpg": "gpg",
    "sapo": "sapo",
    "geo_mean": "geo_mean",
}
SEQUENCES_ALONE = ("sapo", "geo_mean")  # verl's are of this aggregation whatever is asked for
LOSS_CASES = [
    (mode, aggregation)
    for mode in LOSSES
    for aggregation in LossAggregation
    if mode not in SEQUENCES_ALONE or aggregation is LossAggregation.seq_mean_token_mean
]


def verl_config(**policy: Any) -> Any:
    from verl.workers.config import ActorConfig as Theirs  # type: ignore[import-not-found]
    from verl.workers.config import PolicyLossConfig

    return Theirs(
        strategy="megatron", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio=0.2, clip_ratio_low=0.2,
        clip_ratio_high=0.3, clip_ratio_c=1.6, tau_pos=1.125, tau_neg=1.75, policy_loss=PolicyLossConfig(**policy),
    )  # fmt: skip


@pytest.mark.parametrize(("mode", "aggregation"), LOSS_CASES)
def test_losses_are_verl_s(core: Any, mode: str, aggregation: LossAggregation) -> None:
    for batch in minibatches():
        if mode == "geo_mean":  # gmpo's weights, gmpo's mean
            batch = batch.without("weights")
        theirs, _ = core.get_policy_loss_fn(LOSSES[mode])(
            old_log_prob=rows_of(batch, "old_logprobs"),
            log_prob=rows_of(batch, "logprobs"),
            advantages=rows_of(batch, "advantages"),
            response_mask=rows_of(batch, "mask"),
            loss_agg_mode=AGGREGATIONS[aggregation],
            config=verl_config(),
            rollout_is_weights=rows_of(batch, "weights") if "weights" in batch.fields else None,
        )
        if mode == "geo_mean":
            trained = int((sequence_counts(batch.mask, batch.lengths) > 0).sum())
            theirs = theirs * len(batch.lengths) / trained
        ours_and_theirs(batch, actor(mode, aggregation), theirs)


def test_kl_cov_is_verl_s_where_the_step_is_one_microbatch(core: Any) -> None:
    """``cov``: handed the selection that verl makes of the whole."""
    for batch in minibatches():
        theirs, _ = core.compute_policy_loss_kl_cov(
            old_log_prob=rows_of(batch, "old_logprobs"),
            log_prob=rows_of(batch, "logprobs"),
            advantages=rows_of(batch, "advantages"),
            response_mask=rows_of(batch, "mask"),
            config=verl_config(kl_cov_ratio=0.2, ppo_kl_coef=0.7),
        )
        a, p = batch.fields["advantages"][batch.mask], batch.fields["logprobs"].detach()[batch.mask]
        covariance = (a - a.mean()) * (p - p.mean())
        keys = torch.full((len(batch.mask),), -torch.inf, dtype=torch.float64)
        keys[batch.mask] = covariance - covariance.topk(max(1, int(0.2 * len(a)))).values[-1]
        batch = replace(batch, fields=batch.fields | {"selection": keys}).without("weights")
        ours_and_theirs(batch, actor("kl_cov", ppo_kl_coef=0.7), theirs)


def test_clip_cov_is_verl_s_where_all_candidates_are_selected(core: Any) -> None:
    """``cov``: verl's draw is of torch's generator; where the share is 1 both take all tokens between the bounds."""
    for batch in minibatches():
        theirs, _ = core.compute_policy_loss_clip_cov(
            old_log_prob=rows_of(batch, "old_logprobs"),
            log_prob=rows_of(batch, "logprobs"),
            advantages=rows_of(batch, "advantages"),
            response_mask=rows_of(batch, "mask"),
            config=verl_config(clip_cov_ratio=1.0, clip_cov_lb=0.1, clip_cov_ub=0.8),
        )
        a, p = batch.fields["advantages"], batch.fields["logprobs"].detach()
        covariance = (a - a[batch.mask].mean()) * (p - p[batch.mask].mean())
        ratio = (p - batch.fields["old_logprobs"]).exp()
        clipped = torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.3)) > -a * ratio
        keys = torch.where((0.1 < covariance) & (covariance < 0.8) & ~clipped, 0.0, -1.0).double()
        batch = replace(batch, fields=batch.fields | {"selection": keys}).without("weights")
        ours_and_theirs(batch, actor("clip_cov"), theirs)


@pytest.mark.parametrize("aggregation", list(LossAggregation))
def test_the_critic_s_loss_is_verl_s(core: Any, aggregation: LossAggregation) -> None:
    for batch in minibatches():
        theirs, _ = core.compute_value_loss(
            vpreds=rows_of(batch, "values"),
            returns=rows_of(batch, "returns"),
            values=rows_of(batch, "old_values"),
            response_mask=rows_of(batch, "mask"),
            cliprange_value=0.5,
            loss_agg_mode=AGGREGATIONS[aggregation],
        )
        counts_S = sequence_counts(batch.mask, batch.lengths)
        mine = value_loss(CriticConfig(loss_agg_mode=aggregation))(loss_cases.whole(batch)).total
        mine = mine / loss_denominator(counts_S, aggregation, CONSTANT)
        torch.testing.assert_close(mine, theirs, **NEAR)
        for one, other in zip(batch.gradients(mine), batch.gradients(theirs), strict=True):
            torch.testing.assert_close(one, other, **NEAR)


# ---- KL


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (KlPenalty.k1, "kl"),
        (KlPenalty.k2, "mse"),
        (KlPenalty.low_var_kl, "low_var_kl"),
        (KlPenalty.k1_plus, "k1+"),
        (KlPenalty.k3_plus, "k3+"),
    ],
)
def test_kl_estimates_are_verl_s(core: Any, kind: KlPenalty, name: str) -> None:
    """``k3_plus``: where verl's does not clamp."""
    draw = torch.Generator().manual_seed(1)
    reference = torch.randn(400, generator=draw, dtype=torch.float64) - 2
    scale = 0.7 if kind is KlPenalty.k3_plus else 8.0
    moved = (scale * torch.randn(400, generator=draw, dtype=torch.float64)).clamp(-2.5 if scale < 1 else -40, 40)
    logprobs = (reference + moved).requires_grad_()
    mine, theirs = PENALTIES[kind](logprobs, reference), core.kl_penalty(logprobs, reference, name)
    torch.testing.assert_close(mine, theirs, **TIGHT)
    gradients = [torch.autograd.grad(x.sum(), logprobs)[0] for x in (mine, theirs)]
    torch.testing.assert_close(*gradients, **TIGHT)


def test_the_adaptive_coefficient_is_verl_s(core: Any) -> None:
    """Fed as ``apply_kl_penalty`` (ray_trainer.py) feeds it.  ``horizon``: batches below it."""
    mine = KlController(KlControlConfig(type=KlControl.adaptive, kl_coef=0.1, target_kl=0.3, horizon=1000))
    theirs = core.get_kl_controller(SimpleNamespace(type="adaptive", kl_coef=0.1, target_kl=0.3, horizon=1000))
    for seed, batch in enumerate(minibatches()):
        mask, kl = rows_of(batch, "mask"), rows_of(batch, "logprobs").detach() - rows_of(batch, "ref_logprobs")
        kl = kl.abs() * mask * (0.2 if seed % 2 else 1.0)
        per_token = float((kl.sum(-1) / (mask.sum(-1) + 1e-8)).mean())
        theirs.update(current_kl=per_token, n_steps=64)
        mine.update(per_token=per_token, per_response=float(kl.sum(-1).mean()), num_samples=64)
        assert mine.coef == pytest.approx(theirs.value, rel=1e-12)
    assert mine.coef != 0.1


# ---- importance correction


def policies(step: Padded, seed: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    old = torch.randn(step.mask.shape, generator=draw, dtype=torch.float64) - 2
    return old, old + 0.5 * torch.randn(step.mask.shape, generator=draw, dtype=torch.float64)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("mode", "threshold"), [(CorrectionMode.truncate, 1.4), (CorrectionMode.zero, "0.6_1.4")])
@pytest.mark.parametrize("level", [CorrectionLevel.token, CorrectionLevel.sequence])  # verl has no other
def test_importance_weights_are_verl_s(
    helper: Any, level: CorrectionLevel, mode: CorrectionMode, threshold: Any, normalize: bool
) -> None:
    config = RolloutCorrectionConfig(level=level, mode=mode, upper=1.4, lower=0.6, batch_normalize=normalize)
    for seed, step in enumerate(steps(least=1)):
        old, rollout = policies(step, seed)
        trained = step.case.inputs().trained
        mine = correct(step.flat(old), step.flat(rollout), trained, step.case.lengths, config, weighs=True)
        assert mine.weights_T is not None and torch.equal(mine.mask_T, step.flat(step.mask).bool())
        if not mine.weights_T.any():  # zeros alone
            continue
        theirs, _ = helper.compute_rollout_correction_weights(
            old - rollout, step.mask, level.value, threshold, rollout_is_batch_normalize=normalize
        )
        weights_T = mine.weights_T / mean_weight(mine.sums, config)
        torch.testing.assert_close(weights_T, step.flat(theirs), **NEAR)


@pytest.mark.parametrize("reject", [each for each in Rejection if each is not Rejection.none])
def test_rejections_are_verl_s(helper: Any, reject: Rejection) -> None:
    """``ratios of k1``: handed the inverse of our bounds."""
    bound: Any = f"{1 / 1.3}_{1 / 0.9}" if reject.bounds_ratio else 0.2
    upper, lower = (1.3, 0.9) if reject.bounds_ratio else (0.2, None)
    config = RolloutCorrectionConfig(reject=reject, reject_upper=upper, reject_lower=lower)
    met: set[bool] = set()
    for seed, step in enumerate(steps(least=1)):
        old, rollout = policies(step, seed)
        theirs, _ = helper.compute_rollout_rejection_mask(old - rollout, step.mask, reject.value, bound)
        trained = step.case.inputs().trained
        mine = correct(step.flat(old), step.flat(rollout), trained, step.case.lengths, config, weighs=False)
        assert torch.equal(mine.mask_T, step.flat(theirs).bool())
        met |= set(mine.mask_T[step.flat(step.mask).bool()].tolist())
    assert met == {False, True}


def test_divergences_to_the_sampler_are_verl_s(helper: Any) -> None:
    for seed, step in enumerate(steps(least=1)):
        old, rollout = policies(step, seed)
        theirs = helper.compute_offpolicy_metrics(old, rollout, step.mask)
        trained, config = step.case.inputs().trained, RolloutCorrectionConfig()
        sums = correct(step.flat(old), step.flat(rollout), trained, step.case.lengths, config, weighs=False).sums
        mine = correction_metrics(sums, config, weighs=False)
        assert mine["rollout/kl_k1"] == pytest.approx(theirs["kl"], abs=1e-7)
        assert mine["rollout/kl"] == pytest.approx(theirs["k3_kl"], abs=1e-7)
