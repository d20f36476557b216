"""Attention with soft caps or sinks against a naive one in float64, in blocks of every size, on context ranks too."""

from __future__ import annotations

import pytest
import torch

from mcore_rl.parallel.context import padded_lengths, split, split_indices
from mcore_rl.training import block_attention
from mcore_rl.training.block_attention import attend_in_blocks
from mcore_rl.training.sequences import PackedSequences
from tests.support.naive_attention import HEAD_DIM, assert_close, random_qkv, real_rows, reference

CPU = torch.device("cpu")
SCALE = HEAD_DIM**-0.5
LENGTHS = (1, 13, 40, 7, 16)
CAP = 1.5  # of scores around 1 to 3


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("window", [None, 1, 6, 25, 100])
@pytest.mark.parametrize("block_bytes", [1, 2_000, None])
def test_equals_naive_attention(heads: int, groups: int, window: int | None, block_bytes: int | None) -> None:
    query, key, value, grad = random_qkv(sum(LENGTHS), heads, groups)
    packed = PackedSequences.of(LENGTHS, LENGTHS, 1, 0, CPU)
    out = attend_in_blocks(query, key, value, packed, SCALE, CAP, window, block_bytes=block_bytes).flatten(1)
    grads = torch.autograd.grad(out, (query, key, value), grad)
    expected = reference((query, key, value), grad, LENGTHS, LENGTHS, window=window, cap=CAP)
    assert_close([out, *grads], expected)
    without = reference((query, key, value), grad, LENGTHS, LENGTHS, window=window)
    assert window == 1 or (without[0] - expected[0]).abs().max() > 0.1, "the cap must show"


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("window", [None, 1, 6, 100])
@pytest.mark.parametrize("cap", [None, CAP])
def test_a_sink_takes_its_share_of_each_softmax(heads: int, groups: int, window: int | None, cap: float | None) -> None:
    query, key, value, grad = random_qkv(sum(LENGTHS), heads, groups)
    sinks = torch.linspace(-2.0, 3.0, heads).requires_grad_()  # of each head another: about as large as scores
    packed = PackedSequences.of(LENGTHS, LENGTHS, 1, 0, CPU)
    out = attend_in_blocks(query, key, value, packed, SCALE, cap, window, sinks=sinks, block_bytes=2_000).flatten(1)
    grads = torch.autograd.grad(out, (query, key, value, sinks), grad)
    expected = reference((query, key, value), grad, LENGTHS, LENGTHS, window=window, cap=cap, sinks=sinks)
    assert_close([out, *grads], expected)
    without = reference((query, key, value), grad, LENGTHS, LENGTHS, window=window, cap=cap)
    assert (without[0] - expected[0]).abs().max() > 0.1, "the sinks must show"


def test_context_ranks_together_have_the_gradient_of_the_sinks() -> None:
    padded = padded_lengths(LENGTHS, 2)
    query, key, value, grad = random_qkv(sum(padded), 4, 2)
    grad = grad * real_rows(LENGTHS, padded)[:, None]
    sinks = torch.linspace(-2.0, 3.0, 4).requires_grad_()
    total = torch.zeros(4)
    for rank in range(2):
        packed = PackedSequences.of(LENGTHS, padded, 2, rank, CPU)
        local = split(query, padded, 2, rank)
        out = attend_in_blocks(local, key, value, packed, SCALE, None, 9, sinks=sinks).flatten(1)
        total += torch.autograd.grad(out, sinks, split(grad, padded, 2, rank))[0]
    expected = reference((query, key, value), grad, LENGTHS, padded, window=9, sinks=sinks)[-1]
    assert (total - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("cp", [2, 4])
def test_context_ranks_together_equal_the_whole(cp: int, window: int | None) -> None:
    padded = padded_lengths(LENGTHS, cp)
    real_T = real_rows(LENGTHS, padded)
    query, key, value, grad = random_qkv(sum(padded), 4, 2)
    grad = grad * real_T[:, None]
    expected = reference((query, key, value), grad, LENGTHS, padded, scale=0.4, window=window, cap=CAP)
    whole = [torch.zeros_like(x) for x in (grad, query, key, value)]
    for rank in range(cp):
        packed = PackedSequences.of(LENGTHS, padded, cp, rank, CPU)
        local = split(query, padded, cp, rank).detach().requires_grad_()
        out = attend_in_blocks(local, key, value, packed, 0.4, CAP, window, block_bytes=1_000).flatten(1)
        grads = torch.autograd.grad(out, (local, key, value), split(grad, padded, cp, rank))
        rows = split_indices(padded, cp, rank)
        whole[0][rows] = out.detach()
        whole[1][rows] = grads[0]
        whole[2] += grads[1]
        whole[3] += grads[2]
    whole[0] *= real_T[:, None]
    assert_close(whole, expected)


def test_bfloat16_computes_scores_in_float32() -> None:
    # Outputs and probabilities round at 4e-3; a score of 30 rounded to bf16 (by up to 0.06) would show.
    query, key, value, grad = random_qkv(sum(LENGTHS), 4, 2)
    halves = [(x.detach() * factor).bfloat16().requires_grad_() for x, factor in ((query, 3), (key, 3), (value, 1))]
    packed = PackedSequences.of(LENGTHS, LENGTHS, 1, 0, CPU)
    out = attend_in_blocks(*halves, packed, SCALE, 30.0).flatten(1)
    grads = torch.autograd.grad(out, halves, grad.bfloat16())
    assert {x.dtype for x in (out, *grads)} == {torch.bfloat16}
    assert_close([out, *grads], reference(halves, grad.bfloat16(), LENGTHS, LENGTHS, cap=30.0), tolerance=1e-2)


def test_keys_outside_the_window_are_never_read(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    scores = block_attention._scores

    def count(query: torch.Tensor, key: torch.Tensor, *others: float) -> torch.Tensor:
        asked.append(key.shape[1])
        return scores(query, key, *others)

    monkeypatch.setattr(block_attention, "_scores", count)
    query, key, value, grad = random_qkv(100, 2, 2)
    out = attend_in_blocks(query, key, value, PackedSequences.of((100,), (100,), 1, 0, CPU), SCALE, CAP, 20)
    assert asked == [20, 39, 39, 39, 39]
    torch.autograd.grad(out.flatten(1), query, grad)
    assert asked == [20, 39, 39, 39, 39] * 2
