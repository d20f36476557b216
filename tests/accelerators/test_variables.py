"""Every variable of vLLM's and torch's that we set, or name in docs/amd.md, is one that the installed version reads."""

from __future__ import annotations

import mmap
import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from mcore_rl.config.engine import Device
from mcore_rl.config.launch import load_cluster
from mcore_rl.config.rollout import RolloutConfig
from mcore_rl.parallel.device import detect
from mcore_rl.parallel.device_details import UNWATCHED
from mcore_rl.rollout.vllm.engine.engine_node import EngineNode, Meeting
from mcore_rl.rollout.vllm.engine.environment import engine_environment
from tests.house.source import ROOT

CPU = detect(Device.cpu)
ROCM = replace(CPU, kind=Device.rocm, device_type="cuda", num_devices=8)
NODE = EngineNode(nnodes=2, node_rank=0, address="127.0.0.1", meeting=Meeting(host="127.0.0.1", port=1, rpc_port=2))
AMD = (ROOT / "docs" / "amd.md").read_text()
TORCH = Path(torch.__file__).parent


def test_vllm_reads_the_variables_that_have_its_name() -> None:
    spec = find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations
    known = set(re.findall(r'"(VLLM_\w+)":', (Path(spec.submodule_search_locations[0]) / "envs.py").read_text()))
    for platform in (CPU, ROCM):
        ours = engine_environment(
            platform, RolloutConfig(tp=2), (0, 1), scratch=Path("/scratch"), node=NODE, environ={}
        )
        named = {name for name in ours if name.startswith("VLLM_")} | set(re.findall(r"\bVLLM_[A-Z0-9_]+[A-Z0-9]", AMD))
        assert named and named <= known


def test_torch_reads_the_variables_of_its_collectives() -> None:
    header = (TORCH / "include" / "torch" / "csrc" / "distributed" / "c10d" / "ProcessGroupNCCL.hpp").read_text()
    set_ = {*UNWATCHED, *load_cluster("amd_mi300x").environment}
    assert {name for name in set_ if name.startswith("TORCH_NCCL")} <= set(re.findall(r'"(\w+)"', header))


@pytest.mark.tier("ci")
def test_torch_reads_the_variable_of_its_products() -> None:
    (name,) = (each for each in load_cluster("amd_mi300x").environment if each.startswith("TORCH_BLAS"))
    with (TORCH / "lib" / "libtorch_cpu.so").open("rb") as file:
        assert mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ).find(name.encode()) > 0
