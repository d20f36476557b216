"""Losses of reward models against formulas written for one pair of lists, whatever the batch is cut into."""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mcore_rl.algorithms.preference import LABEL, MARGIN, WEIGHT
from mcore_rl.algorithms.reward_loss import (
    STEP_LABEL_N,
    ScoresLoss,
    calibration_error,
    correlation,
    pair_calibration_error,
    scores_loss,
)
from mcore_rl.config.reward_training import RewardLoss, RewardLossConfig, TrainedRewardConfig
from mcore_rl.ground.types import LossInputs, LossSums
from tests.algorithms.loss_cases import (
    Minibatch,
    assert_connected_zero,
    assert_no_cut_changes,
    assert_untrained_rows_reach_nothing,
    drawn,
    whole,
)

SETTINGS: dict[str, RewardLossConfig] = {
    "bradley_terry": RewardLossConfig(),
    "centred": RewardLossConfig(centering_coef=0.3),
    "regression": RewardLossConfig(loss=RewardLoss.regression),
    "bce": RewardLossConfig(loss=RewardLoss.bce),
}


def batch_of(seed: int, lengths: Sequence[int] = (5, 9, 4, 7, 1, 6, 4, 8)) -> Minibatch:
    """Four pairs, apart from each other, each sequence trained at its last token, with margins, weights and labels.

    Sequence 4 is one token and sequence 7 is masked (neither has a score); the two of the pair (6, 2) are equal texts.
    """
    made = drawn(seed, lengths=lengths)
    random = torch.Generator().manual_seed(seed)
    ends = torch.tensor(lengths).cumsum(0) - 1
    mask = torch.zeros_like(made.mask)
    mask[ends[[index for index in range(len(lengths)) if index not in (4, 7)]]] = True
    values = made.fields["values"].detach().clone()
    values[ends[6]] = values[ends[2]]
    drawn_S = torch.rand(3, len(lengths), generator=random, dtype=torch.float64)
    label_S = (drawn_S[2] > 0.4).double()
    label_S[1] = drawn_S[2][1]  # an outcome that is not certain
    extra = {MARGIN: drawn_S[0], WEIGHT: 0.5 + drawn_S[1], LABEL: label_S}
    pairs = ((0, 3), (6, 2), (1, 4), (5, 7))
    return Minibatch(tuple(lengths), mask, {"values": values.requires_grad_()}, extra, pairs=pairs)


