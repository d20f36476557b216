"""What vLLM's CPU build cannot run, which nothing of the model's layout says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mcore_rl.config.engine import Device
from mcore_rl.config.model import MoeConfig
from mcore_rl.config.rollout import Quantization, RolloutConfig
from mcore_rl.families.registry import FAMILIES
from mcore_rl.parallel.device import detect
from mcore_rl.rollout.vllm.engine.admission import engine_violations, quantization_violations
from tests.support import models
from tests.support.fp8_on_cpu import PLUGIN


@pytest.mark.parametrize(("width", "tp", "wrong"), [(64, 2, False), (96, 1, False), (96, 2, True), (48, 1, True)])
def test_experts_with_a_clamped_gate_are_not_padded_on_a_cpu(width: int, tp: int, wrong: bool) -> None:
    model = models.gpt_oss(ffn_hidden_size=width, moe=MoeConfig(num_experts=8, top_k=3, ffn_hidden_size=width))
    violations = engine_violations(model, RolloutConfig(tp=tp), detect(Device.cpu))
    assert [violation.key for violation in violations] == (["rollout.tp"] if wrong else [])
    assert all("whole 32s" in violation.problem for violation in violations)
    other = models.moe(moe=MoeConfig(num_experts=4, top_k=2, ffn_hidden_size=width))
    assert engine_violations(other, RolloutConfig(tp=tp), detect(Device.cpu)) == []


def test_a_router_of_sigmoids_without_groups_needs_a_gpu() -> None:
    """MiniMax-M2's; GLM-4.5's sigmoids are of one group."""
    cpu = detect(Device.cpu)
    (violation,) = engine_violations(models.minimax_m2(), RolloutConfig(), cpu)
    assert violation.key == "model.moe.score" and "GPU" in violation.remedy
    assert engine_violations(models.glm4_moe(), RolloutConfig(), cpu) == []
    rocm = replace(cpu, kind=Device.rocm, device_type="cuda")
    assert engine_violations(models.minimax_m2(), RolloutConfig(), rocm) == []


def test_a_cpu_has_no_kernels_for_quantised_weights_but_a_plugin_s(monkeypatch: pytest.MonkeyPatch) -> None:
    family, model = FAMILIES["llama"], models.dense(hidden_size=256, ffn_hidden_size=256, head_dim=32)
    cpu, config = detect(Device.cpu), RolloutConfig(quantization=Quantization.fp8_channel)
    (violation,) = quantization_violations(family, model, config, cpu)
    assert str(violation) == (
        "rollout.quantization=fp8_channel: vLLM has no kernels for it on a CPU. "
        "Write none, or install a plugin of vLLM named fp8_on_cpu that brings some"
    )
    assert not list(quantization_violations(family, model, RolloutConfig(), cpu))
    hopper = replace(cpu, kind=Device.cuda, device_type="cuda", num_devices=1, supports_fp8=True)
    for platform, fits in ((hopper, True), (replace(hopper, supports_fp8=False), False)):
        assert (list(quantization_violations(family, model, config, platform)) == []) is fits
    (violation,) = quantization_violations(family, model, config, replace(hopper, kind=Device.rocm))
    assert "needs devices that compute in float8_e4m3fn" in str(violation), "MI300's fp8 is another format"
    monkeypatch.syspath_prepend(str(PLUGIN))
    assert not list(quantization_violations(family, model, config, cpu))
