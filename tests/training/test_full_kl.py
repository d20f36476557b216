"""The exact KL against float64 autograd, whole and with the vocabulary split; and the engine that trains on it.

Tolerances.  A float32 KL is a mean of differences of logits (up to 40 here, half a unit in the last place of which is
2e-6) and two logarithms: 8e-6 absolute.  Gradients: 2e-6 of the largest.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mcore_rl.algorithms.policy import policy_loss
from mcore_rl.config.algorithm import KlPenalty
from mcore_rl.config.model import ModelConfig
from mcore_rl.ground.types import StepResult, TrainBatch
from mcore_rl.parallel.launch import Rank
from mcore_rl.training.full_kl import full_kl
from mcore_rl.training.logprobs import token_logprobs
from tests.support import batches, engines, full_weights, hf_reference, models
from tests.support.forked import run_ranks
from tests.support.settings import actor_config


@dataclass(frozen=True)
class Case:
    """Logits [T, padded] of both, the tokens that count, and an upstream gradient for each token."""

    logits_TV: Tensor
    reference_TV: Tensor
    mask_T: Tensor
    grad_T: Tensor
    vocab_size: int = 101
    temperature: float = 1.0
    soft_cap: float | None = None


def make_case(dtype: torch.dtype = torch.float32, temperature: float = 1.0, soft_cap: float | None = None) -> Case:
    generator = torch.Generator().manual_seed(0)
    logits_TV, reference_TV = ((torch.randn(23, 128, generator=generator) * 3).to(dtype) for _ in range(2))
    logits_TV[:, 101:] = reference_TV[:, 101:] = 50.0  # would dominate the softmax if it were let in
    mask_T = torch.rand(23, generator=generator) < 0.5
    grad_T = torch.randn(23, generator=generator)
    return Case(logits_TV, reference_TV, mask_T, grad_T, temperature=temperature, soft_cap=soft_cap)


def run(case: Case, group: dist.ProcessGroup | None = None, chunk_tokens: int = 4) -> tuple[Tensor, Tensor]:
    leaf_TV = case.logits_TV.clone().requires_grad_()
    kl_T = full_kl(
        leaf_TV,
        case.reference_TV[case.mask_T],
        case.mask_T,
        vocab_size=case.vocab_size,
        chunk_bytes=chunk_tokens * 4 * leaf_TV.shape[1],
        temperature=case.temperature,
        soft_cap=case.soft_cap,
        group=group,
    )
    (kl_T * case.grad_T).sum().backward()
    assert leaf_TV.grad is not None
    return kl_T.detach(), leaf_TV.grad


def by_autograd(case: Case) -> tuple[Tensor, Tensor]:
    """In float64, with the sum over the vocabulary written out."""
    leaf_TV = case.logits_TV.double().requires_grad_()

    def logprobs(x_TV: Tensor) -> Tensor:
        x_TV = x_TV[:, : case.vocab_size].double()
        if case.soft_cap is not None:
            x_TV = case.soft_cap * torch.tanh(x_TV / case.soft_cap)
        return torch.log_softmax(x_TV / case.temperature, dim=-1)

    p_TV, q_TV = logprobs(leaf_TV), logprobs(case.reference_TV)
    kl_T = (p_TV.exp() * (p_TV - q_TV)).sum(-1) * case.mask_T
    (kl_T * case.grad_T).sum().backward()
    assert leaf_TV.grad is not None
    return kl_T.detach(), leaf_TV.grad


def assert_as_by_autograd(case: Case, kl_T: Tensor, grad_TV: Tensor) -> None:
    expected_T, expected_TV = by_autograd(case)
    assert kl_T.dtype == torch.float32 and grad_TV.dtype == case.logits_TV.dtype
    torch.testing.assert_close(kl_T.double(), expected_T, atol=8e-6, rtol=0)
    rounding = 2**-8 if grad_TV.dtype == torch.bfloat16 else 0
    largest = float(expected_TV.abs().max())
    torch.testing.assert_close(grad_TV.double(), expected_TV, atol=2e-6 * largest, rtol=rounding)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("soft_cap", [None, 4.0, 30.0])
def test_value_and_gradient(dtype: torch.dtype, temperature: float, soft_cap: float | None) -> None:
    case = make_case(dtype, temperature, soft_cap)
    assert_as_by_autograd(case, *run(case))


def test_logits_of_other_rows_than_the_mask_are_refused() -> None:
    logits_TV = torch.randn(3, 8) * torch.ones((), requires_grad=True)
    mask_T = torch.tensor([True, False, True])
    for rows in (1, 3):
        with pytest.raises(RuntimeError, match="logits of other rows than the mask"):
            full_kl(logits_TV, torch.randn(rows, 8), mask_T, vocab_size=8, chunk_bytes=64)


@pytest.mark.parametrize("chunk_tokens", [1, 11, 100])
def test_chunks_change_nothing(chunk_tokens: int) -> None:
    case = make_case()
    for chunked, expected in zip(run(case, chunk_tokens=chunk_tokens), run(case), strict=True):
        torch.testing.assert_close(chunked, expected, atol=1e-6, rtol=0)


def test_equal_policies_are_exactly_0_apart() -> None:
    case = make_case(torch.bfloat16, 0.7, 4.0)
    kl_T, grad_TV = run(replace(case, reference_TV=case.logits_TV))
    assert not kl_T.any() and not grad_TV.any()


def test_no_rows_are_connected_to_the_graph() -> None:
    case = make_case()
    kl_T, grad_TV = run(replace(case, mask_T=torch.zeros(23, dtype=torch.bool)))
    assert kl_T.shape == (23,) and not kl_T.any() and not grad_TV.any()


def test_beside_log_probs_on_the_same_logits() -> None:
    """``token_logprobs`` overwrites the logits with its gradient; both gradients must arrive."""
    case = make_case()
    targets_T = torch.arange(23)
    leaf_TV = case.logits_TV.clone().requires_grad_()
    logits_TV = leaf_TV * 1
    settings = {"vocab_size": 101, "chunk_bytes": 4096}
    logprobs_T, _ = token_logprobs(logits_TV, targets_T, **settings)  # type: ignore[arg-type]
    kl_T = full_kl(logits_TV, case.reference_TV[case.mask_T], case.mask_T, **settings)  # type: ignore[arg-type]
    (logprobs_T.sum() + (kl_T * case.grad_T).sum()).backward()

    alone_TV = case.logits_TV.double().requires_grad_()
    torch.log_softmax(alone_TV[:, :101], dim=-1).gather(1, targets_T.unsqueeze(1)).sum().backward()
    assert leaf_TV.grad is not None and alone_TV.grad is not None
    expected_TV = alone_TV.grad + by_autograd(case)[1]
    torch.testing.assert_close(leaf_TV.grad.double(), expected_TV, atol=1e-5, rtol=0)


# Of 128 columns: the second of two ranks has padding, in the last case nothing else.
SPLIT = (make_case(), make_case(torch.bfloat16, 0.6, 4.0), replace(make_case(), vocab_size=60))
LOW = torch.where(torch.arange(128) < 64, -300.0, 0.0)  # what the reference thinks of the first rank's columns
FAR = replace(make_case(), reference_TV=make_case().reference_TV + LOW)


def split(rank: int) -> list[tuple[Tensor, Tensor]]:
    """Each rank its columns of the logits; what it found."""
    columns, results = slice(rank * 64, rank * 64 + 64), []
    for case in (*SPLIT, FAR):
        mine = replace(case, logits_TV=case.logits_TV[:, columns], reference_TV=case.reference_TV[:, columns])
        results.append(run(mine, dist.group.WORLD))
    return results


def test_a_vocabulary_over_two_ranks(ranks: list[Found]) -> None:
    *near, far = zip((*SPLIT, FAR), *(of_rank.split for of_rank in ranks), strict=True)
    for case, (kl_T, left_TV), (peers_T, right_TV) in near:
        assert torch.equal(kl_T, peers_T)
        assert_as_by_autograd(case, kl_T, torch.cat([left_TV, right_TV], dim=1))
    case, (kl_T, left_TV), (_, right_TV) = far
    expected_T, expected_TV = by_autograd(case)
    assert float(expected_T.max()) > 128
    torch.testing.assert_close(kl_T.double(), expected_T, atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(torch.cat([left_TV, right_TV], dim=1).double(), expected_TV, atol=1e-5, rtol=1e-5)


# The engine: reference weights and policy weights that differ, against transformers in float64.

MODELS: dict[str, ModelConfig] = {"dense": models.dense(num_layers=2), "gemma2": models.gemma2()}
LAYOUTS = ("tp=2", "pp=2", "cp=2", "")
TEMPERATURE, COEF = 0.7, 0.5
ACTOR = actor_config(use_kl_loss=True, kl_loss_coef=COEF, kl_loss_type=KlPenalty.full)


def batch_of(model: ModelConfig) -> TrainBatch:
    """Advantages of 0: nothing is trained but the KL."""
    batch = batches.ragged(model.vocab_size)
    assert batch.advantages_T is not None
    return replace(batch, advantages_T=torch.zeros_like(batch.advantages_T))


def by_transformers(name: str) -> tuple[float, float]:
    """Sum of the KL over trained tokens, and the norm of the loss's gradient."""
    model, batch = MODELS[name], batch_of(MODELS[name])
    policy, reference = (hf_reference.build(model, seed=seed).double() for seed in (1, 0))
    total = torch.zeros((), dtype=torch.float64)
    for tokens, mask in zip(*(torch.split(x, batch.lengths_S) for x in (batch.tokens_T, batch.mask_T)), strict=True):
        p_TV, q_TV = (
            (each(tokens.unsqueeze(0)).logits[0] / TEMPERATURE).log_softmax(-1) for each in (policy, reference)
        )
        kl_T = (p_TV.exp() * (p_TV - q_TV.detach())).sum(-1)
        total = total + (kl_T[:-1] * mask[1:]).sum()  # a position predicts the token behind it
    (COEF * total / batch.mask_T.sum()).backward()
    norm = sum(float(x.grad.square().sum()) for x in policy.parameters() if x.grad is not None) ** 0.5
    return float(total.detach()), norm


