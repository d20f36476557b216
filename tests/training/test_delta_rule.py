"""The gated delta rule and its convolution beside transformers' token by token and torch's own, sequence by sequence.

float32; the outputs are of size 0.3, and rounding of some hundred sums was seen to differ by up to 3e-7.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from mcore_rl.training.delta_rule import causal_convolution, gated_delta_rule, unit_length

TOLERANCE = 2e-6
# Of one token, of less than a chunk, of whole chunks, of several and a bit; longer ones behind shorter ones.
LENGTHS = (5, 200, 64, 1, 130, 65)
HEADS, KEYS, VALUES = 3, 10, 6


def inputs(seed: int = 0) -> tuple[Tensor, ...]:
    """query, key, value, decay, beta; states that are forgotten over some dozens of tokens."""
    generator, rows = torch.Generator().manual_seed(seed), sum(LENGTHS)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    query, key = (unit_length(uniform(rows, HEADS, KEYS) - 0.5) for _ in range(2))
    return query, key, uniform(rows, HEADS, VALUES), -0.1 * uniform(rows, HEADS), uniform(rows, HEADS)


def one_by_one(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """transformers, one sequence at a time and token by token."""
    parts = zip(*(x.split(LENGTHS) for x in (query, key, value, decay, beta)), strict=True)
    outs = (
        torch_recurrent_gated_delta_rule(q[None], k[None], v[None], g=g[None], beta=b[None])[0][0]
        for q, k, v, g, b in parts
    )
    return torch.cat(list(outs))


def test_chunks_of_all_sequences_are_the_rule_token_by_token() -> None:
    ours, theirs = gated_delta_rule(*inputs(), LENGTHS), one_by_one(*inputs())
    assert theirs.abs().max() > 0.1
    assert (ours - theirs).abs().max() < TOLERANCE
    lost = gated_delta_rule(*inputs(), (sum(LENGTHS),))  # one sequence: its state would go from each to the next
    assert (lost - theirs).abs().max() > 1e-2


def test_gradients_are_those_of_the_rule() -> None:
    ours, theirs = ([x.requires_grad_() for x in inputs()] for _ in range(2))
    weights = torch.randn(sum(LENGTHS), HEADS, VALUES, generator=torch.Generator().manual_seed(1))
    (gated_delta_rule(*ours, LENGTHS) * weights).sum().backward()
    (one_by_one(*theirs) * weights).sum().backward()
    for one, other in zip(ours, theirs, strict=True):
        assert one.grad is not None and other.grad is not None
        assert (one.grad - other.grad).norm() < TOLERANCE * other.grad.norm()


def test_a_token_sees_its_own_past_and_nothing_else() -> None:
    given = [x.requires_grad_() for x in inputs()]
    token = 5 + 150  # of the second sequence, in its third chunk
    gated_delta_rule(*given, LENGTHS)[token].sum().backward()
    for x in given[1:]:  # of its query, a token is all that sees it
        assert x.grad is not None
        reached = x.grad.flatten(1).abs().sum(1) > 0
        assert reached[5 : token + 1].all() and reached.sum() == 151


@pytest.mark.parametrize("taps", [1, 3, 4])
def test_the_convolution_is_torchs_in_each_sequence(taps: int) -> None:
    generator = torch.Generator().manual_seed(2)
    x_TD, weight_DK = torch.randn(sum(LENGTHS), 7, generator=generator), torch.randn(7, taps, generator=generator)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    theirs = [
        F.conv1d(F.pad(x.t(), (taps - 1, 0))[None], weight_DK[:, None], groups=7)[0].t() for x in x_TD.split(LENGTHS)
    ]
    assert (causal_convolution(x_TD, weight_DK, positions) - torch.cat(theirs)).abs().max() < TOLERANCE
