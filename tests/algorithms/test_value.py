"""The critic's loss against one written token by token, and its independence of how a minibatch is cut."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
import torch

from mcore_rl.algorithms.advantages.ragged import sequence_counts
from mcore_rl.algorithms.losses.aggregation import loss_denominator
from mcore_rl.algorithms.value import explained_variance, value_loss
from mcore_rl.config.roles import CriticConfig, LossAggregation
from tests.algorithms.loss_cases import assert_same, drawn, over_context, over_microbatches, partitions, whole

ACTORS = ("logprobs", "entropy", "old_logprobs", "ref_logprobs", "advantages", "weights")


@pytest.mark.parametrize("limit", [0.0, 0.5])
@pytest.mark.parametrize("aggregation", list(LossAggregation))
def test_loss_gradient_and_metrics_are_those_of_the_formula(aggregation: LossAggregation, limit: float) -> None:
    batch = drawn(1, lengths=(2, 5, 1, 17, 30, 4)).without(*ACTORS)
    x = {name: field.tolist() for name, field in batch.fields.items()}
    total, gradient, clipped, trained, sequences = 0.0, [0.0] * len(batch.mask), 0, 0, 0
    for index in range(len(batch.lengths)):
        rows = ((batch.sequence == index) & batch.mask).nonzero().squeeze(1).tolist()
        trained, sequences = trained + len(rows), sequences + bool(rows)
        share = 1 / len(rows) if rows and aggregation is LossAggregation.seq_mean_token_mean else 1.0
        for t in rows:
            value, old, target = x["values"][t], x["old_values"][t], x["returns"][t]
            loss, slope = (value - target) ** 2 / 2, value - target
            if limit:
                held = min(max(value, old - limit), old + limit)
                if (held - target) ** 2 / 2 > loss:
                    loss, slope, clipped = (held - target) ** 2 / 2, 0.0, clipped + 1
            total, gradient[t] = total + share * loss, share * slope
    sums = value_loss(CriticConfig(loss_agg_mode=aggregation, cliprange_value=limit))(whole(batch))
    assert float(sums.total.detach()) == pytest.approx(total, rel=1e-12)
    assert batch.gradients(sums.total)[0].tolist() == pytest.approx(gradient, abs=1e-12)
    assert float(sums.metrics["critic/vf_clip_fraction"]) == clipped
    assert bool(clipped) == bool(limit)
    denominator = {LossAggregation.token_mean: trained, LossAggregation.sum_over_constant: 7.0 * sequences}
    assert loss_denominator(sequence_counts(batch.mask, batch.lengths), aggregation, 7.0) == denominator.get(
        aggregation, sequences
    )

    metrics = {name: float(value) for name, value in sums.metrics.items()}
    errors = (batch.fields["returns"] - batch.fields["values"].detach())[batch.mask]
    returns = batch.fields["returns"][batch.mask]
    expected = 1 - errors.var(correction=0) / returns.var(correction=0)
    assert explained_variance(metrics, trained) == pytest.approx(float(expected), rel=1e-12)
    assert metrics["critic/values"] == pytest.approx(float(batch.fields["values"].detach()[batch.mask].sum()))
    if aggregation in (LossAggregation.token_mean, LossAggregation.seq_mean_token_sum):
        assert metrics["critic/value_loss"] == pytest.approx(total)


@pytest.mark.parametrize("aggregation", list(LossAggregation))
def test_no_cut_changes_the_sums(aggregation: LossAggregation) -> None:
    loss, batch = value_loss(CriticConfig(loss_agg_mode=aggregation)), drawn(7).without(*ACTORS)
    reference = loss(whole(batch))
    for microbatches in partitions([2, 0, 3, 1]):
        assert_same(batch, over_microbatches(loss, batch, [*microbatches, []]), reference)
    for seed in range(3):
        assert_same(batch, over_context(loss, batch, seed), reference)


@pytest.mark.parametrize("members", [[], [3], [1, 3]])
def test_nothing_trained_is_a_connected_zero(members: list[int]) -> None:
    batch = drawn(7).without(*ACTORS)
    sums = value_loss(CriticConfig(loss_agg_mode=LossAggregation.seq_mean_token_mean))(whole(batch, members))
    assert float(sums.total.detach()) == 0 and sums.total.requires_grad
    assert not any(gradient.any() for gradient in batch.gradients(sums.total))
    assert not any(value.any() for value in sums.metrics.values())


def test_what_stands_at_untrained_rows_reaches_nothing() -> None:
    clean = drawn(8).without(*ACTORS)
    reference = value_loss(CriticConfig())(whole(clean))
    fields = {
        name: x.detach().masked_fill(~clean.mask, torch.inf).requires_grad_(x.requires_grad)
        for name, x in clean.fields.items()
    }
    broken = replace(clean, fields=fields)
    sums = value_loss(CriticConfig())(whole(broken))
    torch.testing.assert_close(sums.total, reference.total)
    torch.testing.assert_close(broken.gradients(sums.total), clean.gradients(reference.total))


def test_without_a_limit_old_values_are_not_needed() -> None:
    batch = drawn(9).without(*ACTORS, "old_values")
    assert value_loss(CriticConfig(cliprange_value=0.0))(whole(batch)).total.isfinite()
    with pytest.raises(AssertionError, match="old values"):
        value_loss(CriticConfig())(whole(batch))


def test_explained_variance_where_there_is_none() -> None:
    sums = {"critic/returns": 6.0, "critic/returns_squared": 12.0, "critic/errors": 1.0, "critic/errors_squared": 2.0}
    assert explained_variance(sums, 3) == 0.0  # all returns are 2
    assert explained_variance(dict.fromkeys(sums, 0.0), 0) == 0.0


def test_the_loss_travels_to_workers() -> None:
    loss = value_loss(CriticConfig())
    assert pickle.loads(pickle.dumps(loss)) == loss


def test_the_clip_fraction_does_not_count_rounding() -> None:
    """Within the limit the held value is the value up to rounding, by which its error is larger in half the cases."""
    batch = drawn(2, lengths=(400, 300), dtype=torch.float32).without(*ACTORS)
    near = (batch.fields["values"].detach() + 0.1 * torch.sin(torch.arange(700.0))).float()
    batch = replace(batch, fields=batch.fields | {"old_values": near})
    values, old, target = (batch.fields[name].detach() for name in ("values", "old_values", "returns"))
    held = old + (values - old).clamp(-0.5, 0.5)
    assert ((held - target).square() > (values - target).square())[batch.mask].any(), "else this proves nothing"
    sums = value_loss(CriticConfig(cliprange_value=0.5))(whole(batch))
    assert float(sums.metrics["critic/vf_clip_fraction"]) == 0
