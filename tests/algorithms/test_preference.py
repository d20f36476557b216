"""Losses of preferences against formulas written for one pair of lists, whatever the pairs are cut into."""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mcore_rl.algorithms.preference import PreferencesLoss
from mcore_rl.config.preference import ROWS, PreferenceConfig, PreferenceLoss
from tests.algorithms.loss_cases import (
    Minibatch,
    assert_connected_zero,
    assert_no_cut_changes,
    assert_untrained_rows_reach_nothing,
    drawn,
    whole,
)

KL = 0.21
# Beside plain settings, everything that a loss reads at values at which it shows.
SETTINGS: dict[str, PreferenceConfig] = {
    "dpo": PreferenceConfig(),
    "cdpo": PreferenceConfig(beta=0.7, label_smoothing=0.2, sft_coef=0.3),
    "dpo_norm": PreferenceConfig(beta=5.0, length_normalized=True),
    "ipo": PreferenceConfig(loss=PreferenceLoss.ipo, beta=0.4, sft_coef=0.3),
    "ipo_norm": PreferenceConfig(loss=PreferenceLoss.ipo, length_normalized=True),
    "hinge": PreferenceConfig(loss=PreferenceLoss.hinge, beta=0.6, sft_coef=0.1),
    "hinge_norm": PreferenceConfig(loss=PreferenceLoss.hinge, beta=0.6, length_normalized=True),
    "simpo": PreferenceConfig(loss=PreferenceLoss.simpo),
    "simpo_smoothed": PreferenceConfig(
        loss=PreferenceLoss.simpo, beta=1.5, gamma=0.4, label_smoothing=0.1, sft_coef=0.2
    ),
    "orpo": PreferenceConfig(loss=PreferenceLoss.orpo),
    "orpo_alone": PreferenceConfig(loss=PreferenceLoss.orpo, beta=0.25, sft_coef=0.0),
    "kto": PreferenceConfig(loss=PreferenceLoss.kto),
    "kto_weighed": PreferenceConfig(
        loss=PreferenceLoss.kto, beta=0.5, desirable_weight=1.3, undesirable_weight=0.6
    ),
}  # fmt: skip


def batch_of(seed: int, lengths: Sequence[int] = (5, 9, 4, 7, 1, 6, 3, 8)) -> Minibatch:
    """Four pairs, apart from each other, with margins, weights and labels.

    Sequence 4 is one token (an empty response), of sequence 7 nothing is trained (a side that is masked), and the two
    of the pair (6, 2) have the same log-probs (equal texts), of different lengths and masks as they may.
    """
    made = drawn(seed, lengths=lengths)
    random = torch.Generator().manual_seed(seed)
    sequence, fields = made.sequence, {name: x.detach().clone() for name, x in made.fields.items()}
    six, two = (sequence == 6).nonzero()[:, 0], (sequence == 2).nonzero()[:, 0][: lengths[6]]
    mask = made.mask.clone()
    mask[sequence == 2] = False
    mask[two[1:]] = mask[six[1:]] = True
    for name in ("logprobs", "ref_logprobs"):
        fields[name] = fields[name].clamp(max=-0.05)
        fields[name][two] = fields[name][six]
    fields["logprobs"].requires_grad_()
    kept = {name: fields[name] for name in ("logprobs", "ref_logprobs")}
    drawn_S = torch.rand(3, len(lengths), generator=random, dtype=torch.float64)
    extra = {"margin_S": drawn_S[0], "weight_S": 0.5 + drawn_S[1], "label_S": (drawn_S[2] > 0.4).double()}
    return Minibatch(tuple(lengths), mask, kept, extra, pairs=((0, 3), (6, 2), (1, 4), (5, 7)))


