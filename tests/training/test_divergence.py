"""Divergences over the whole vocabulary against float64 autograd of their definitions, whole and split over ranks.

The definitions are written out once more here, from log_softmax and sums, without any closed form.  Tolerances: logits
are up to 40, half a unit in the last place of which is 2e-6; a float32 divergence is a mean of their differences and
two logarithms: 1e-5 absolute.  Gradients: 1e-5 of the largest, or where all are small because p and q share no token,
the errors of both log-probs times an upstream gradient of up to 2.5, p, and the factor before it: 1e-5 of that factor.
KL(p || m) comes to -log(1 - beta), and is a sum with a relative error of 1e-6: the same again times that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mcore_rl.config.algorithm import Divergence
from mcore_rl.parallel.launch import Rank
from mcore_rl.training import divergence as module
from mcore_rl.training.divergence import divergence
from mcore_rl.training.logprobs import num_local_columns, token_logprobs
from tests.support.engines import world
from tests.support.forked import run_ranks

REVERSE, FORWARD, JSD = Divergence.reverse_kl, Divergence.forward_kl, Divergence.jensen_shannon
KINDS = (REVERSE, FORWARD, JSD)
TOKENS, COLUMNS, WIDTH = 23, 128, 16


@dataclass(frozen=True)
class Case:
    """Logits [T, padded], the teacher's states [M, H] and rows [vocab_size, H], and an upstream gradient [T].

    others: the rows of further teachers.  counts: how many of the M are each one's; () is all of the one.
    """

    logits_TV: Tensor
    hidden_MH: Tensor
    rows_VH: Tensor
    places_M: Tensor
    grad_T: Tensor
    kind: Divergence = REVERSE
    beta: float = 0.3
    temperature: float = 1.0
    soft_cap: float | None = None
    teacher_soft_cap: float | None = None
    others: tuple[Tensor, ...] = ()
    counts: tuple[int, ...] = ()

    @property
    def vocab_size(self) -> int:
        return len(self.rows_VH)


def make_case(dtype: torch.dtype = torch.float32, vocab_size: int = 101, **settings: object) -> Case:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    logits_TV = (random(TOKENS, COLUMNS) * 3).to(dtype)
    logits_TV[:, vocab_size:] = 50.0  # would dominate the softmax if it were let in
    places_M = (torch.rand(TOKENS, generator=generator) < 0.5).nonzero().squeeze(1)
    hidden_MH, rows_VH = random(len(places_M), WIDTH).to(dtype), random(vocab_size, WIDTH).to(dtype)
    return Case(logits_TV, hidden_MH, rows_VH, places_M, random(TOKENS), **settings)  # type: ignore[arg-type]


def of_three_teachers(case: Case) -> Case:
    """The second teaches nothing, and the third has other rows and most of the tokens."""
    generator, few = torch.Generator().manual_seed(5), 2
    others = tuple(torch.randn(case.rows_VH.shape, generator=generator).to(case.rows_VH.dtype) for _ in range(2))
    return replace(case, others=others, counts=(few, 0, len(case.places_M) - few))


def run(case: Case, group: dist.ProcessGroup | None = None, chunk_tokens: int = 4) -> tuple[Tensor, Tensor]:
    leaf_TV = case.logits_TV.clone().requires_grad_()
    rank, columns = (0 if group is None else dist.get_rank(group)), leaf_TV.shape[1]
    count = num_local_columns(case.vocab_size, columns, rank)
    value_T = divergence(
        leaf_TV, case.hidden_MH,
        [rows_VH[rank * columns : rank * columns + count] for rows_VH in (case.rows_VH, *case.others)],
        case.places_M, case.kind, counts=case.counts or None,
        vocab_size=case.vocab_size, chunk_bytes=chunk_tokens * 4 * columns, beta=case.beta,
        temperature=case.temperature, soft_cap=case.soft_cap, teacher_soft_cap=case.teacher_soft_cap, group=group,
    )  # fmt: skip
    (value_T * case.grad_T).sum().backward()
    assert leaf_TV.grad is not None
    return value_T.detach(), leaf_TV.grad


def defined(case: Case, logits_TV: Tensor) -> Tensor:
    """The divergence at each row, float64 [T]: the definitions of arXiv:2306.13649, section 2."""
    # The teacher's logits are rounded to its dtype, as those of its own pass are.
    parts = case.hidden_MH.split(case.counts or len(case.hidden_MH))
    products = zip(parts, (case.rows_VH, *case.others), strict=True)
    teacher_MV = torch.cat([hidden_MH @ rows_VH.t() for hidden_MH, rows_VH in products]).double()

    def logprobs(x_MV: Tensor, soft_cap: float | None) -> Tensor:
        if soft_cap is not None:
            x_MV = soft_cap * torch.tanh(x_MV / soft_cap)
        return torch.log_softmax(x_MV / case.temperature, dim=-1)

    student_MV = logprobs(logits_TV[case.places_M, : case.vocab_size].double(), case.soft_cap)
    teacher_MV = logprobs(teacher_MV, case.teacher_soft_cap)

    def kl(a_MV: Tensor, b_MV: Tensor) -> Tensor:
        return (a_MV.exp() * (a_MV - b_MV)).sum(-1)

    if case.kind is JSD:
        mixture_MV = (case.beta * teacher_MV.exp() + (1 - case.beta) * student_MV.exp()).log()
        value_M = case.beta * kl(teacher_MV, mixture_MV) + (1 - case.beta) * kl(student_MV, mixture_MV)
    else:
        value_M = kl(student_MV, teacher_MV) if case.kind is REVERSE else kl(teacher_MV, student_MV)
    return value_M.new_zeros(len(logits_TV)).index_add(0, case.places_M, value_M)


def by_autograd(case: Case) -> tuple[Tensor, Tensor]:
    leaf_TV = case.logits_TV.double().requires_grad_()
    value_T = defined(case, leaf_TV)
    (value_T * case.grad_T).sum().backward()
    assert leaf_TV.grad is not None
    return value_T.detach(), leaf_TV.grad


def assert_as_by_autograd(case: Case, value_T: Tensor, grad_TV: Tensor) -> None:
    expected_T, expected_TV = by_autograd(case)
    assert value_T.dtype == torch.float32 and grad_TV.dtype == case.logits_TV.dtype
    torch.testing.assert_close(value_T.double(), expected_T, atol=1e-5, rtol=0)
    rounding = 2**-8 if grad_TV.dtype == torch.bfloat16 else 0
    factor = (1 - case.beta) * max(1.0, -math.log(1 - case.beta)) if case.kind is JSD else 1.0
    factor /= case.temperature
    least = max(1e-5 * float(expected_TV.abs().max()), 1e-5 * factor)
    torch.testing.assert_close(grad_TV.double(), expected_TV, atol=least, rtol=rounding)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.5])
@pytest.mark.parametrize("caps", [(None, None), (4.0, None), (30.0, 5.0)])
def test_value_and_gradient(
    kind: Divergence, dtype: torch.dtype, temperature: float, caps: tuple[float | None, float | None]
) -> None:
    case = make_case(dtype, kind=kind, temperature=temperature, soft_cap=caps[0], teacher_soft_cap=caps[1])
    assert_as_by_autograd(case, *run(case))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block", [3, 512])
def test_each_of_several_teachers_has_tokens_of_its_own(
    kind: Divergence, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PRODUCT_ROWS", block)  # more than the first teacher's tokens, and fewer
    case = of_three_teachers(make_case(kind=kind, temperature=0.7, teacher_soft_cap=5.0))
    value_T, grad_TV = run(case)
    assert_as_by_autograd(case, value_T, grad_TV)
    assert (value_T - run(replace(case, others=(), counts=()))[0]).abs().max() > 0.01, "the others say otherwise"


@pytest.mark.parametrize("beta", [1e-3, 0.5, 0.9, 0.999])
def test_every_share_of_the_mixture(beta: float) -> None:
    case = make_case(kind=JSD, beta=beta)
    assert_as_by_autograd(case, *run(case))


@pytest.mark.parametrize(("beta", "limit"), [(1e-4, FORWARD), (1 - 1e-4, REVERSE)])
def test_the_ends_of_the_mixture_are_the_two_divergences(beta: float, limit: Divergence) -> None:
    case = make_case(kind=JSD)
    case = replace(case, logits_TV=case.logits_TV / 3, hidden_MH=case.hidden_MH / 4)
    mixed_T, _ = by_autograd(replace(case, beta=beta))
    alone_T, _ = run(replace(case, kind=limit))
    torch.testing.assert_close(mixed_T.float() / min(beta, 1 - beta), alone_T, atol=0, rtol=5e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_finite_differences(kind: Divergence) -> None:
    """Of the float64 definition, in a random direction; the closed form has no part in it."""
    case = make_case(kind=kind, temperature=0.8)
    direction_TV = torch.randn(TOKENS, COLUMNS, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ends = [defined(case, case.logits_TV.double() + step * direction_TV) for step in (1e-5, -1e-5)]
    slope = float(((ends[0] - ends[1]) * case.grad_T).sum() / 2e-5)
    assert float((run(case)[1].double() * direction_TV).sum()) == pytest.approx(slope, rel=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk_tokens", [1, 11, 100])
def test_chunks_change_nothing(kind: Divergence, chunk_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(kind=kind)
    expected = run(case)
    monkeypatch.setattr(module, "PRODUCT_ROWS", 5)
    for chunked, whole in zip(run(case, chunk_tokens=chunk_tokens), expected, strict=True):
        torch.testing.assert_close(chunked, whole, atol=2e-6, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_models_are_exactly_0_apart(kind: Divergence, dtype: torch.dtype) -> None:
    case = make_case(dtype, kind=kind, temperature=0.7, soft_cap=4.0, teacher_soft_cap=4.0)
    logits_TV = case.logits_TV.clone()
    logits_TV[case.places_M, : case.vocab_size] = case.hidden_MH @ case.rows_VH.t()
    value_T, grad_TV = run(replace(case, logits_TV=logits_TV))
    assert not value_T.any() and not grad_TV.any()


@pytest.mark.parametrize("kind", KINDS)
def test_impossible_tokens_are_finite(kind: Divergence) -> None:
    """Of logits 300 apart, one side's probabilities underflow where the other's are 1."""
    case = make_case(kind=kind)
    logits_TV = case.logits_TV.clone()
    logits_TV[:, 3] += 300
    value_T, grad_TV = run(replace(case, logits_TV=logits_TV))
    assert value_T.isfinite().all() and grad_TV.isfinite().all()
    expected_T, _ = by_autograd(replace(case, logits_TV=logits_TV, beta=0.3))
    if kind is not JSD:  # whose definition, written out, is the logarithm of 0 there
        torch.testing.assert_close(value_T.double(), expected_T, atol=0, rtol=2e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_no_rows_are_connected_to_the_graph(kind: Divergence) -> None:
    case = make_case(kind=kind)
    nothing = replace(case, places_M=case.places_M[:0], hidden_MH=case.hidden_MH[:0])
    value_T, grad_TV = run(nothing)
    assert value_T.shape == (TOKENS,) and not value_T.any() and not grad_TV.any()


@pytest.mark.parametrize("kind", KINDS)
def test_beside_log_probs_on_the_same_logits(kind: Divergence) -> None:
    """``token_logprobs`` overwrites the logits with its gradient; both gradients must arrive."""
    case = make_case(kind=kind)
    targets_T = torch.arange(TOKENS)
    leaf_TV = case.logits_TV.clone().requires_grad_()
    logits_TV = leaf_TV * 1
    logprobs_T, _ = token_logprobs(logits_TV, targets_T, vocab_size=101, chunk_bytes=4096)
    value_T = divergence(
        logits_TV, case.hidden_MH, [case.rows_VH], case.places_M, kind, vocab_size=101, chunk_bytes=4096, beta=case.beta
    )
    (logprobs_T.sum() + (value_T * case.grad_T).sum()).backward()

    alone_TV = case.logits_TV.double().requires_grad_()
    torch.log_softmax(alone_TV[:, :101], dim=-1).gather(1, targets_T.unsqueeze(1)).sum().backward()
    assert leaf_TV.grad is not None and alone_TV.grad is not None
    expected_TV = alone_TV.grad + by_autograd(case)[1]
    torch.testing.assert_close(leaf_TV.grad.double(), expected_TV, atol=2e-5, rtol=0)


# Of 128 columns: the last rank has padding, in the last case nothing else.
SPLIT = tuple(
    case
    for kind in KINDS
    for case in (
        make_case(kind=kind),
        make_case(torch.bfloat16, kind=kind, temperature=0.6, soft_cap=4.0),
        make_case(vocab_size=30, kind=kind),
        of_three_teachers(make_case(kind=kind, temperature=0.6)),
    )
)


def split(rank: Rank) -> list[tuple[Tensor, Tensor]]:
    """Each rank has its columns of the logits."""
    with world(rank):
        each = COLUMNS // rank.world_size
        columns = slice(rank.rank * each, (rank.rank + 1) * each)
        return [run(replace(case, logits_TV=case.logits_TV[:, columns]), dist.group.WORLD) for case in SPLIT]


@pytest.mark.parametrize("size", [2, 4])
def test_a_vocabulary_over_ranks(size: int, processes: None) -> None:
    of_ranks = run_ranks(split, size, timeout_s=300)
    for case, *parts in zip(SPLIT, *of_ranks, strict=True):
        values = [value_T for value_T, _ in parts]
        assert all(torch.equal(values[0], value_T) for value_T in values)
        assert_as_by_autograd(case, values[0], torch.cat([grad_TV for _, grad_TV in parts], dim=1))
