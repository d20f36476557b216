"""Functions of one kernel: torch's compiler on the CPU against PyTorch's operations and float64; where it fails."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from shutil import which
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_rl.training import norm, one_kernel, rotation
from mcore_rl.training.one_kernel import OneKernel
from tests.support.skips import not_installed
from tests.training.test_norm import config


@pytest.fixture
def on_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of the CPU are taken for an accelerator's, and nothing has been compiled or failed."""
    monkeypatch.setattr(one_kernel, "is_accelerators", lambda tensor: True)
    monkeypatch.setattr(one_kernel, "_failures", [])
    for function in (norm.normed, norm.normed_back, rotation.rotated, rotation.rotated_back):
        monkeypatch.setitem(vars(function), "compiled", None)  # put back afterwards
        del vars(function)["compiled"]


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, on_accelerator: None) -> Iterator[None]:
    """torch's compiler, without which runs on the CPU do."""
    if which("g++") is None:
        pytest.skip(not_installed("g++, with which torch compiles for the CPU"))
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    with torch._dynamo.config.patch(disable=False, fail_on_recompile_limit_hit=True):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        yield
        torch._dynamo.reset()


class Compiles:
    """In the place of ``torch.compile``: what it makes does ``work``."""

    def __init__(self, work: Any) -> None:
        self.work = work
        self.calls = 0

    def __call__(self, function: Any, **options: Any) -> Any:
        def fast(*arguments: Any) -> Any:
            self.calls += 1
            return self.work(function, *arguments)

        return fast


def doubled(x: Tensor) -> Tensor:
    return x * 2


def raises(problem: Exception) -> Compiles:
    def work(*_: Any) -> None:
        raise problem

    return Compiles(work)


# ---- whether ----


def test_on_the_cpu_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", raises(AssertionError("compiled")))
    assert torch.equal(OneKernel(doubled)(torch.ones(2, 3)), torch.full((2, 3), 2.0))


def test_what_cannot_be_compiled_is_tried_once_and_said_once(
    monkeypatch: pytest.MonkeyPatch, on_accelerator: None, caplog: pytest.LogCaptureFixture
) -> None:
    broken = raises(RuntimeError("Cannot find a working triton installation"))
    monkeypatch.setattr(torch, "compile", broken)
    settings = config(params_dtype=torch.bfloat16)
    module = norm.RMSNorm(config=settings, hidden_size=8, eps=1e-5)
    x = torch.randn(3, 8).bfloat16().requires_grad_()
    with caplog.at_level(logging.WARNING):
        outputs = [module(x), module(x), OneKernel(doubled)(x)]
        gradients = [torch.autograd.grad(each, x, torch.ones_like(each))[0] for each in outputs[:2]]
    assert broken.calls == 1
    (said,) = [record.getMessage() for record in caplog.records]
    assert "torch.compile failed" in said and "Cannot find a working triton installation" in said
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[2], x * 2)
    torch.testing.assert_close(*gradients)


def test_a_compiler_that_is_switched_off_is_one_that_fails(
    monkeypatch: pytest.MonkeyPatch, on_accelerator: None
) -> None:
    """The formulas are then PyTorch's own, with its kernel of the norm."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    x = torch.ones(2, 3)
    assert one_kernel.compiles(x)
    assert torch.equal(OneKernel(doubled)(x), x * 2)
    assert not one_kernel.compiles(x) and "switched off" in one_kernel._failures[0]


def test_too_little_memory_is_no_failure_to_compile(monkeypatch: pytest.MonkeyPatch, on_accelerator: None) -> None:
    monkeypatch.setattr(torch, "compile", raises(torch.OutOfMemoryError("no memory")))
    with pytest.raises(torch.OutOfMemoryError):
        OneKernel(doubled)(torch.ones(2, 3))
    assert not one_kernel._failures


# ---- what is compiled ----


def drawn(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.tier("ci")  # the compiler takes seconds for each function
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torchs_compiler_keeps_the_roundings(dtype: torch.dtype, compiler: None) -> None:
    """Two numbers of rows, and one kernel for both.  In float32 a compiler sums in another order."""
    other = dtype is torch.float32  # the zero-centred norm, the other order of pairs
    for rows in (33, 7):
        # rows of keys lie in the projection of queries, keys and values
        grad, x = (drawn(rows, 24, dtype=dtype, seed=seed)[:, 4:20] for seed in (1, 2))
        weight, heads = drawn(16, dtype=dtype, seed=3), drawn(rows, 1, 3, 24, dtype=dtype, seed=4)[..., :16]
        angles = drawn(rows, 1, 1, 6, dtype=torch.float32, seed=5)
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        cases: list[tuple[OneKernel, tuple[Any, ...], float]] = [
            (norm.normed, (x, weight, 1e-5, other), 2e-6),
            (norm.normed_back, (grad, x, weight, 1e-5, other, True), 2e-6),
            (rotation.rotated, (heads, cos, sin, other), 0.0),
            (rotation.rotated_back, (heads, cos, sin, other), 0.0),
        ]
        for function, arguments, in_float32 in cases:
            atol = in_float32 if dtype is torch.float32 else 0.0
            torch.testing.assert_close(function(*arguments), function.function(*arguments), rtol=atol, atol=atol)
    assert not one_kernel._failures
    counts = torch._dynamo.utils.counters
    assert counts["stats"]["unique_graphs"] == len(cases), counts
