"""The masks of one node from Slurm through Ray to torch and vLLM: each reads them with its own installed code."""

from __future__ import annotations

import ast
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from ray._private.accelerators.amd_gpu import AMDGPUAcceleratorManager
from ray._private.accelerators.nvidia_gpu import NvidiaGPUAcceleratorManager

from mcore_rl.config.engine import Device
from mcore_rl.ground.errors import DeviceError
from mcore_rl.parallel.device import (
    MASKS,
    RAY_NOSET,
    consistent_environment,
    ray_environment,
    visible_devices,
)

CUDA, HIP, ROCR, ORDINAL = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"
EIGHT = ",".join(map(str, range(8)))
MANAGERS = {Device.cuda: NvidiaGPUAcceleratorManager, Device.rocm: AMDGPUAcceleratorManager}
# What a Slurm sets: gres.conf without AutoDetect names all vendors' masks, AutoDetect=rsmi AMD's own.
FROM_SLURM = {
    "all three, a whole node": {CUDA: EIGHT, ROCR: EIGHT, ORDINAL: EIGHT},
    "all three, renumbered by its control group": {CUDA: "0,1", ROCR: "0,1", ORDINAL: "0,1"},
    "AMD's own": {ROCR: "4,5,6,7"},
    "NVIDIA's own": {CUDA: "4,5,6,7"},
    "none": {},
}


def become(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str | None]) -> None:
    """Give this process an environment, as an exec would; what anybody sets in it meanwhile ends with the test."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value or "")  # Deleting what is not there would remember nothing to go back to.
        if value is None:
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def no_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    become(monkeypatch, dict.fromkeys((*MASKS, *RAY_NOSET)))


def vllm_s_check() -> None:
    """``_sync_hip_cuda_env_vars`` of the installed vLLM, whose module wants AMD's library; it refuses disagreement."""
    spec = find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations
    source = (Path(spec.submodule_search_locations[0]) / "platforms" / "rocm.py").read_text()
    (check,) = [
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name == "_sync_hip_cuda_env_vars"
    ]
    names: dict[str, Any] = {"os": os}
    exec(compile(ast.Module([check], []), "rocm.py", "exec"), names)
    names["_sync_hip_cuda_env_vars"]()


def torch_sees(monkeypatch: pytest.MonkeyPatch, kind: Device) -> list[int] | list[str]:
    """What torch built for ``kind`` reads out of the masks."""
    monkeypatch.setattr(torch.version, "hip", "7.1" if kind is Device.rocm else None)
    return torch.cuda._parse_visible_devices()  # type: ignore[no-untyped-call,no-any-return]


@pytest.mark.parametrize("kind", [Device.cuda, Device.rocm])
@pytest.mark.parametrize("case", FROM_SLURM)
def test_what_slurm_sets_reaches_every_worker_as_one_device(
    monkeypatch: pytest.MonkeyPatch, kind: Device, case: str
) -> None:
    become(monkeypatch, dict(FROM_SLURM[case]))
    given = visible_devices(kind, os.environ).ids
    become(monkeypatch, ray_environment(kind))
    manager = MANAGERS[kind]
    ids = manager.get_current_process_visible_accelerator_ids()
    assert (None if ids is None else tuple(ids)) == given, "Ray deals out what Slurm gave"

    # Ray numbers unmasked devices from 0, and shows a training worker one of them.
    dealt = (ids or list("01234567"))[-1]
    manager.set_current_process_visible_accelerator_ids([dealt])
    assert visible_devices(kind, os.environ).ids == (dealt,)
    assert torch_sees(monkeypatch, kind) == [int(dealt)]
    if kind is Device.rocm:
        vllm_s_check()

    # An engine is shown several by us; it may be the child of a worker that has one.
    several = ids or list("01234567")
    become(monkeypatch, consistent_environment(kind, several))
    assert visible_devices(kind, os.environ).ids == tuple(several)
    assert torch_sees(monkeypatch, kind) == list(map(int, several))
    manager.set_current_process_visible_accelerator_ids(["0"])
    assert visible_devices(kind, os.environ).ids == tuple(several), "a Ray below leaves the masks alone"
    if kind is Device.rocm:
        vllm_s_check()


def test_without_the_device_layer_ray_and_vllm_refuse_what_slurm_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    """That is what the functions are for; where it no longer holds, they may go."""
    become(monkeypatch, {ROCR: EIGHT})
    with pytest.raises(RuntimeError, match="instead of ROCR_VISIBLE_DEVICES"):
        AMDGPUAcceleratorManager.get_current_process_visible_accelerator_ids()
    become(monkeypatch, {ROCR: None, CUDA: EIGHT})
    AMDGPUAcceleratorManager.set_current_process_visible_accelerator_ids(["3"])
    with pytest.raises(ValueError, match="Inconsistent GPU visibility env vars"):
        vllm_s_check()
    with pytest.raises(DeviceError, match="disagree"):
        visible_devices(Device.rocm, os.environ)


def test_a_contradiction_of_slurm_s_is_told_before_ray_starts() -> None:
    with pytest.raises(DeviceError, match=f"{CUDA}=2,3 indexes the 2 devices that {ROCR}=2,3 leaves"):
        ray_environment(Device.rocm, {ROCR: "2,3", CUDA: "2,3"})


def test_a_ray_of_cores_is_started_with_the_masks_that_are_there() -> None:
    assert set(ray_environment(Device.cpu, {CUDA: "nonsense"})) == set(RAY_NOSET)
