"""The loss of pairs that a run draws: the mean over pairs, in float64 by hand, whatever a minibatch is cut into."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mcore_rl.algorithms.advantages.ragged import sequence_counts
from mcore_rl.algorithms.losses.aggregation import loss_denominator
from mcore_rl.algorithms.policy import ActorLoss, policy_loss
from mcore_rl.algorithms.preference import PreferencesLoss
from mcore_rl.algorithms.role_loss import UpdateSums
from mcore_rl.config.preference import PreferenceConfig, PreferenceLoss
from mcore_rl.config.roles import LossAggregation
from tests.algorithms import test_preference as offline
from tests.algorithms.loss_cases import (
    Minibatch,
    assert_connected_zero,
    assert_no_cut_changes,
    assert_untrained_rows_reach_nothing,
    drawn,
    whole,
)
from tests.support.settings import actor_config

SETTINGS = {name: config for name, config in offline.SETTINGS.items() if config.row.pairs}
NAMES = ("chosen_reward", "rejected_reward", "chosen_logprob", "rejected_logprob", "accuracy", "margin")


def actor(config: PreferenceConfig, entropy_coeff: float = 0.0) -> ActorLoss:
    made = policy_loss(
        actor_config(
            loss_mode="preference",
            loss_agg_mode=LossAggregation.seq_mean_token_sum,
            preference=config,
            entropy_coeff=entropy_coeff,
        )
    )
    return pickle.loads(pickle.dumps(made))


def batch_of(seed: int) -> Minibatch:
    """Three pairs apart from each other, and a response of which nothing is trained, as a prompt without a pair has.

    Sequence 2 trains one token; those of the pair (1, 5) are equal texts.
    """
    lengths = (5, 6, 2, 7, 9, 6, 4)
    made = drawn(seed, lengths=lengths)
    mask, sequence = made.mask.clone(), made.sequence
    first, fifth = (sequence == 1).nonzero()[:, 0], (sequence == 5).nonzero()[:, 0]
    mask[fifth] = mask[first]
    for index in range(6):
        rows = (sequence == index).nonzero()[:, 0]
        mask[rows[1]] = True
    fields = {name: x.detach().clone() for name, x in made.fields.items() if name in ("logprobs", "ref_logprobs")}
    for x in fields.values():
        x.clamp_(max=-0.05)[fifth] = x[first]
    fields["entropy"] = made.fields["entropy"].detach().clone()
    for name in ("logprobs", "entropy"):
        fields[name].requires_grad_()
    return Minibatch(lengths, mask, fields, pairs=((3, 0), (1, 5), (2, 4)))


def denominator(batch: Minibatch) -> float:
    return loss_denominator(sequence_counts(batch.mask, batch.lengths), LossAggregation.seq_mean_token_sum)


def by_hand(batch: Minibatch, config: PreferenceConfig, logprobs_T: Tensor | None = None) -> Tensor:
    """The mean over pairs of the papers' formulas."""
    ones = {"margin_S": torch.zeros(7).double(), "weight_S": torch.ones(7).double()}
    assert batch.pairs is not None
    return offline.by_hand(replace(batch, extra=ones), config, logprobs_T) / len(batch.pairs)


@pytest.mark.parametrize("name", SETTINGS)
def test_loss_and_gradient_are_the_mean_over_pairs(name: str) -> None:
    config = SETTINGS[name]
    for seed in range(6):
        batch = batch_of(seed)
        mean, expected = actor(config)(whole(batch)).total / denominator(batch), by_hand(batch, config)
        torch.testing.assert_close(mean, expected, atol=1e-12, rtol=1e-10)
        (mine_T, _), (theirs_T, _) = batch.gradients(mean), batch.gradients(expected)
        torch.testing.assert_close(mine_T, theirs_T, atol=1e-12, rtol=1e-10)
        assert mine_T[~batch.mask].eq(0).all() and mine_T[batch.mask].any()


@pytest.mark.parametrize("name", SETTINGS)
def test_gradient_is_that_of_central_differences(name: str) -> None:
    config, batch = SETTINGS[name], batch_of(3)
    mine_T, _ = batch.gradients(actor(config)(whole(batch)).total / denominator(batch))
    logprobs_T = batch.fields["logprobs"].detach()
    for t in range(len(logprobs_T)):
        step_T = torch.zeros_like(logprobs_T).index_fill(0, torch.tensor(t), 1e-5)
        slope = float(by_hand(batch, config, logprobs_T + step_T) - by_hand(batch, config, logprobs_T - step_T)) / 2e-5
        assert float(mine_T[t]) == pytest.approx(slope, abs=1e-7, rel=1e-6)


