"""The loss of a process reward model against a formula for one response at a time, whatever the batch is cut into."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mcore_rl.algorithms.outcome_loss import OUTCOME, OutcomeLoss, outcome_loss
from mcore_rl.algorithms.role_loss import UpdateSums
from mcore_rl.config.algorithms.prime import ProcessRewardConfig
from mcore_rl.ground.types import LossInputs, LossSums
from tests.algorithms.loss_cases import (
    Minibatch,
    assert_connected_zero,
    assert_no_cut_changes,
    assert_untrained_rows_reach_nothing,
    drawn,
    whole,
)

BETA = 0.7
LENGTHS = (5, 9, 1, 7, 6, 4)
LOSS: OutcomeLoss = pickle.loads(pickle.dumps(outcome_loss(ProcessRewardConfig(beta=BETA))))


def loss(inputs: LossInputs) -> LossSums:
    """As an engine calls it: the reference's log-probs are a field of the table of roles."""
    assert inputs.ref_logprobs_N is not None
    return LOSS(replace(inputs, ref_logprobs_N=None, extra_N={"process_ref_logprobs_N": inputs.ref_logprobs_N}))


def batch_of(seed: int, outcomes: tuple[float, ...] = (1.0, 0.0, 1.0, 0.25, 0.0, 1.0)) -> Minibatch:
    """Six responses: sequence 2 is empty, of sequence 5 nothing is trained, the outcome of sequence 3 is a share."""
    made = drawn(seed, lengths=LENGTHS)
    kept = {name: made.fields[name] for name in ("logprobs", "ref_logprobs")}
    return Minibatch(LENGTHS, made.mask, kept, {OUTCOME: torch.tensor(outcomes, dtype=torch.float64)})


def by_hand(batch: Minibatch, logprobs_T: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    sequence, mask = batch.sequence.tolist(), batch.mask.tolist()
    for index in range(len(batch.lengths)):
        rows = [t for t, its in enumerate(sequence) if its == index and mask[t]]
        if not rows:
            continue
        reward = BETA * sum(logprobs_T[t] - batch.fields["ref_logprobs"][t] for t in rows)
        p, outcome = 1 / (1 + torch.exp(-reward)), batch.extra[OUTCOME][index]
        total = total - outcome * torch.log(p) - (1 - outcome) * torch.log(1 - p)
    return total


@pytest.mark.parametrize("seed", range(5))
def test_loss_and_gradient_are_those_of_the_paper(seed: int) -> None:
    batch = batch_of(seed)
    sums, expected = loss(whole(batch)), by_hand(batch, batch.fields["logprobs"])
    torch.testing.assert_close(sums.total, expected, atol=1e-12, rtol=1e-10)
    (mine_T,), (theirs_T,) = batch.gradients(sums.total), batch.gradients(expected)
    torch.testing.assert_close(mine_T, theirs_T, atol=1e-12, rtol=1e-9)
    assert mine_T[~batch.mask].eq(0).all() and mine_T[batch.mask].any()


def test_gradient_is_that_of_central_differences() -> None:
    batch = batch_of(3)
    (mine_T,) = batch.gradients(loss(whole(batch)).total)
    logprobs_T = batch.fields["logprobs"].detach()
    for t in range(len(logprobs_T)):
        step_T = torch.zeros_like(logprobs_T).index_fill(0, torch.tensor(t), 1e-5)
        slope = float(by_hand(batch, logprobs_T + step_T) - by_hand(batch, logprobs_T - step_T)) / 2e-5
        assert float(mine_T[t]) == pytest.approx(slope, abs=1e-7)


@pytest.mark.parametrize("outcome", [0.0, 1.0])
def test_all_right_or_all_wrong_draws_every_reward_one_way(outcome: float) -> None:
    batch = batch_of(4, (outcome,) * 6)
    (gradient_T,) = batch.gradients(loss(whole(batch)).total)
    assert (gradient_T[batch.mask] * (1 - 2 * outcome) > 0).all()


def test_at_the_reference_the_loss_is_log_2_and_nothing_is_told() -> None:
    batch = batch_of(5)
    same = {name: batch.fields["ref_logprobs"].detach().clone() for name in batch.fields}
    sums = loss(whole(replace(batch, fields=same)))
    assert float(sums.total) == pytest.approx(4 * math.log(2), rel=1e-12)
    assert float(sums.metrics["count"]) == 4
    assert float(sums.metrics["right"]) == 3, "a reward of 0 says wrong: of 1, 0, 0.25 and 0 it tells three"


def test_accuracy_is_of_responses() -> None:
    batch = batch_of(2)
    change_T = (batch.fields["logprobs"] - batch.fields["ref_logprobs"]).detach() * batch.mask
    rewards = [float(change_T[batch.sequence == index].sum()) for index in (0, 1, 3, 4)]
    told = [(reward > 0) is right for reward, right in zip(rewards, (True, False, False, False), strict=True)]
    assert 0 < sum(told) < 4
    metrics = {name: float(x) for name, x in loss(whole(batch)).metrics.items()}
    sums = UpdateSums([metrics, metrics], [17, 17])
    assert LOSS.metrics(sums) == {"process_reward/accuracy": pytest.approx(sum(told) / 4)}


def test_no_cut_changes_the_sums() -> None:
    assert_no_cut_changes(loss, batch_of(7), [(sequence,) for sequence in range(6)], 6)


def test_an_empty_microbatch_is_a_connected_zero() -> None:
    assert_connected_zero(loss, batch_of(7), [])


def test_what_stands_at_untrained_rows_reaches_nothing() -> None:
    assert_untrained_rows_reach_nothing(loss, batch_of(8))


def test_far_rewards_stay_finite_in_float32() -> None:
    batch = batch_of(9)
    far = torch.where(batch.sequence % 2 == 0, -1e-9, -4000.0).float()
    extreme = replace(
        batch,
        fields={"logprobs": far.clone().requires_grad_(), "ref_logprobs": far.flip(0)},
        extra={OUTCOME: batch.extra[OUTCOME].float()},
    )
    sums = loss(whole(extreme))
    assert sums.total.dtype == torch.float32 and sums.total.isfinite()
    assert all(gradient.isfinite().all() for gradient in extreme.gradients(sums.total))