def sigma(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def scores_of(batch: Minibatch, values_T: Tensor) -> list[Tensor]:
    """The trained token's value of each sequence, 0 where there is none."""
    zero, scores = torch.zeros((), dtype=torch.float64), []
    for index in range(len(batch.lengths)):
        rows = ((batch.sequence == index) & batch.mask).nonzero().squeeze(1).tolist()
        scores.append(values_T[rows[0]] if rows else zero)
    return scores


def by_hand(batch: Minibatch, config: RewardLossConfig, values_T: Tensor | None = None) -> Tensor:
    """The sum of the losses, each as its paper writes it."""
    score = scores_of(batch, batch.fields["values"] if values_T is None else values_T)
    weight, label, total = batch.extra[WEIGHT], batch.extra[LABEL], torch.zeros((), dtype=torch.float64)
    if config.loss is RewardLoss.bradley_terry:
        assert batch.pairs is not None
        for w, l in batch.pairs:  # noqa: E741  as papers call them
            likelihood = sigma(score[w] - score[l] - batch.extra[MARGIN][w])
            mine = -torch.log(likelihood) + config.centering_coef * (score[w] + score[l]) ** 2
            total = total + mine * weight[w]
        return total
    for index, own in enumerate(score):
        y = float(label[index])
        if config.loss is RewardLoss.regression:
            mine = (own - y) ** 2
        else:
            mine = -(y * torch.log(sigma(own)) + (1 - y) * torch.log(1 - sigma(own)))
        total = total + mine * weight[index]
    return total


def loss_of(config: RewardLossConfig) -> ScoresLoss:
    """As a worker receives it."""
    received: ScoresLoss = pickle.loads(pickle.dumps(scores_loss(TrainedRewardConfig(reward=config))))
    return received


@pytest.mark.parametrize("name", SETTINGS)
def test_loss_and_gradient_are_those_of_the_paper(name: str) -> None:
    config = SETTINGS[name]
    assert loss_of(config).with_pairs == (config.loss is RewardLoss.bradley_terry)
    for seed in range(6):
        batch = batch_of(seed)
        sums, expected = loss_of(config)(whole(batch)), by_hand(batch, config)
        torch.testing.assert_close(sums.total, expected, atol=1e-12, rtol=1e-12)
        (mine_T,), (theirs_T,) = batch.gradients(sums.total), batch.gradients(expected)
        torch.testing.assert_close(mine_T, theirs_T, atol=1e-12, rtol=1e-12)
        assert mine_T[~batch.mask].eq(0).all() and mine_T[batch.mask].any()
        assert not any(value.requires_grad for value in sums.metrics.values())


@pytest.mark.parametrize("name", SETTINGS)
def test_gradient_is_that_of_central_differences(name: str) -> None:
    config, batch = SETTINGS[name], batch_of(3)
    (mine_T,) = batch.gradients(loss_of(config)(whole(batch)).total)
    values_T = batch.fields["values"].detach()
    for t in range(len(values_T)):
        step_T = torch.zeros_like(values_T).index_fill(0, torch.tensor(t), 1e-5)
        slope = float(by_hand(batch, config, values_T + step_T) - by_hand(batch, config, values_T - step_T)) / 2e-5
        assert float(mine_T[t]) == pytest.approx(slope, abs=1e-8, rel=1e-6)


def test_equal_texts_and_answers_without_a_token() -> None:
    """Equal texts: ``log 2`` and no gradient of their one text; an answer that is masked has the score 0."""
    plain = replace(batch_of(1), extra={})
    for pair in ((6, 2), (1, 4), (5, 7)):
        one = replace(plain, pairs=(pair,))
        total = loss_of(RewardLossConfig())(whole(one)).total
        scores = [float(each) for each in scores_of(one, one.fields["values"].detach())]
        expected = math.log(1 + math.exp(scores[pair[1]] - scores[pair[0]]))
        assert float(total.detach()) == pytest.approx(expected, rel=1e-12)
        (gradient_T,) = one.gradients(total)
        if pair == (6, 2):
            assert float(total.detach()) == pytest.approx(math.log(2), rel=1e-15)
            assert float(gradient_T.sum()) == 0 and gradient_T.any()
        else:
            assert scores[pair[1]] == 0


def test_metrics_are_sums_over_pairs_or_answers() -> None:
    batch = batch_of(2)
    scores = [float(each) for each in scores_of(batch, batch.fields["values"].detach())]
    metrics = {name: float(x) for name, x in loss_of(SETTINGS["centred"])(whole(batch)).metrics.items()}
    assert batch.pairs is not None and metrics.keys() == {"count", "chosen_score", "rejected_score", "accuracy"}
    assert metrics["count"] == pytest.approx(4)
    for place, side in enumerate(("chosen", "rejected")):
        assert metrics[f"{side}_score"] == pytest.approx(sum(scores[pair[place]] for pair in batch.pairs))
    right = sum(scores[w] > scores[r] for w, r in batch.pairs)
    assert metrics["accuracy"] == pytest.approx(right + 0.5) and 0 < right < 3  # equal texts count half
    of_answers = {name: float(x) for name, x in loss_of(SETTINGS["bce"])(whole(batch)).metrics.items()}
    labels = [float(y) - 0.5 for y in batch.extra[LABEL]]
    agree = [score * label for score, label in zip(scores, labels, strict=True)]
    expected = sum(each > 0 for each in agree) + 0.5 * sum(each == 0 for each in agree)
    assert of_answers == pytest.approx({"count": 8, "score": sum(scores), "accuracy": expected})
    assert "accuracy" not in loss_of(SETTINGS["regression"])(whole(batch)).metrics


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
def test_far_scores_stay_finite_in_float32(name: str) -> None:
    batch = batch_of(9)
    for far in (4e3, -4e3):
        values = torch.where(batch.sequence % 2 == 0, far, -far).float().requires_grad_()
        extra = {each: x.float() for each, x in batch.extra.items()}
        extreme = replace(batch, fields={"values": values}, extra=extra)
        sums = loss_of(SETTINGS[name])(whole(extreme))
        assert sums.total.dtype == torch.float32 and sums.total.isfinite()
        assert all(gradient.isfinite().all() for gradient in extreme.gradients(sums.total))


def steps_of(seed: int, lengths: Sequence[int] = (5, 9, 1, 7, 6)) -> Minibatch:
    """Answers of several steps, their labels as returns; one is a single token, and nothing of the last is trained."""
    made, random = drawn(seed, lengths=lengths), torch.Generator().manual_seed(seed)
    label_T = torch.rand(sum(lengths), generator=random, dtype=torch.float64)
    label_T = torch.where(label_T < 0.6, (label_T < 0.3).double(), label_T)
    weight_S = 0.5 + torch.rand(len(lengths), generator=random, dtype=torch.float64)
    return replace(made, fields={"values": made.fields["values"], "returns": label_T}, extra={WEIGHT: weight_S})


def steps_loss(inputs: LossInputs) -> LossSums:
    assert inputs.returns_N is not None
    return loss_of(SETTINGS["bce"])(replace(inputs, returns_N=None, extra_N={STEP_LABEL_N: inputs.returns_N}))


def steps_by_hand(batch: Minibatch, values_T: Tensor) -> Tensor:
    """The sum over steps of the papers' cross entropy, one step after another."""
    total = torch.zeros((), dtype=torch.float64)
    for t in batch.mask.nonzero().squeeze(1).tolist():
        y, p = float(batch.fields["returns"][t]), sigma(values_T[t])
        total = total - (y * torch.log(p) + (1 - y) * torch.log(1 - p)) * batch.extra[WEIGHT][batch.sequence[t]]
    return total


def test_each_step_is_trained_to_its_label() -> None:
    """Loss, gradient and metrics by hand, step by step; the gradient once more by central differences."""
    for seed in range(4):
        batch = steps_of(seed)
        values_T = batch.fields["values"]
        sums, expected = steps_loss(whole(batch)), steps_by_hand(batch, values_T)
        torch.testing.assert_close(sums.total, expected, atol=1e-12, rtol=1e-12)
        (mine_T,), (theirs_T,) = batch.gradients(sums.total), batch.gradients(expected)
        torch.testing.assert_close(mine_T, theirs_T, atol=1e-12, rtol=1e-12)
        assert mine_T[~batch.mask].eq(0).all() and mine_T[batch.mask].all()
        trained_T, label_T = values_T.detach()[batch.mask], batch.fields["returns"][batch.mask]
        assert {name: float(x) for name, x in sums.metrics.items()} == pytest.approx({
            "count": len(trained_T), "score": float(trained_T.sum()),
            "accuracy": float(((trained_T > 0) == (label_T > 0.5)).sum()),
        })  # fmt: skip
    for t in range(len(values_T)):
        step_T = torch.zeros(len(values_T), dtype=torch.float64).index_fill(0, torch.tensor(t), 1e-5)
        sides = [float(steps_by_hand(batch, values_T.detach() + sign * step_T)) for sign in (1, -1)]
        assert float(mine_T[t]) == pytest.approx((sides[0] - sides[1]) / 2e-5, abs=1e-8, rel=1e-6)


def test_steps_that_are_right_or_wrong_are_two_classes() -> None:
    """As TRL's PRMTrainer has it: the cross entropy of transformers' token classifier, whose first logit is 0 here."""
    batch = steps_of(5)
    hard_T = (batch.fields["returns"] > 0.5).double()
    values_T, label_T = batch.fields["values"], hard_T.long().masked_fill(~batch.mask, -100)
    logits_T2 = torch.stack([torch.zeros_like(values_T), values_T], dim=1)
    theirs = torch.nn.functional.cross_entropy(logits_T2, label_T, ignore_index=-100)
    own = replace(batch, fields=batch.fields | {"returns": hard_T}, extra={})
    sums = steps_loss(whole(own))
    torch.testing.assert_close(sums.total / sums.metrics["count"], theirs, atol=1e-12, rtol=1e-12)


def test_no_cut_and_no_untrained_row_changes_the_loss_of_steps() -> None:
    batch = steps_of(7)
    assert_no_cut_changes(steps_loss, batch, [[index] for index in range(len(batch.lengths))], 4)
    assert_connected_zero(steps_loss, batch, [])
    assert_connected_zero(steps_loss, batch, [2, 4])
    assert_untrained_rows_reach_nothing(steps_loss, batch)


def test_calibration_is_the_gap_within_bins() -> None:
    """By hand: of 0.05 twice one is so, of 0.95 and 1 both are, of 0.4 a half is."""
    probability_N = torch.tensor([0.05, 0.05, 0.95, 1.0, 0.4], dtype=torch.float64)
    outcome_N = torch.tensor([0.0, 1.0, 1.0, 1.0, 0.5], dtype=torch.float64)
    gaps = [2 * abs(0.05 - 0.5), 2 * abs(0.975 - 1), abs(0.4 - 0.5)]
    assert calibration_error(probability_N, outcome_N) == pytest.approx(sum(gaps) / 5)


def test_pairs_that_come_true_as_often_as_said_are_calibrated() -> None:
    """At a difference of log 3 the first answer is preferred in three of four; the order of a pair says nothing."""
    sure = torch.full((4,), math.log(3), dtype=torch.float64)
    as_said = torch.tensor([1.0, 1, 1, -1], dtype=torch.float64) * sure
    assert pair_calibration_error(as_said) == pytest.approx(0, abs=1e-15)
    assert pair_calibration_error(sure) == pytest.approx(0.25)
    assert pair_calibration_error(-sure) == pytest.approx(0.75)
    assert pair_calibration_error(torch.zeros(3, dtype=torch.float64)) == 0


def test_correlation_is_pearsons() -> None:
    drawn_N = torch.randn(2, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert correlation(*drawn_N) == pytest.approx(float(torch.corrcoef(drawn_N)[0, 1]))
    assert correlation(torch.ones(3), torch.arange(3.0)) == correlation(torch.arange(3.0), torch.ones(3)) == 0