@dataclass
class Found:
    """Of one rank.  trained: a step of each model in each layout, and whether the snapshot is as it was."""

    split: list[tuple[Tensor, Tensor]]
    trained: dict[tuple[str, str], tuple[StepResult, bool]] = field(default_factory=dict)


def on_ranks(rank: Rank) -> Found:
    with engines.world(rank):
        results = Found(split(rank.rank))
        for name, model in MODELS.items():
            reference, policy = (hf_reference.full_weights(hf_reference.build(model, seed=s), model) for s in (0, 1))
            for layout in LAYOUTS:
                with engines.groups_of(layout) as groups:
                    engine = engines.build(
                        groups, model, layout=layout, load=partial(full_weights.load_full, weights=reference)
                    )
                    engine.snapshots.take("reference")
                    engine.load_weights(partial(full_weights.load_full, weights=policy))
                    batch = batch_of(model)
                    mine, counts = engines.share_of(batch, groups), batches.denominators(batch)
                    before = engine.score(mine, snapshot="reference")
                    step = engine.train_step(
                        mine, policy_loss(ACTOR), counts, temperature=TEMPERATURE, kl_to="reference"
                    )
                    after = engine.score(mine, snapshot="reference")
                    results.trained[name, layout] = step, torch.equal(*(x.logprobs_T for x in (before, after)))  # type: ignore[arg-type]
    return results


@pytest.fixture(scope="module")
def ranks(processes: None) -> list[Found]:
    return run_ranks(on_ranks, 2, timeout_s=120)


def test_the_engine_trains_on_it_in_any_layout(ranks: list[Found]) -> None:
    for name in MODELS:
        total, norm = by_transformers(name)
        count = float(batch_of(MODELS[name]).mask_T.sum())
        assert total / count > 0.1, "policies that are apart"
        for layout in LAYOUTS:
            step, untouched = ranks[0].trained[name, layout]
            # Two models in float32: sums of a thousand rounded products each, 1e-6 relative a layer.
            assert step.metrics["actor/kl_loss"] == pytest.approx(total, rel=2e-5), (name, layout)
            assert step.loss == pytest.approx(COEF * total / count, rel=2e-5), (name, layout)
            assert step.grad_norm == pytest.approx(norm, rel=1e-4), (name, layout)
            assert step.skipped is None and untouched, (name, layout)
