"""The cross entropy of the trained tokens, and nothing of the others."""

from __future__ import annotations

import pickle

import torch
from torch import Tensor

from mcore_rl.algorithms.cross_entropy import CrossEntropy
from mcore_rl.ground.types import LossInputs


def inputs(logprobs_N: Tensor, mask_N: Tensor) -> LossInputs:
    return LossInputs(
        mask_N=mask_N,
        sequence_N=torch.zeros(len(mask_N), dtype=torch.int64),
        num_sequences=1,
        sum_over_context=lambda x_S: x_S,
        logprobs_N=logprobs_N,
    )


def test_it_is_minus_the_sum_of_the_trained_log_probs_and_so_is_its_gradient() -> None:
    logprobs_N = torch.tensor([-1.0, -2.5, -4.0, -0.5], requires_grad=True)
    mask_N = torch.tensor([True, False, True, False])
    sums = pickle.loads(pickle.dumps(CrossEntropy()))(inputs(logprobs_N, mask_N))
    assert sums.total.item() == 5.0 and sums.metrics == {}
    sums.total.backward()
    assert logprobs_N.grad is not None and logprobs_N.grad.tolist() == [-1.0, 0.0, -1.0, 0.0]


def test_what_is_not_trained_may_be_infinite() -> None:
    logprobs_N = torch.tensor([-1.0, float("-inf"), float("nan")], requires_grad=True)
    sums = CrossEntropy()(inputs(logprobs_N, torch.tensor([True, False, False])))
    sums.total.backward()
    assert sums.total.item() == 1.0
    assert logprobs_N.grad is not None and logprobs_N.grad.tolist() == [-1.0, 0.0, 0.0]


def test_without_a_trained_token_it_is_a_zero_that_has_a_gradient() -> None:
    logprobs_N = torch.tensor([-1.0, -2.0], requires_grad=True)
    sums = CrossEntropy()(inputs(logprobs_N, torch.zeros(2, dtype=torch.bool)))
    sums.total.backward()
    assert sums.total.item() == 0.0
    assert logprobs_N.grad is not None and logprobs_N.grad.tolist() == [0.0, 0.0]
