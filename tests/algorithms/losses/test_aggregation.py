"""What a minibatch's sum is divided by; the sums themselves are held by the tests of ``policy`` and ``value``."""

from __future__ import annotations

import pytest
import torch

from mcore_rl.algorithms.advantages.ragged import sequence_counts
from mcore_rl.algorithms.losses.aggregation import loss_denominator, sum_token_losses
from mcore_rl.config.roles import LossAggregation
from tests.algorithms.loss_cases import drawn, whole

LENGTHS = (3, 2, 4, 1)
MASK_T = torch.tensor([0, 1, 1, 0, 0, 0, 1, 0, 1, 0], dtype=torch.bool)  # the second and the last train nothing


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        (LossAggregation.token_mean, 4.0),
        (LossAggregation.seq_mean_token_sum, 2.0),
        (LossAggregation.seq_mean_token_mean, 2.0),
        (LossAggregation.sum_over_constant, 2 * 50.0),
    ],
)
def test_sequences_without_a_trained_token_do_not_count(mode: LossAggregation, expected: float) -> None:
    assert loss_denominator(sequence_counts(MASK_T, LENGTHS), mode, 50.0) == expected
    assert loss_denominator(torch.zeros(len(LENGTHS)), mode, 50.0) == 0.0


def test_the_constant_is_needed() -> None:
    with pytest.raises(AssertionError, match="constant"):
        loss_denominator(sequence_counts(MASK_T, LENGTHS), LossAggregation.sum_over_constant)


@pytest.mark.parametrize("mode", list(LossAggregation))
def test_a_loss_of_1_everywhere_is_1_under_every_mean(mode: LossAggregation) -> None:
    batch = drawn(3)
    inputs = whole(batch)
    total = sum_token_losses(torch.ones(len(inputs.mask_N), dtype=torch.float64), inputs, mode)
    trained = float(batch.mask.sum())
    means = float(total) / loss_denominator(sequence_counts(batch.mask, batch.lengths), mode, trained)
    sequences = sum(bool(batch.mask[batch.sequence == index].any()) for index in range(len(batch.lengths)))
    expected = {
        LossAggregation.seq_mean_token_sum: trained / sequences,
        LossAggregation.sum_over_constant: 1 / sequences,
    }
    assert means == pytest.approx(expected.get(mode, 1.0))


@pytest.mark.parametrize("mode", list(LossAggregation))
def test_rows_that_are_not_trained_get_a_gradient_of_0(mode: LossAggregation) -> None:
    inputs = whole(drawn(3))
    loss_N = torch.ones(len(inputs.mask_N), requires_grad=True)
    sum_token_losses(loss_N, inputs, mode).backward()
    assert loss_N.grad is not None
    assert loss_N.grad[~inputs.mask_N].eq(0).all() and loss_N.grad[inputs.mask_N].gt(0).all()
