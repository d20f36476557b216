"""Whitening: the moments that come out, and the counts at which there are none."""

from __future__ import annotations

import pytest
import torch

from mcore_rl.algorithms.advantages.estimation import Whitening
from mcore_rl.algorithms.advantages.ragged import Spreads


def whiten(x_T: torch.Tensor, mask_T: torch.Tensor) -> torch.Tensor:
    """The tokens of ``mask_T`` as those of two sequences, whitened; 0 elsewhere."""
    x_M = x_T[mask_T]
    counts_S = torch.tensor([len(x_M) // 3, len(x_M) - len(x_M) // 3])
    spread = Spreads.of(x_M, counts_S).total()
    whitening, found_T = Whitening.of(spread), torch.zeros_like(x_T)
    found_T[mask_T] = whitening(x_M)
    if spread is not None:  # and that is what it says it does
        again, said = Spreads.of(whitening(x_M.double()), counts_S).total(), whitening.of_spread(spread)
        assert again is not None
        assert vars(said) == pytest.approx(vars(again), rel=1e-9, abs=1e-9)
    return found_T


def test_mean_0_and_unbiased_variance_1_over_the_masked_tokens_alone() -> None:
    random = torch.Generator().manual_seed(0)
    x_T = 3 + 5 * torch.randn(1000, generator=random, dtype=torch.float64)
    mask_T = torch.rand(1000, generator=random) < 0.5
    found_T = whiten(x_T.masked_fill(~mask_T, 1e9), mask_T)
    assert not found_T[~mask_T].any()
    assert float(found_T[mask_T].mean()) == pytest.approx(0, abs=1e-12)
    assert float(found_T[mask_T].var(correction=1)) == pytest.approx(1, rel=1e-8)


def test_two_values() -> None:
    found_T = whiten(torch.tensor([1.0, 7.0, 3.0], dtype=torch.float64), torch.tensor([True, False, True]))
    assert found_T.tolist() == pytest.approx([-(0.5**0.5), 0, 0.5**0.5], rel=1e-8)  # variance 2, by n - 1


@pytest.mark.parametrize("mask", [[False, False, False], [False, True, False]])
def test_no_token_and_one_token_become_0(mask: list[bool]) -> None:
    assert whiten(torch.tensor([5.0, 0.1, 3.0]), torch.tensor(mask)).tolist() == [0, 0, 0]


def test_equal_values_become_exactly_0() -> None:
    assert not whiten(torch.full((1001,), 0.1), torch.ones(1001, dtype=torch.bool)).any()


def test_a_large_mean_does_not_swallow_the_variance() -> None:
    x_T = torch.tensor([4096.0, 4097.0] * 50_000)
    found_T = whiten(x_T, torch.ones_like(x_T, dtype=torch.bool))
    assert found_T[:2].tolist() == pytest.approx([-1, 1], rel=1e-4)
