"""KL estimates against their expectations, which sum to the exact KL, and the controller by hand."""

from __future__ import annotations

import math

import pytest
import torch

from mcore_rl.algorithms.kl import MAX_LOG_RATIO, KlController, kl_k1, kl_k2, kl_k3, penalty
from mcore_rl.config.algorithm import KlControl, KlControlConfig, KlPenalty

GENERATOR = torch.Generator().manual_seed(3)
P_V = torch.randn(7, generator=GENERATOR, dtype=torch.float64).log_softmax(-1)
Q_V = torch.randn(7, generator=GENERATOR, dtype=torch.float64).log_softmax(-1)


def by_hand(p: list[float], q: list[float]) -> float:
    return math.fsum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True))


def test_values() -> None:
    p, q = torch.tensor(math.log(0.5)), torch.tensor(math.log(0.25))
    assert float(kl_k1(p, q)) == pytest.approx(math.log(2))
    assert float(kl_k2(p, q)) == pytest.approx(math.log(2) ** 2 / 2)
    assert float(kl_k3(p, q)) == pytest.approx(0.5 - 1 + math.log(2))
    estimates = [kind for kind in KlPenalty if kind is not KlPenalty.full]
    assert [penalty(kind) for kind in estimates] == [kl_k1, kl_k2, kl_k3]


@pytest.mark.parametrize("kl", [kl_k1, kl_k3])
def test_k1_and_k3_are_unbiased(kl) -> None:  # type: ignore[no-untyped-def]
    assert float((P_V.exp() * kl(P_V, Q_V)).sum()) == pytest.approx(by_hand(P_V.tolist(), Q_V.tolist()), rel=1e-12)


def test_gradients_in_expectation_are_what_the_module_says() -> None:
    def expected_gradient(kl) -> torch.Tensor:  # type: ignore[no-untyped-def]
        logits = P_V.clone().requires_grad_()
        logprobs = logits.log_softmax(-1)
        (logprobs.detach().exp() * kl(logprobs, Q_V)).sum().backward()
        assert logits.grad is not None
        return logits.grad

    def exact(forward: bool) -> torch.Tensor:
        logits = P_V.clone().requires_grad_()
        logprobs = logits.log_softmax(-1)
        kl = (logprobs.exp() * (logprobs - Q_V)).sum() if forward else (Q_V.exp() * (Q_V - logprobs)).sum()
        return torch.autograd.grad(kl, logits)[0]

    assert expected_gradient(kl_k1).abs().max() < 1e-15
    torch.testing.assert_close(expected_gradient(kl_k2), exact(forward=True))
    torch.testing.assert_close(expected_gradient(kl_k3), exact(forward=False))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_k3_does_not_overflow_and_still_pulls_back(dtype: torch.dtype) -> None:
    p = torch.tensor([-1000.0, -MAX_LOG_RATIO - 1, -MAX_LOG_RATIO, 0.0], dtype=dtype, requires_grad=True)
    values = kl_k3(p, torch.zeros_like(p))
    values.sum().backward()
    steepest = math.exp(MAX_LOG_RATIO)
    assert p.grad is not None
    assert p.grad.tolist()[:2] == pytest.approx([1 - steepest] * 2)
    assert values.tolist() == pytest.approx(
        [steepest * 991 - 1 - 1000, steepest * 2 - 1 - 11, steepest - 1 - 10, 0], rel=1e-6
    )
    assert float(kl_k3(torch.zeros(()), torch.tensor(-1000.0))) == 999.0  # q vanishes: the linear part remains


def adaptive(**changes: float) -> KlController:
    return KlController(
        KlControlConfig(type=KlControl.adaptive, kl_coef=0.5, **({"target_kl": 2.0, "horizon": 100} | changes))  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("kl", "samples", "factor"),
    [
        (2.0, 50, 1.0),
        (2.2, 50, 1 + 0.1 * 0.5),
        (9.0, 50, 1 + 0.2 * 0.5),
        (0.0, 50, 1 - 0.2 * 0.5),
        (0.0, 10_000, 1 - 0.2),  # never through 0
        (math.nan, 50, 1.0),
        (math.inf, 50, 1.0),
    ],
)
def test_the_adaptive_coefficient(kl: float, samples: int, factor: float) -> None:
    controller = adaptive()
    controller.update(kl, samples)
    assert controller.coef == pytest.approx(0.5 * factor)


def test_the_fixed_coefficient_is_the_configurations() -> None:
    controller = KlController(KlControlConfig(kl_coef=0.3))
    controller.update(100.0, 100)
    controller.load_state_dict({"coef": 7.0})
    assert controller.coef == 0.3


def test_the_adaptive_coefficient_is_resumed() -> None:
    controller, resumed = adaptive(), adaptive()
    controller.update(9.0, 50)
    resumed.load_state_dict(controller.state_dict())
    assert resumed.coef == controller.coef != 0.5
