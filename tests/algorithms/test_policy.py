"""The actor's loss against one written token by token, and its independence of how a minibatch is cut."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from mcore_rl.algorithms.advantages.ragged import sequence_counts
from mcore_rl.algorithms.losses.aggregation import loss_denominator
from mcore_rl.algorithms.policy import ActorLoss, policy_loss
from mcore_rl.algorithms.role_loss import UpdateSums
from mcore_rl.config.algorithm import DistillConfig, Divergence, KlPenalty
from mcore_rl.config.algorithm_registry import policy_losses
from mcore_rl.config.roles import ActorConfig, LossAggregation
from mcore_rl.ground.types import TAUGHT_BY
from mcore_rl.tracking.metrics import metric_of
from tests.algorithms.loss_cases import (
    Minibatch,
    assert_connected_zero,
    assert_same,
    assert_untrained_rows_reach_nothing,
    drawn,
    over_context,
    over_microbatches,
    partitions,
    whole,
)
from tests.support.settings import actor_config

LOW, HIGH, MOST, CONSTANT = 0.2, 0.3, 1.6, 11.0
TAU_POS, TAU_NEG, PAID = 1.1, 1.7, 0.6
SELECTING = ("clip_cov", "kl_cov")
WITHOUT_CLIPS = ("gpg", "policy_gradient", "sapo", "kl_cov", "sppo")
LOSSES = [name for name, row in policy_losses().items() if not row.pairs]  # the other: losses/test_preference.py
OF_SEQUENCES = ("gspo", "geo_mean", "sppo")
EVERYTHING = dict(entropy_coeff=0.3, use_kl_loss=True, kl_loss_coef=0.7)


def actor(mode: str, aggregation: LossAggregation = LossAggregation.token_mean, **changes: object) -> ActorConfig:
    return actor_config(
        loss_mode=mode,
        loss_agg_mode=aggregation,
        clip_ratio_low=LOW,
        clip_ratio_high=HIGH,
        clip_ratio_c=MOST,
        tau_pos=TAU_POS,
        tau_neg=TAU_NEG,
        ppo_kl_coef=PAID,
        **changes,
    )  # type: ignore[arg-type]


def clipped_change(moved: float, advantage: float) -> float:
    """``log r`` as GMPO clips it."""
    return min(moved, HIGH) if advantage > 0 else max(moved, -LOW)


def token_loss(mode: str, logprob: Tensor, old: float, advantage: float, mean_change: float, selected: bool) -> Tensor:
    """With an ``if`` for every case of the formulas."""
    if mode in ("gpg", "policy_gradient"):
        return -advantage * logprob
    ratio = torch.exp(logprob - old)
    if mode == "sapo":
        tau = TAU_POS if advantage > 0 else TAU_NEG
        return -advantage * 4 / tau / (1 + torch.exp(-tau * (ratio - 1)))
    if mode == "kl_cov":
        return -advantage * ratio + (PAID * abs(logprob - old) if selected else 0)
    if mode == "clip_cov" and selected:
        return logprob * 0
    if mode == "geo_mean":
        moved = float(logprob.detach()) - old
        cut = clipped_change(moved, advantage) != moved
        own = 1 if cut else torch.exp(logprob - logprob.detach())
        return -advantage * math.exp(mean_change) * own + logprob * 0
    if mode == "cispo":
        return -min(max(float(ratio.detach()), 1 - LOW), 1 + HIGH) * advantage * logprob
    if mode == "gspo":
        ratio = torch.exp(torch.tensor(mean_change, dtype=torch.float64)) * torch.exp(logprob - logprob.detach())
    if advantage >= 0:
        return -advantage * (ratio if ratio <= 1 + HIGH else ratio.detach() * 0 + 1 + HIGH)
    if mode == "ppo_clip" and ratio > MOST:
        return logprob * 0 - advantage * MOST
    return -advantage * (ratio if ratio >= 1 - LOW else ratio.detach() * 0 + 1 - LOW)


def kl_by_hand(kind: KlPenalty, logprob: Tensor, reference: float, full_kl: Tensor) -> Tensor:
    difference = logprob - reference
    return {
        KlPenalty.full: full_kl,
        KlPenalty.k1: difference,
        KlPenalty.k2: difference**2 / 2,
        KlPenalty.k3: torch.exp(-difference) - 1 + difference,
        KlPenalty.low_var_kl: torch.exp(-difference) - 1 + difference,
        KlPenalty.k1_plus: difference.detach() + difference**2 / 2 - (difference**2 / 2).detach(),
        KlPenalty.k3_plus: (torch.exp(-difference) - 1 + difference).detach()
        + difference**2 / 2
        - (difference**2 / 2).detach(),
    }[kind]


def by_hand(batch: Minibatch, config: ActorConfig) -> tuple[Tensor, dict[str, float], float]:
    """The loss (not a sum), the metric sums, and the denominator."""
    x, total, metrics = batch.fields, torch.zeros((), dtype=torch.float64), {}
    tokens = sequences = 0

    def count(**values: float | bool | Tensor) -> None:
        for name, value in values.items():
            metrics[f"actor/{name}"] = metrics.get(f"actor/{name}", 0.0) + float(
                torch.as_tensor(value, dtype=torch.float64).detach()
            )

    for index in range(len(batch.lengths)):
        rows = ((batch.sequence == index) & batch.mask).nonzero().squeeze(1).tolist()
        tokens, sequences = tokens + len(rows), sequences + bool(rows)
        change = [float(x["logprobs"][t].detach()) - float(x["old_logprobs"][t]) for t in rows]
        if config.loss_mode == "geo_mean":
            advantages = [float(x["advantages"][t]) for t in rows]
            change_of_ratio = [clipped_change(moved, a) for moved, a in zip(change, advantages, strict=True)]
        else:
            change_of_ratio = change
        mean_change = sum(change_of_ratio) / max(len(rows), 1)
        for t, moved in zip(rows, change, strict=True):
            advantage, logprob = float(x["advantages"][t]), x["logprobs"][t]
            selected = float(x["selection"][t]) >= 0
            if config.loss_mode == "sppo":
                error = sum(change) - sum(float(x["advantages"][row]) for row in rows) / len(rows)
                mine = error**2 / len(rows) + 2 * error * (logprob - logprob.detach())
            else:
                old = float(x["old_logprobs"][t])
                mine = token_loss(config.loss_mode, logprob, old, advantage, mean_change, selected)
            mine = mine * float(x["weights"][t])
            kl = kl_by_hand(config.kl_loss_type, logprob, float(x["ref_logprobs"][t]), x["full_kl"][t])
            ratio = torch.tensor(mean_change if config.loss_mode == "gspo" else moved).exp()
            low, high = ratio < 1 - LOW, ratio > 1 + HIGH
            if config.loss_mode == "geo_mean":
                low, high = moved < -LOW, moved > HIGH
            if config.loss_mode != "cispo":
                low, high = low and advantage < 0, high and advantage > 0
            if config.loss_mode not in WITHOUT_CLIPS:
                count(clip_fraction=low or high, clip_fraction_low=low, clip_fraction_high=high)
            if config.loss_mode == "ppo_clip":
                count(clip_fraction_dual=ratio > MOST and advantage < 0)
            if config.loss_mode in SELECTING:
                count(selected_fraction=selected)
            moved_ratio = torch.tensor(moved, dtype=torch.float64).exp()
            count(ratio=moved_ratio, approx_kl=moved_ratio - 1 - moved, approx_kl_k1=-moved)
            count(policy_loss=mine, entropy=x["entropy"][t], kl_loss=kl)
            mine = mine - config.entropy_coeff * x["entropy"][t] + config.kl_loss_coef * kl
            mean = config.loss_agg_mode is LossAggregation.seq_mean_token_mean
            total = total + (mine / len(rows) if mean else mine)
    denominator = {
        LossAggregation.token_mean: float(tokens),
        LossAggregation.seq_mean_token_sum: float(sequences),
        LossAggregation.seq_mean_token_mean: float(sequences),
        LossAggregation.sum_over_constant: sequences * CONSTANT,
    }[config.loss_agg_mode]
    return total / denominator, metrics, denominator


@pytest.mark.parametrize("aggregation", list(LossAggregation))
@pytest.mark.parametrize("mode", LOSSES)
def test_loss_gradient_and_metrics_are_those_of_the_formula(mode: str, aggregation: LossAggregation) -> None:
    met: dict[str, float] = {}
    for seed, kind in enumerate(KlPenalty):
        batch = drawn(seed, lengths=(2, 5, 1, 17, 30, 4))
        config = actor(mode, aggregation, **EVERYTHING, kl_loss_type=kind)
        expected, metrics, denominator = by_hand(batch, config)
        sums = policy_loss(config)(whole(batch))
        assert loss_denominator(sequence_counts(batch.mask, batch.lengths), aggregation, CONSTANT) == denominator
        torch.testing.assert_close(sums.total / denominator, expected, atol=1e-12, rtol=1e-12)
        gradients = batch.gradients(sums.total / denominator)
        for mine, theirs in zip(gradients, batch.gradients(expected), strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-12, rtol=1e-12)
        assert all(gradient[~batch.mask].eq(0).all() for gradient in gradients)
        assert {name: float(value) for name, value in sums.metrics.items()} == pytest.approx(metrics)
        changes = (batch.fields["logprobs"] - batch.fields["old_logprobs"]).detach()[batch.mask].tolist()
        extremes = {"actor/log_ratio_rise": max(changes), "actor/log_ratio_fall": -min(changes)}
        assert {name: float(value) for name, value in sums.maxima.items()} == extremes
        assert not any(value.requires_grad for value in (*sums.metrics.values(), *sums.maxima.values()))
        met = {name: met.get(name, 0) + value for name, value in metrics.items()}
    clips = [value for name, value in met.items() if "clip" in name]
    assert all(clips) or mode == "gspo"  # else the cases prove nothing; its means of many ratios clip elsewhere


TEACHER = DistillConfig(coef=0.3, divergence=Divergence.jensen_shannon)


@pytest.mark.parametrize("aggregation", list(LossAggregation))
def test_a_teacher_adds_its_divergence(aggregation: LossAggregation) -> None:
    """Token by token, aggregated like the rest, and not weighed: ``weights`` correct samples, and it has none."""
    batch = drawn(7, lengths=(2, 5, 1, 17))
    config = actor("ppo_clip", aggregation)
    alone, taught = (ActorLoss(config, teacher)(whole(batch)) for teacher in (None, TEACHER))
    expected = torch.zeros((), dtype=torch.float64)
    for index in range(len(batch.lengths)):
        of_one_N = batch.fields["divergence"][(batch.sequence == index) & batch.mask]
        mean = aggregation is LossAggregation.seq_mean_token_mean and len(of_one_N)
        expected = expected + TEACHER.coef * of_one_N.sum() / (len(of_one_N) if mean else 1)
    torch.testing.assert_close(taught.total - alone.total, expected)
    ours, theirs = (torch.autograd.grad(each, batch.fields["divergence"]) for each in (taught.total, expected))
    torch.testing.assert_close(ours, theirs)
    trained_N = batch.fields["divergence"].detach()[batch.mask]
    assert float(taught.metrics["distill/jensen_shannon"]) == pytest.approx(float(trained_N.sum()))
    assert float(taught.maxima["distill/jensen_shannon_max"]) == float(trained_N.max())
    assert taught.metrics.keys() - alone.metrics.keys() == {"distill/jensen_shannon"}


def test_a_teacher_s_metrics_are_of_all_minibatches() -> None:
    sums = UpdateSums(
        [{"distill/forward_kl": 3.0}, {"distill/forward_kl": 5.0}], [2, 2],
        [{"distill/forward_kl_max": 2.0}, {"distill/forward_kl_max": 4.0}],
    )  # fmt: skip
    metrics = ActorLoss(actor("ppo_clip"), DistillConfig(coef=1.0, divergence=Divergence.forward_kl)).metrics(sums)
    assert (metrics["distill/forward_kl"], metrics["distill/forward_kl_max"]) == (2.0, 4.0)


def test_several_teachers_have_means_of_their_own() -> None:
    """Of two minibatches; in the second the third name teaches no trained token, and the second none in either."""
    names, number_S = ("teacher.path", "idle", "openai/gsm8k"), torch.tensor([0.0, 2.0, 2.0, 0.0])
    batches = [replace(drawn(seed), extra={TAUGHT_BY: number_S}) for seed in (7, 8)]
    batches[1] = replace(batches[1], mask=batches[1].mask & (number_S[batches[1].sequence] == 0))
    loss = ActorLoss(actor("ppo_clip"), TEACHER, names)
    results, trained = [loss(whole(each)) for each in batches], [int(each.mask.sum()) for each in batches]
    sums = UpdateSums([{name: float(x) for name, x in each.metrics.items()} for each in results], trained)
    metrics, key = loss.metrics(sums), "distill/jensen_shannon"
    number_N = torch.cat([number_S[each.sequence][each.mask] for each in batches])
    divergence_N = torch.cat([each.fields["divergence"].detach()[each.mask] for each in batches])
    assert metrics[key] == pytest.approx(float(divergence_N.mean()))
    for number in (0, 2):
        assert metrics[f"{key}/{names[number]}"] == pytest.approx(float(divergence_N[number_N == number].mean()))
    assert {name for name in metrics if name.startswith("distill/")} == {key, f"{key}/{names[0]}", f"{key}/{names[2]}"}
    assert not any(name.startswith("taught") for name in metrics)
    assert_same(batches[0], over_context(loss, batches[0], 3), loss(whole(batches[0])))
    assert_same(batches[0], over_microbatches(loss, batches[0], [[0, 2], [], [1, 3]]), loss(whole(batches[0])))


def test_extremes_are_those_of_trained_tokens() -> None:
    """Where all of them became likelier, by 0.25 at least; without one there is no extreme."""
    batch = drawn(3)
    up_T = 0.25 + torch.arange(len(batch.mask)) / 8
    batch = replace(batch, fields=batch.fields | {"old_logprobs": batch.fields["logprobs"].detach() - up_T})
    loss, expected = policy_loss(actor("ppo_clip")), up_T[batch.mask]
    maxima = loss(whole(batch)).maxima
    assert float(maxima["actor/log_ratio_rise"]) == pytest.approx(float(expected.max()))
    assert float(maxima["actor/log_ratio_fall"]) == pytest.approx(-float(expected.min()))
    nothing = loss(whole(replace(batch, mask=torch.zeros_like(batch.mask)))).maxima
    assert all(value == -torch.inf for value in nothing.values())


def test_gspo_clips() -> None:
    batch = drawn(0, lengths=(3, 4, 2, 6, 4, 3, 4, 3))
    config = actor("gspo", **EVERYTHING)
    expected, metrics, denominator = by_hand(batch, config)
    sums = policy_loss(config)(whole(batch))
    assert metrics["actor/clip_fraction_low"] > 0 and metrics["actor/clip_fraction_high"] > 0
    assert float(sums.metrics["actor/clip_fraction_low"]) == metrics["actor/clip_fraction_low"]
    assert float(sums.metrics["actor/clip_fraction_high"]) == metrics["actor/clip_fraction_high"]
    torch.testing.assert_close(sums.total / denominator, expected)


def test_gspo_has_the_gradient_of_the_sequence_form() -> None:
    """Equation 5 of arXiv:2507.18071, differentiated as it stands, with one advantage a response."""
    batch = drawn(4, lengths=(5, 8, 3, 6, 2))
    fields = batch.fields | {
        "advantages": torch.tensor([1.0, -0.5, 2.0, -1.0, 0.0], dtype=torch.float64)[batch.sequence]
    }
    batch = replace(batch, fields=fields).without("weights")
    loss, sequences = torch.zeros((), dtype=torch.float64), 0
    for index in range(len(batch.lengths)):
        rows = (batch.sequence == index) & batch.mask
        if rows.any():
            ratio = (fields["logprobs"] - fields["old_logprobs"])[rows].mean().exp()
            advantage = fields["advantages"][rows][0]
            loss = loss - torch.minimum(ratio * advantage, ratio.clamp(1 - LOW, 1 + HIGH) * advantage)
            sequences += 1
    sums = policy_loss(actor("gspo", LossAggregation.seq_mean_token_mean))(whole(batch))
    torch.testing.assert_close(sums.total / sequences, loss / sequences)
    for mine, theirs in zip(batch.gradients(sums.total), batch.gradients(loss), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_sppo_has_value_and_gradient_of_the_sequence_form() -> None:
    """Equation 3.3 of arXiv:2405.00675, differentiated as it stands, and by central differences."""
    batch = drawn(4, lengths=(5, 8, 3, 6, 2))
    fields = batch.fields | {"advantages": torch.tensor([0.5, -0.5, 0.25, 0.0, 1.0]).double()[batch.sequence]}
    batch = replace(batch, fields=fields).without("weights")

    def squares(logprobs_T: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for index in range(len(batch.lengths)):
            rows = (batch.sequence == index) & batch.mask
            if rows.any():
                error = (logprobs_T - fields["old_logprobs"])[rows].sum() - fields["advantages"][rows][0]
                total = total + error**2
        return total

    sums = policy_loss(actor("sppo", LossAggregation.seq_mean_token_sum))(whole(batch))
    expected = squares(fields["logprobs"])
    torch.testing.assert_close(sums.total, expected)
    for mine, theirs in zip(batch.gradients(sums.total), batch.gradients(expected), strict=True):
        torch.testing.assert_close(mine, theirs)
    logprobs_T, mine_T = fields["logprobs"].detach(), batch.gradients(sums.total)[0]
    for t in range(len(logprobs_T)):
        step_T = torch.zeros_like(logprobs_T).index_fill(0, torch.tensor(t), 1e-4)
        slope = float(squares(logprobs_T + step_T) - squares(logprobs_T - step_T)) / 2e-4
        assert float(mine_T[t]) == pytest.approx(slope, abs=1e-7)


@pytest.mark.parametrize(("mode", "aggregation"), list(product(LOSSES, LossAggregation)))
def test_no_cut_changes_the_sums(mode: str, aggregation: LossAggregation) -> None:
    loss = policy_loss(actor(mode, aggregation, **EVERYTHING))
    batch = drawn(7)
    reference = loss(whole(batch))
    for microbatches in partitions([2, 0, 3, 1]):
        assert_same(batch, over_microbatches(loss, batch, [*microbatches, []]), reference)
    for seed in range(2):
        assert_same(batch, over_context(loss, batch, seed), reference)


@pytest.mark.parametrize(("mode", "aggregation"), list(product(LOSSES, LossAggregation)))
@pytest.mark.parametrize("members", [[], [3], [1, 3]])
def test_nothing_trained_is_a_connected_zero(mode: str, aggregation: LossAggregation, members: list[int]) -> None:
    assert_connected_zero(policy_loss(actor(mode, aggregation, **EVERYTHING)), drawn(7), members)


@pytest.mark.parametrize("mode", LOSSES)
@pytest.mark.parametrize("kind", list(KlPenalty))
def test_what_stands_at_untrained_rows_reaches_nothing(mode: str, kind: KlPenalty) -> None:
    config = actor(mode, LossAggregation.seq_mean_token_mean, **EVERYTHING, kl_loss_type=kind)
    assert_untrained_rows_reach_nothing(policy_loss(config), drawn(8))


@pytest.mark.parametrize("mode", LOSSES)
def test_at_the_old_policy_the_gradient_is_the_plain_policy_gradient(mode: str) -> None:
    batch = drawn(9)
    fields = batch.fields | {"old_logprobs": batch.fields["logprobs"].detach().clone()}
    fields["selection"] = torch.full_like(fields["selection"], -1.0)  # none: what else such a loss does is by choice
    batch = replace(batch, fields=fields)
    sums = policy_loss(actor(mode))(whole(batch))
    advantages_T = batch.fields["advantages"]
    if mode == "sppo":  # of the square of a response's log-ratio, which is 0: twice its mean advantage
        rows_S = [(batch.sequence == index) & batch.mask for index in range(len(batch.lengths))]
        means_S = torch.stack([advantages_T[rows].sum() / rows.sum().clamp(min=1) for rows in rows_S])
        advantages_T = 2 * means_S[batch.sequence]
    expected = -(advantages_T * batch.fields["weights"] * batch.mask)
    torch.testing.assert_close(batch.gradients(sums.total)[0], expected)
    assert float(sums.metrics["actor/ratio"]) == float(batch.mask.sum())
    assert float(sums.metrics["actor/approx_kl"]) == float(sums.metrics["actor/approx_kl_k1"]) == 0


@pytest.mark.parametrize("mode", [name for name, row in policy_losses().items() if row.needs_old])
def test_extreme_ratios_stay_finite_in_float32(mode: str) -> None:
    batch = drawn(10, dtype=torch.float32)
    far = torch.where(torch.arange(len(batch.mask)) % 2 == 0, 300.0, -300.0)
    batch = replace(batch, fields=batch.fields | {"old_logprobs": batch.fields["logprobs"].detach() + far})
    sums = policy_loss(actor(mode, LossAggregation.seq_mean_token_mean))(whole(batch))
    assert sums.total.dtype == torch.float32
    assert sums.total.isfinite() and all(gradient.isfinite().all() for gradient in batch.gradients(sums.total))
    assert all(value.isfinite() for value in sums.metrics.values())


@pytest.mark.parametrize("mode", LOSSES)
def test_what_a_loss_of_ours_reports_has_a_row_of_its_own(mode: str) -> None:
    loss = policy_loss(actor(mode, **EVERYTHING))
    sums = loss(whole(drawn(14)))
    told = {name: float(value) for name, value in sums.metrics.items()}
    maxima = {name: float(value) for name, value in sums.maxima.items()}
    for key in loss.metrics(UpdateSums(minibatches=[told], trained=[7], maxima=[maxima])):
        assert metric_of(key).key == key, "a family would hide a misspelling"


def test_what_a_loss_of_a_file_sums_is_reported_per_trained_token() -> None:
    sums = UpdateSums(minibatches=[{"actor/imitated": 6.0}, {"actor/imitated": 3.0}], trained=[2, 1])
    assert policy_loss(actor("gpg")).metrics(sums) == {"actor/imitated": 3.0}
    assert metric_of("actor/imitated").key == "actor/{metric}"


def test_what_is_absent_has_no_metric_and_no_part() -> None:
    batch = drawn(11).without("weights", "entropy", "ref_logprobs", "old_logprobs", "values")
    config = actor("policy_gradient")
    sums = policy_loss(config)(whole(batch))
    assert sums.metrics.keys() == {"actor/policy_loss"}
    expected = -(batch.fields["advantages"] * batch.fields["logprobs"])[batch.mask].sum()
    torch.testing.assert_close(sums.total, expected)
    for missing, loss in {
        "ratio needs old": actor("ppo_clip"),
        "bonus needs entropies": actor("gpg", entropy_coeff=0.1),
        "needs the reference": actor("gpg", use_kl_loss=True),
    }.items():
        with pytest.raises(AssertionError, match=missing):
            policy_loss(loss)(whole(batch))


def test_entropy_is_asked_for_where_it_earns_a_bonus() -> None:
    assert policy_loss(actor("gpg", entropy_coeff=0.1)).with_entropy
    assert not policy_loss(actor("gpg")).with_entropy


def test_the_loss_travels_to_workers() -> None:
    loss = policy_loss(actor("gspo", **EVERYTHING))
    travelled = pickle.loads(pickle.dumps(loss))
    assert travelled == loss
    batch = drawn(12)
    assert_same(batch, travelled(whole(batch)), loss(whole(batch)))


@pytest.mark.parametrize("mode", [mode for mode in LOSSES if mode not in WITHOUT_CLIPS])
def test_a_clip_fraction_does_not_count_rounding(mode: str) -> None:
    """The policy of before in other kernels, clip ranges of 0; and ratios that are the bounds themselves."""
    batch = drawn(13, lengths=(40, 50), dtype=torch.float32)
    logprobs = batch.fields["logprobs"].detach() - 9
    noise = 2e-6 * torch.randn(len(logprobs), generator=torch.Generator().manual_seed(1))
    for low, change in (
        (0.0, noise),
        (0.25, torch.tensor(0.75).log() + noise),
        (0.25, torch.tensor(1.25).log() + noise),
    ):
        if mode == "geo_mean":  # whose bounds are of the logarithm
            change = torch.where(change.abs() < 0.1, change, change.sign() * low)
        fields = batch.fields | {"logprobs": logprobs + change, "old_logprobs": logprobs}
        fields["selection"] = torch.full_like(logprobs, -1.0)
        config = actor_config(loss_mode=mode, clip_ratio=low, clip_ratio_c=3.0)
        measured = policy_loss(config)(whole(replace(batch, fields=fields))).metrics
        clips = {name: float(value) for name, value in measured.items() if "clip_fraction" in name}
        assert clips and not any(clips.values()), clips
        further = fields | {"logprobs": logprobs + change + change.sign() * 1e-3}
        clips = policy_loss(config)(whole(replace(batch, fields=further))).metrics
        assert float(clips["actor/clip_fraction"]) > 0, "what is further away is counted"


def test_without_a_dual_clip_a_ratio_has_no_bound_where_the_advantage_is_negative() -> None:
    batch = drawn(14, lengths=(30, 20))
    bounded = policy_loss(actor("ppo_clip"))
    config = replace(actor("ppo_clip"), clip_ratio_c=None)
    free = policy_loss(config)(whole(batch))
    assert "actor/clip_fraction_dual" not in free.metrics
    ratio = (batch.fields["logprobs"] - batch.fields["old_logprobs"]).exp()
    a, clipped = batch.fields["advantages"], ratio.clamp(1 - LOW, 1 + HIGH)
    expected = (torch.maximum(-a * ratio, -a * clipped) * batch.fields["weights"])[batch.mask].sum()
    torch.testing.assert_close(free.total, expected)
    assert float(bounded(whole(batch)).total.detach()) < float(free.total.detach())


def test_two_sided_clipping_is_the_dual_clip() -> None:
    """TRL's and INTELLECT-2's formula (arXiv:2505.07291, section 3.4), with delta for ``clip_ratio_c``."""
    batch = drawn(15, lengths=(30, 20))
    ratio = (batch.fields["logprobs"] - batch.fields["old_logprobs"]).exp()
    a = batch.fields["advantages"]
    expected = -torch.minimum(ratio.clamp(max=MOST) * a, ratio.clamp(1 - LOW, 1 + HIGH) * a)
    sums = policy_loss(actor("ppo_clip"))(whole(batch))
    assert float(sums.metrics["actor/clip_fraction_dual"]) > 0
    total = (expected * batch.fields["weights"])[batch.mask].sum()
    torch.testing.assert_close(sums.total, total)
    for mine, theirs in zip(batch.gradients(sums.total), batch.gradients(total), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_gmpo_has_the_gradient_of_the_sequence_form() -> None:
    """arXiv:2507.20673: the geometric mean of clipped ratios to the power of the advantage's sign, differentiated."""
    batch = drawn(4, lengths=(5, 8, 3, 6, 2))
    a = torch.tensor([1.0, -0.5, 2.0, -1.0, 0.0], dtype=torch.float64)
    batch = replace(batch, fields=batch.fields | {"advantages": a[batch.sequence]}).without("weights")
    loss, sequences = torch.zeros((), dtype=torch.float64), 0
    change = batch.fields["logprobs"] - batch.fields["old_logprobs"]
    for index, advantage in enumerate(a.tolist()):
        rows = (batch.sequence == index) & batch.mask
        if rows.any():
            sign, r = math.copysign(1.0, advantage), change[rows].exp()
            bounds = math.exp(-LOW), math.exp(HIGH)
            power = torch.minimum(r**sign, r.clamp(*bounds) ** sign).prod().abs()
            loss = loss - advantage * (power ** (1 / int(rows.sum()))) ** sign
            sequences += 1
    sums = policy_loss(actor("geo_mean", LossAggregation.seq_mean_token_mean))(whole(batch))
    assert float(sums.metrics["actor/clip_fraction_low"]) > 0 and float(sums.metrics["actor/clip_fraction_high"]) > 0
    torch.testing.assert_close(sums.total / sequences, loss / sequences)
    for mine, theirs in zip(batch.gradients(sums.total), batch.gradients(loss), strict=True):
        torch.testing.assert_close(mine, theirs)