def sigma(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def by_hand(batch: Minibatch, config: PreferenceConfig, logprobs_T: Tensor | None = None) -> Tensor:
    """The sum of the losses, each as its paper writes it."""
    logprobs_T = batch.fields["logprobs"] if logprobs_T is None else logprobs_T
    beta = ROWS[config.loss].beta if config.beta is None else config.beta
    total = torch.zeros((), dtype=torch.float64)
    sequence, mask = batch.sequence.tolist(), batch.mask.tolist()

    def of(index: int) -> tuple[Tensor, Tensor, int]:
        """(log p, log p_ref, length) of a response."""
        rows = [t for t, its in enumerate(sequence) if its == index and mask[t]]
        zero = torch.zeros((), dtype=torch.float64)
        own = sum((logprobs_T[t] for t in rows), zero)
        return own, sum((batch.fields["ref_logprobs"][t] for t in rows), zero), len(rows)

    if config.loss is PreferenceLoss.kto:
        for index in range(len(batch.lengths)):
            own, reference, _ = of(index)
            desirable = bool(batch.extra["label_S"][index])
            value = beta * (own - reference) - beta * KL
            weight = config.desirable_weight if desirable else config.undesirable_weight
            mine = weight * (1 - sigma(value if desirable else -value))
            total = total + mine * batch.extra["weight_S"][index]
        return total
    assert batch.pairs is not None
    for chosen, rejected in batch.pairs:
        (own_w, ref_w, n_w), (own_l, ref_l, n_l) = of(chosen), of(rejected)
        mean_w, mean_l = own_w / max(n_w, 1), own_l / max(n_l, 1)
        margin, smoothing = batch.extra["margin_S"][chosen], config.label_smoothing
        d_w, d_l = own_w - ref_w, own_l - ref_l
        if config.length_normalized:
            d_w, d_l = d_w / max(n_w, 1), d_l / max(n_l, 1)
        match config.loss:
            case PreferenceLoss.dpo:
                h = beta * (d_w - d_l) - margin
                mine = -(1 - smoothing) * torch.log(sigma(h)) - smoothing * torch.log(sigma(-h))
            case PreferenceLoss.ipo:
                mine = (d_w - d_l - 1 / (2 * beta)) ** 2
            case PreferenceLoss.hinge:
                short = 1 - (beta * (d_w - d_l) - margin)
                mine = short if short > 0 else 0 * short
            case PreferenceLoss.simpo:
                h = beta * mean_w - beta * mean_l - config.gamma - margin
                mine = -(1 - smoothing) * torch.log(sigma(h)) - smoothing * torch.log(sigma(-h))
            case PreferenceLoss.orpo:
                odds = []
                for mean, count in ((mean_w, n_w), (mean_l, n_l)):
                    p = torch.exp(mean) if count else torch.tensor(math.exp(-1e-6), dtype=torch.float64)
                    odds.append(p / (1 - p))
                mine = -beta * torch.log(sigma(torch.log(odds[0] / odds[1])))
        sft = config.sft_coef if config.sft_coef is not None else float(config.loss is PreferenceLoss.orpo)
        total = total + (mine - sft * mean_w) * batch.extra["weight_S"][chosen]
    return total


def loss_of(config: PreferenceConfig) -> PreferencesLoss:
    return pickle.loads(pickle.dumps(PreferencesLoss(config, KL)))


@pytest.mark.parametrize("name", SETTINGS)
def test_loss_and_gradient_are_those_of_the_paper(name: str) -> None:
    config = SETTINGS[name]
    for seed in range(6):
        batch = batch_of(seed)
        sums, expected = loss_of(config)(whole(batch)), by_hand(batch, config)
        # 1e-10: of odds of 1e6 (orpo's empty response), 1 - exp(x) loses six of sixteen digits by hand.
        torch.testing.assert_close(sums.total, expected, atol=1e-12, rtol=1e-10)
        (mine_T,), (theirs_T,) = batch.gradients(sums.total), batch.gradients(expected)
        torch.testing.assert_close(mine_T, theirs_T, atol=1e-12, rtol=1e-10)
        assert mine_T[~batch.mask].eq(0).all() and mine_T[batch.mask].any()
        assert not any(value.requires_grad for value in sums.metrics.values())


@pytest.mark.parametrize("name", SETTINGS)
def test_gradient_is_that_of_central_differences(name: str) -> None:
    config, batch = SETTINGS[name], batch_of(3)
    (mine_T,) = batch.gradients(loss_of(config)(whole(batch)).total)
    logprobs_T = batch.fields["logprobs"].detach()
    for t in range(len(logprobs_T)):
        step_T = torch.zeros_like(logprobs_T).index_fill(0, torch.tensor(t), 1e-5)
        slope = float(by_hand(batch, config, logprobs_T + step_T) - by_hand(batch, config, logprobs_T - step_T)) / 2e-5
        assert float(mine_T[t]) == pytest.approx(slope, abs=1e-7, rel=1e-6)


def test_equal_texts_an_empty_response_and_a_masked_side() -> None:
    """By hand at DPO's: ``log 2``, ``-log sigma(beta d_w)``, and the same; equal texts take no gradient together."""
    batch = batch_of(1)
    plain = replace(batch, extra={})
    for pair, other in (((6, 2), None), ((1, 4), 1), ((5, 7), 5)):
        one = replace(plain, pairs=(pair,))
        total = loss_of(PreferenceConfig())(whole(one)).total
        change = batch.fields["logprobs"].detach() - batch.fields["ref_logprobs"]
        d_w = 0.0 if other is None else float(change[batch.mask & (batch.sequence == other)].sum())
        assert float(total.detach()) == pytest.approx(math.log(1 + math.exp(-0.1 * d_w)), rel=1e-12)
        (gradient_T,) = one.gradients(total)
        if other is None:
            assert float(total.detach()) == pytest.approx(math.log(2), rel=1e-15)
            rows = [gradient_T[batch.mask & (batch.sequence == index)] for index in pair]
            assert torch.equal(rows[0], -rows[1]) and rows[0].any()


def test_metrics_are_sums_over_the_responses() -> None:
    batch, config = batch_of(2), SETTINGS["cdpo"]
    metrics = {name: float(x) for name, x in loss_of(config)(whole(batch)).metrics.items()}
    own = [float(batch.fields["logprobs"].detach()[batch.mask & (batch.sequence == s)].sum()) for s in range(8)]
    ref = [float(batch.fields["ref_logprobs"][batch.mask & (batch.sequence == s)].sum()) for s in range(8)]
    assert batch.pairs is not None
    for place, side in enumerate(("chosen", "rejected")):
        members = [pair[place] for pair in batch.pairs]
        assert metrics[f"{side}_logprob"] == pytest.approx(sum(own[s] for s in members))
        assert metrics[f"{side}_reward"] == pytest.approx(0.7 * sum(own[s] - ref[s] for s in members))
        assert metrics[f"{side}_count"] == pytest.approx(4)
    gains = [own[w] - ref[w] - (own[r] - ref[r]) for w, r in batch.pairs]
    assert gains[1] == 0
    assert metrics["accuracy"] == pytest.approx(sum(gain > 0 for gain in gains) + 0.5)
    of_kto = loss_of(SETTINGS["kto_weighed"])(whole(batch)).metrics
    desirable = [s for s in range(8) if batch.extra["label_S"][s]]
    assert float(of_kto["chosen_count"]) == pytest.approx(len(desirable)) and "accuracy" not in of_kto
    assert float(of_kto["rejected_count"]) == pytest.approx(8 - len(desirable))
    others = [s for s in range(8) if s not in desirable]
    assert float(of_kto["rejected_logprob"]) == pytest.approx(sum(own[s] for s in others))
    assert float(of_kto["chosen_reward"]) == pytest.approx(0.5 * sum(own[s] - ref[s] for s in desirable))


def test_mean_log_probs_are_the_rewards_without_a_reference() -> None:
    batch = batch_of(2)
    own = [batch.fields["logprobs"].detach()[batch.mask & (batch.sequence == s)] for s in range(8)]
    without = replace(batch, fields={"logprobs": batch.fields["logprobs"]})
    sums = loss_of(PreferenceConfig(loss=PreferenceLoss.simpo, beta=3.0))(whole(without))
    assert batch.pairs is not None
    expected = sum(3.0 * float(own[w].mean()) for w, _ in batch.pairs)
    assert float(sums.metrics["chosen_reward"]) == pytest.approx(expected)


@pytest.mark.parametrize("name", SETTINGS)
def test_no_cut_changes_the_sums(name: str) -> None:
    """Whole pairs into microbatches of any number, and every sequence over two context ranks, row by row."""
    batch = batch_of(7)
    assert batch.pairs is not None
    assert_no_cut_changes(loss_of(SETTINGS[name]), batch, batch.pairs, 4)


@pytest.mark.parametrize("name", SETTINGS)
def test_an_empty_microbatch_is_a_connected_zero(name: str) -> None:
    assert_connected_zero(loss_of(SETTINGS[name]), batch_of(7), [])


@pytest.mark.parametrize("name", SETTINGS)
def test_what_stands_at_untrained_rows_reaches_nothing(name: str) -> None:
    assert_untrained_rows_reach_nothing(loss_of(SETTINGS[name]), batch_of(8))


@pytest.mark.parametrize("name", SETTINGS)
def test_far_log_probs_stay_finite_in_float32(name: str) -> None:
    """Of a response of -4,000 nats against one of nearly 0, either way round."""
    batch = batch_of(9)
    for far in (500.0, -500.0):
        logprobs = torch.where(batch.sequence % 2 == 0, -1e-9, -abs(far)).float()
        ref = torch.where(batch.sequence % 2 == 0, -abs(far), -1e-9).float()
        pairs = batch.pairs if far > 0 else tuple((r, w) for w, r in batch.pairs or ())
        extreme = replace(
            batch, fields={"logprobs": logprobs.requires_grad_(), "ref_logprobs": ref}, pairs=pairs,
            extra={each: x.float() for each, x in batch.extra.items()},
        )  # fmt: skip
        sums = loss_of(SETTINGS[name])(whole(extreme))
        assert sums.total.dtype == torch.float32 and sums.total.isfinite()
        assert all(gradient.isfinite().all() for gradient in extreme.gradients(sums.total))
        assert all(value.isfinite() for value in sums.metrics.values())
