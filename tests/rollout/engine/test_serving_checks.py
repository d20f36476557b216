"""What vLLM's CPU build cannot run, which nothing of the model's layout says."""

from __future__ import annotations

import ast
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from mcore_rl.config.engine import Device
from mcore_rl.config.model import MoeConfig
from mcore_rl.config.rollout import RolloutConfig
from mcore_rl.families.registry import FAMILIES
from mcore_rl.parallel.device import detect
from mcore_rl.rollout.engine import serving_checks
from mcore_rl.rollout.engine.serving_checks import BESIDE_A_TOWER, architecture_violations, engine_violations
from tests.support import models, text_parts
from tests.support.published import TINY


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


def test_a_language_model_beside_a_tower_needs_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a checkpoint with a tower, too, whose text part is what runs."""
    wholes = [text_parts.config(f"{name}ForConditionalGeneration") for name in ("Qwen3_5", "Qwen3_5Moe")]
    beside = [TINY["qwen3_5_text"], TINY["qwen3_5_moe_text"], *wholes]
    monkeypatch.setattr(serving_checks, "find_spec", lambda name: None)
    for config in beside:
        (violation,) = architecture_violations(config)
        assert violation.value in BESIDE_A_TOWER and "pip install --no-deps torchvision" in violation.remedy
    for config in (TINY["qwen3_next"], text_parts.config("Qwen3VLForConditionalGeneration")):
        assert architecture_violations(config) == []
    monkeypatch.setattr(serving_checks, "find_spec", lambda name: name)
    assert [each for config in beside for each in architecture_violations(config)] == []


def test_what_stands_beside_a_tower_is_what_vllm_says() -> None:
    """The architectures of ours whose file of vLLM's imports a processor of pictures."""
    file = find_spec("vllm")
    assert file is not None and file.origin is not None
    models_of = Path(file.origin).parent / "model_executor" / "models"
    registered = ast.parse((models_of / "registry.py").read_text(encoding="utf-8"))
    modules: dict[str, str] = {}
    for node in ast.walk(registered):
        for key, value in zip(node.keys, node.values, strict=True) if isinstance(node, ast.Dict) else ():
            match key, value:
                case ast.Constant(value=str(name)), ast.Tuple(elts=[ast.Constant(value=str(module)), *_]):
                    modules[name] = module
    ours = [name for family in FAMILIES.values() for name in family.architectures if name in modules]
    seeing = [
        name
        for name in ours
        if (file_of := models_of / f"{modules[name]}.py").is_file() and "MULTIMODAL_REGISTRY" in file_of.read_text()
    ]
    assert sorted(seeing) == sorted(BESIDE_A_TOWER)
