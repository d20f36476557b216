"""Gradients that their product adds to a float32 sum: against float64, and the call that a GPU gets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import layers

from mcore_rl.parallel import weight_gradient
from mcore_rl.parallel.weight_gradient import adds_up, take_apexs_place, wgrad_gemm_accum_fp32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sum_is_float32_s(dtype: torch.dtype) -> None:
    """Within float32's rounding of the exact sum, over several microbatches; it is the tensor that was given."""
    total = torch.randn(24, 16)
    exact, place = total.double(), total.data_ptr()
    for _ in range(3):
        x, grad = torch.randn(200, 16).to(dtype), torch.randn(200, 24).to(dtype)
        wgrad_gemm_accum_fp32(x, grad, total)
        exact += grad.double().T @ x.double()
    assert total.data_ptr() == place
    torch.testing.assert_close(total.double(), exact, rtol=1e-6, atol=2e-5)


def test_a_gpu_is_asked_for_one_product_of_two_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments stand where torch's ``addmm`` has them: sum, left, right, and the sum once more as the result."""
    asked: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    monkeypatch.setattr(torch, "addmm", lambda *given, **named: asked.append((given, named)))
    x = SimpleNamespace(dtype=torch.bfloat16)
    grad = SimpleNamespace(dtype=torch.bfloat16, t=lambda: "transposed")
    total = SimpleNamespace(dtype=torch.float32, device=torch.device("cuda", 0))
    wgrad_gemm_accum_fp32(x, grad, total)  # type: ignore[arg-type]
    assert asked == [((total, "transposed", x), {"out_dtype": torch.float32, "out": total})]
    assert {"dtype_out"} <= set(torch.ops.aten.addmm.overloads())


@pytest.mark.parametrize(
    ("lost", "answer"),
    [(False, True), (True, False), (None, False)],
    ids=["float32", "rounded to bfloat16", "refused"],
)
def test_a_device_is_asked_with_numbers(monkeypatch: pytest.MonkeyPatch, lost: bool | None, answer: bool) -> None:
    def product(x: torch.Tensor, grad: torch.Tensor, total: torch.Tensor) -> None:
        if lost is None:
            raise NotImplementedError("Could not run 'aten::addmm.dtype_out'")
        total += (grad.float().T @ x.float()) if not lost else grad.T @ x
        if lost:
            total.copy_(total.bfloat16())

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(weight_gradient, "wgrad_gemm_accum_fp32", product)
    assert adds_up.__wrapped__("cpu") is answer


def test_megatron_gets_it_for_apexs(monkeypatch: pytest.MonkeyPatch) -> None:
    """And keeps Apex's where that is installed."""
    monkeypatch.setattr(layers, "_grad_accum_fusion_available", True)
    monkeypatch.setattr(layers, "fused_weight_gradient_mlp_cuda", "Apex's", raising=False)
    take_apexs_place()
    assert layers.fused_weight_gradient_mlp_cuda == "Apex's"
    monkeypatch.setattr(layers, "_grad_accum_fusion_available", False)
    take_apexs_place()
    assert layers.fused_weight_gradient_mlp_cuda is weight_gradient
    assert layers._grad_accum_fusion_available
