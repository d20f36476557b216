"""Which groups have a signal, and which responses are left out."""

from __future__ import annotations

import torch

from mcore_rl.algorithms.shaping import informative_groups, mask_truncated


def test_groups_of_equal_scores_are_not_informative() -> None:
    scores_S = torch.tensor([1.0, 0.1, -2.0, 0.0, 0.1, 0.3, 1.0, 0.1])
    group_S = torch.tensor([8, -3, 8, 8, -3, 5, 8, -3])
    expected = [True, False, True, True, False, False, True, False]  # -3: all 0.1; 5: one member
    assert informative_groups(scores_S, group_S).tolist() == expected


def test_scores_below_and_above_0() -> None:
    for scores in ([-3.0, -2.0], [2.0, 3.0]):
        assert informative_groups(torch.tensor(scores), torch.tensor([0, 0])).all()
        assert not informative_groups(torch.tensor([scores[0]] * 2), torch.tensor([0, 0])).any()


def test_truncated_responses_are_not_trained() -> None:
    mask_T = torch.tensor([False, True, False, True, True, False, True])
    found = mask_truncated(mask_T, (2, 3, 2), torch.tensor([False, True, False]))
    assert found.tolist() == [False, True, False, False, False, False, True]
    assert mask_T.sum() == 4
