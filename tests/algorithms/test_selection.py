"""The keys by which tokens are selected, and the threshold over many ranks."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from mcore_rl.algorithms.selection import Moments, num_selected, select, threshold
from mcore_rl.algorithms.step_numbers import StepNumbers, finish
from mcore_rl.ground.types import TrainBatch
from tests.support.settings import actor_config

LENGTHS = (4, 3, 5)


def batch_of(seed: int) -> TrainBatch:
    draw = torch.Generator().manual_seed(seed)
    mask_T = torch.rand(12, generator=draw) < 0.8
    mask_T[[0, 4, 7]] = False
    return TrainBatch(
        lengths_S=LENGTHS,
        tokens_T=torch.arange(12),
        mask_T=mask_T,
        old_logprobs_T=torch.randn(12, generator=draw).masked_fill(~mask_T, math.nan),
        advantages_T=torch.randn(12, generator=draw),
    )


def test_the_keys_of_kl_cov_are_the_covariances() -> None:
    batch = batch_of(1)
    moments = Moments(advantage=0.25, logprob=-0.5, num_selected=3, seed=1)
    keys_T, largest = select(batch, [0, 1, 2], actor_config(loss_mode="kl_cov"), moments)
    assert batch.advantages_T is not None and batch.old_logprobs_T is not None
    expected = [
        (a - 0.25) * (p + 0.5) if kept else -math.inf
        for a, p, kept in zip(
            batch.advantages_T.tolist(), batch.old_logprobs_T.tolist(), batch.mask_T.tolist(), strict=True
        )
    ]
    assert keys_T.tolist() == pytest.approx(expected, rel=1e-6)
    assert largest.tolist() == pytest.approx(sorted(expected, reverse=True)[:3], rel=1e-6)


def test_the_draws_of_clip_cov_are_of_the_place_in_the_step_alone() -> None:
    batch, config = batch_of(2), actor_config(loss_mode="clip_cov", clip_cov_lb=-1e9, clip_cov_ub=1e9)
    moments = Moments(advantage=0.0, logprob=0.0, num_selected=99, seed=1)
    keys_T, _ = select(batch, [7, 8, 9], config, moments)
    turned_T, _ = select(batch.select([2, 0, 1]), [9, 7, 8], config, moments)
    parts = torch.split(keys_T, list(LENGTHS))
    assert torch.equal(turned_T, torch.cat([parts[2], parts[0], parts[1]]))
    for index, seed in (([7, 8, 6], 1), ([7, 8, 9], 2)):
        other = Moments(advantage=0.0, logprob=0.0, num_selected=99, seed=seed)
        assert not torch.equal(select(batch, index, config, other)[0], keys_T)
    draws = keys_T[batch.mask_T]
    assert len(set(draws.tolist())) == len(draws) and bool(((draws >= 0) & (draws < 1)).all())


def test_the_bounds_of_clip_cov_leave_candidates_out() -> None:
    batch = batch_of(3)
    moments = Moments(advantage=0.0, logprob=0.0, num_selected=99, seed=1)
    keys_T, largest = select(batch, [0, 1, 2], actor_config(loss_mode="clip_cov", clip_cov_lb=0.3), moments)
    assert batch.advantages_T is not None and batch.old_logprobs_T is not None
    covariance_T = batch.advantages_T * batch.old_logprobs_T
    candidate_T = batch.mask_T & (covariance_T > 0.3) & (covariance_T < 5)
    assert torch.equal(keys_T > -math.inf, candidate_T) and 0 < len(largest) == int(candidate_T.sum())


@pytest.mark.parametrize(("count", "expected"), [(1, 9.0), (3, 7.0), (4, 7.0), (99, 1.0)])
def test_the_threshold_is_that_of_all_ranks_together(count: int, expected: float) -> None:
    ranks = [np.array([9.0, 1.0], np.float32), np.array([], np.float32), np.array([8.0, 7.0, 7.0], np.float32)]
    least = threshold(ranks, count)
    assert least == expected
    keys_T = torch.tensor([9.0, 1.0, 8.0, 7.0, 7.0, -math.inf])
    batch = TrainBatch(
        lengths_S=(6,), tokens_T=torch.arange(6), mask_T=torch.zeros(6, dtype=torch.bool), selection_T=keys_T
    )
    selection_T = finish(batch, None, StepNumbers(threshold=least)).selection_T
    assert selection_T is not None
    assert torch.equal(selection_T >= 0, keys_T >= expected)


def test_without_a_candidate_nothing_is_selected() -> None:
    least = threshold([np.array([], np.float32)], 5)
    mask_T, keys_T = torch.zeros(2, dtype=torch.bool), torch.full((2,), -math.inf)
    batch = TrainBatch(lengths_S=(2,), tokens_T=torch.arange(2), mask_T=mask_T, selection_T=keys_T)
    selection_T = finish(batch, None, StepNumbers(threshold=least)).selection_T
    assert least == math.inf and selection_T is not None and not (selection_T >= 0).any()


def test_at_least_one_token_is_selected_by_a_loss_that_selects() -> None:
    config = actor_config(loss_mode="kl_cov", kl_cov_ratio=0.01, clip_cov_ratio=0.5)
    assert [num_selected(config, n) for n in (10, 99, 100, 250)] == [1, 1, 1, 2]
    assert num_selected(actor_config(loss_mode="clip_cov", clip_cov_ratio=0.5), 10) == 5
    assert num_selected(actor_config(), 1000) == 0
