"""KL estimates against their expectations, which sum to the exact KL, and the controller by hand."""

from __future__ import annotations

import math

import pytest
import torch

from mcore_rl.algorithms.kl import MAX_LOG_RATIO, PENALTIES, KlController, kl_k1, kl_k2, kl_k3, kl_low_var
from mcore_rl.config.algorithm import KlControl, KlControlConfig, KlPenalty, KlUnit

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
    assert float(kl_low_var(p, q)) == pytest.approx(0.5 - 1 + math.log(2))
    named = (KlPenalty.k1, KlPenalty.k2, KlPenalty.k3, KlPenalty.low_var_kl)
    assert [PENALTIES[kind] for kind in named] == [kl_k1, kl_k2, kl_k3, kl_low_var]
    assert PENALTIES[KlPenalty.k1_plus](p, q) == kl_k1(p, q) and PENALTIES[KlPenalty.k3_plus](p, q) == kl_k3(p, q)


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
    for kind in (KlPenalty.k1_plus, KlPenalty.k3_plus):
        torch.testing.assert_close(expected_gradient(PENALTIES[kind]), exact(forward=True))


def test_verl_s_low_var_kl_lets_go_of_what_is_furthest_away() -> None:
    """From log(q/p) = 2.61 on, where e^x - x - 1 = 10, its gradient is 0, and that of k3 is not."""
    x = [-30.0, -1.0, 0.0, 2.6, 2.62, 30.0]
    p = torch.tensor([-each for each in x], dtype=torch.float64, requires_grad=True)
    values = kl_low_var(p, torch.zeros_like(p))
    held = [min(max(each, -20.0), 20.0) for each in x]
    assert values.tolist() == pytest.approx([min(math.exp(each) - each - 1, 10.0) for each in held], rel=1e-12)
    (gradient,) = torch.autograd.grad(values.sum(), p)
    # The gradient of log p: 1 - e^x where neither clamp holds.
    assert gradient.tolist() == pytest.approx([0.0, 1 - math.exp(-1.0), 0.0, 1 - math.exp(2.6), 0.0, 0.0], rel=1e-12)
    (ours,) = torch.autograd.grad(kl_k3(p, torch.zeros_like(p)).sum(), p)
    assert (ours[3:] < -12).all()


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


def adaptive(**changes: object) -> KlController:
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
    for unit, told in ((KlUnit.token, (kl, 77.0)), (KlUnit.response, (77.0, kl))):
        controller = adaptive(target_kl_per=unit)
        controller.update(per_token=told[0], per_response=told[1], num_samples=samples)
        assert controller.coef == pytest.approx(0.5 * factor)


def test_two_hundred_steps_of_the_default_controller_are_verl_s() -> None:
    """verl's AdaptiveKLController (0.9.1), fed as its apply_kl_penalty feeds it: 0.05 nats a token, half the target.

    A KL of 0.05 nats a token is 10 nats a response of 200 tokens.  Held against a target per response it would turn the
    coefficient up in every step where verl turns it down: 58 times as high after 200 steps.
    """
    batch, tokens, verl = 1024, 200, 0.001
    ours, per_response = (
        KlController(KlControlConfig(type=KlControl.adaptive, target_kl_per=unit))
        for unit in (KlUnit.token, KlUnit.response)
    )
    assert KlControlConfig().target_kl_per is KlUnit.token, "verl's meaning under verl's name"
    for _ in range(200):
        verl *= 1 + min(max(0.05 / 0.1 - 1, -0.2), 0.2) * batch / 10_000
        for controller in (ours, per_response):
            controller.update(per_token=0.05, per_response=0.05 * tokens, num_samples=batch)
    assert ours.coef == pytest.approx(verl, rel=1e-12)
    assert per_response.coef > 57 * 0.001 > ours.coef


def test_the_fixed_coefficient_is_the_configurations() -> None:
    controller = KlController(KlControlConfig(kl_coef=0.3))
    controller.update(per_token=100.0, per_response=100.0, num_samples=100)
    controller.load_state_dict({"coef": 7.0})
    assert controller.coef == 0.3


def test_the_adaptive_coefficient_is_resumed() -> None:
    controller, resumed = adaptive(), adaptive()
    controller.update(per_token=9.0, per_response=9.0, num_samples=50)
    resumed.load_state_dict(controller.state_dict())
    assert resumed.coef == controller.coef != 0.5
