"""Ranges of steps, and the measured runs that they name."""

from __future__ import annotations

import pytest

from mcore_rl.config.launch import load_cluster
from mcore_rl.planning.measured_runs import WITHIN, measured_runs
from mcore_rl.planning.step_range import ALIKE, UNKNOWN, Calibration, calibration_of


def calibration(cluster: str, billions: float, *, experts: bool = False, fused: bool = True) -> Calibration:
    return calibration_of(load_cluster(cluster), billions=billions, experts=experts, fused=fused)


@pytest.mark.parametrize(
    ("cluster", "billions", "experts", "fused", "run"),
    [
        ("nvidia_h100", 7.0, False, True, "Llama-3.1-8B-Instruct GRPO, 8 H100, NeMo-RL v0.3"),
        ("nvidia_h200", 33.0, False, True, "Qwen3-32B GRPO, 64 H100, NeMo-RL v0.3"),
        ("nvidia_h100", 30.0, True, True, "Qwen3-30B-A3B GRPO, 32 H100, NeMo-RL v0.6"),
        ("nvidia_b200", 1000.0, True, True, "DeepSeek-V3 GRPO, 128 GB200, NeMo-RL v0.6"),
        ("amd_mi325x", 7.0, False, False, "deepseek-llm-7b-chat GRPO, 8 MI300X, verl of 2025-03"),
    ],
)
def test_a_run_like_a_measured_one_names_the_nearest(
    cluster: str, billions: float, experts: bool, fused: bool, run: str
) -> None:
    nearest = calibration(cluster, billions, experts=experts, fused=fused)
    assert nearest.alike and nearest.run == run and nearest.text.startswith(f"calibrated on {run}")
    low, high = nearest.range_s(100.0)
    assert low * (1 + WITHIN) == pytest.approx(100) and high * (1 - WITHIN) == pytest.approx(100)


@pytest.mark.parametrize(
    ("cluster", "experts", "fused", "run"),
    [
        ("nvidia_a100", False, True, "Llama-3.1-8B"),  # of the A100 row only generation counts
        ("nvidia_l40s", False, True, "Llama-3.1-8B"),
        ("nvidia_rtx4090", True, True, "Qwen3-30B-A3B"),
        ("amd_mi355x", False, False, "Llama-3.1-8B"),
        ("amd_mi300x", True, False, "Qwen3-30B-A3B"),
        ("nvidia_h200", False, False, "1.2B dense, one H200"),
        ("nvidia_h100", True, False, "1B with 8 experts launched one by one, one H200"),
    ],
)
def test_other_runs_have_a_wider_range(cluster: str, experts: bool, fused: bool, run: str) -> None:
    nearest = calibration(cluster, 8.0, experts=experts, fused=fused)
    assert not nearest.alike and nearest.run.startswith(run) and "no measured run has this" in nearest.text
    local_experts = experts and not fused  # measured before they were one product: faster now, nobody knows by how much
    assert nearest.range_s(100.0) == (pytest.approx(50 if local_experts else 80), 100 * UNKNOWN)
    assert nearest.text.endswith("2 times as long, or half" if local_experts else "2 times as long")


def test_nothing_was_measured_on_a_cpu() -> None:
    nearest = calibration("cpu", 0.5)
    assert (
        nearest.run == ""
        and nearest.range_s(10.0) == (5.0, 20.0)
        and nearest.text.startswith("no measured run is like")
    )


def test_every_device_of_a_row_has_a_family() -> None:
    assert {run.device for run in measured_runs()} <= {word for family in ALIKE for word in family}