def test_it_is_the_loss_of_mcore_rl_prefer() -> None:
    """The same pairs by the offline trainer's loss, whose divisor is the number of pairs."""
    batch = batch_of(1)
    online, files = actor(PreferenceConfig())(whole(batch)), PreferencesLoss(PreferenceConfig())(whole(batch))
    torch.testing.assert_close(online.total / denominator(batch), files.total / 3, atol=1e-12, rtol=1e-12)
    assert denominator(batch) == 6, "a prompt without a pair counts in no divisor"
    of_pairs = {name.removeprefix("pairs/"): x for name, x in online.metrics.items() if name.startswith("pairs/")}
    assert of_pairs.keys() == files.metrics.keys()
    for name, value in files.metrics.items():
        torch.testing.assert_close(of_pairs[name], value, atol=1e-12, rtol=1e-12)


def test_at_the_reference_every_pair_has_log_2_and_equal_texts_no_gradient_together() -> None:
    batch = batch_of(2)
    fields = batch.fields | {"ref_logprobs": batch.fields["logprobs"].detach().clone()}
    same = replace(batch, fields=fields)
    sums = actor(PreferenceConfig())(whole(same))
    assert float(sums.total.detach()) / 6 == pytest.approx(math.log(2), rel=1e-12)
    gradient_T, _ = same.gradients(sums.total)
    first, fifth = (gradient_T[same.mask & (same.sequence == index)] for index in (1, 5))
    torch.testing.assert_close(first, -fifth)
    assert (gradient_T[same.mask & (same.sequence == 3)] < 0).all(), "descent makes the preferred one likelier"
    assert (gradient_T[same.mask & (same.sequence == 0)] > 0).all()


def test_metrics_of_a_step_are_means_over_the_pairs_of_all_minibatches() -> None:
    batches, loss = [batch_of(4), replace(batch_of(5), pairs=((3, 0),))], actor(PreferenceConfig(beta=0.7))
    sums = [{name: float(x) for name, x in loss(whole(each)).metrics.items()} for each in batches]
    metrics = loss.metrics(UpdateSums(sums, [int(each.mask.sum()) for each in batches]))
    rows = {name: [] for name in NAMES}
    for batch in batches:
        for pair in batch.pairs or ():
            own, ref = (
                [float(batch.fields[field].detach()[batch.mask & (batch.sequence == s)].sum()) for s in pair]
                for field in ("logprobs", "ref_logprobs")
            )
            gains = [0.7 * (x - y) for x, y in zip(own, ref, strict=True)]
            right = (gains[0] > gains[1]) + 0.5 * (gains[0] == gains[1])
            for name, value in zip(NAMES, (*gains, *own, right, gains[0] - gains[1]), strict=True):
                rows[name].append(value)
    for name, values in rows.items():
        assert len(values) == 4 and metrics[f"pairs/{name}"] == pytest.approx(sum(values) / 4), name


@pytest.mark.parametrize("name", SETTINGS)
def test_no_cut_changes_the_sums(name: str) -> None:
    """Whole pairs into microbatches of any number, the response alone among them; rows over two context ranks."""
    batch = batch_of(7)
    unlike_T = batch.fields["ref_logprobs"] - 0.1 * (batch.sequence == 5)  # no tie, which rounding would decide
    batch = replace(batch, fields=batch.fields | {"ref_logprobs": unlike_T})
    assert_no_cut_changes(actor(SETTINGS[name], entropy_coeff=0.3), batch, [*(batch.pairs or ()), (6,)], 4)


@pytest.mark.parametrize("members", [[], [6]])
def test_without_a_pair_it_is_a_connected_zero(members: list[int]) -> None:
    assert_connected_zero(actor(PreferenceConfig(), entropy_coeff=0.3), batch_of(7), members)


@pytest.mark.parametrize("name", SETTINGS)
def test_what_stands_at_untrained_rows_reaches_nothing(name: str) -> None:
    assert_untrained_rows_reach_nothing(actor(SETTINGS[name]), batch_of(8))


def test_a_loss_without_a_reference_reads_none() -> None:
    batch = batch_of(3).without("ref_logprobs")
    config = PreferenceConfig(loss=PreferenceLoss.simpo)
    torch.testing.assert_close(
        actor(config)(whole(batch)).total / 6, by_hand(batch_of(3), config, batch.fields["logprobs"])
    )
