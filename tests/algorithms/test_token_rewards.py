"""Scores on last trained tokens, KL where it arises."""

from __future__ import annotations

import math

import pytest
import torch

from mcore_rl.algorithms.token_rewards import token_rewards

LENGTHS = (4, 3, 2, 1)
MASK_T = torch.tensor([False, True, True, False, False, False, False, False, True, False])
SCORES_S = torch.tensor([2.0, 9.0, -1.0, 9.0])


def test_scores_stand_on_the_last_trained_token() -> None:
    assert token_rewards(LENGTHS, MASK_T, SCORES_S).tolist() == [0, 0, 2, 0, 0, 0, 0, 0, -1, 0]


def test_kl_is_subtracted_from_trained_tokens_alone() -> None:
    kl_T = torch.full((10,), math.nan).masked_scatter(MASK_T, torch.tensor([0.5, 0.25, -1.0]))
    found = token_rewards(LENGTHS, MASK_T, SCORES_S, kl_T, kl_coef=0.1)
    assert found.tolist() == pytest.approx([0, -0.05, 2 - 0.025, 0, 0, 0, 0, 0, -1 + 0.1, 0])


def test_nothing_trained() -> None:
    none_T = torch.zeros_like(MASK_T)
    assert not token_rewards(LENGTHS, none_T, SCORES_S, torch.ones(10), 0.5).any()
