"""What vLLM's CUDA build becomes on an H100, as far as it goes without one; prints JSON.

    python -m tests.support.bare_gpu DIRECTORY

DIRECTORY: of a mixture's config.json.  Its extensions are the real ones, loaded over a driver that has no device
(``stub_driver``); answers about the device are those of ``tests/support/vllm_platforms.py``.  No kernel runs.
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

EXTENSIONS = (
    "_C_stable_libtorch", "_moe_C_stable_libtorch", "cumem_allocator", "vllm_flash_attn._vllm_fa2_C",
    "vllm_flash_attn._vllm_fa3_C",
)  # fmt: skip
# What a rollout engine's processes import, of vLLM's and of ours.
IMPORTED = (
    "vllm.v1.engine.async_llm", "vllm.v1.engine.core", "vllm.v1.worker.gpu_worker", "vllm.v1.worker.gpu_model_runner",
    "vllm.v1.worker.gpu.model_runner", "vllm.v1.attention.backends.flash_attn", "vllm.model_executor.models.mixtral",
    "vllm.model_executor.models.qwen2", "vllm.lora.worker_manager", "vllm.device_allocator.cumem",
    "mcore_rl.rollout.vllm.engine.vllm_engine", "mcore_rl.sync.receiver",
)  # fmt: skip


def stub_driver(site: Path, folder: Path) -> None:
    """Compile ``folder/libcuda.so.1``: all that the extensions in ``site`` want of the driver, and each call fails."""
    wanted = set[str]()
    for path in (*site.glob("vllm/*.so"), *site.glob("vllm/vllm_flash_attn/*.so")):
        listed = subprocess.run(["nm", "-D", "--undefined-only", path], capture_output=True, text=True, check=True)
        wanted |= set(re.findall(r" U (cu[A-Z]\w+)", listed.stdout))
    source = folder / "driver.cpp"
    source.write_text("".join(f'extern "C" int {name}() {{ return 100; }}\n' for name in sorted(wanted)))
    command = ["g++", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", folder / "libcuda.so.1", source]
    subprocess.run(command, check=True)


def main(directory: str) -> None:
    """Load, import, configure, and print what came of it."""
    import torch

    from tests.support.vllm_platforms import cuda_platform

    for name in EXTENSIONS:
        importlib.import_module(f"vllm.{name}")
    from vllm import platforms

    platforms._current_platform = cuda_platform("sm90")
    for name in IMPORTED:
        importlib.import_module(name)
    print(json.dumps(engine_of(Path(directory)) | {"torch": torch.__version__}))


def engine_of(directory: Path) -> dict[str, Any]:
    """What a run's engine becomes: attention's and the experts' kernels, executor, extension, dtype."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version
    from vllm.v1.attention.selector import get_attn_backend
    from vllm.v1.executor import Executor

    from mcore_rl.config.engine import Device
    from mcore_rl.config.rollout import RolloutConfig
    from mcore_rl.families.config_json import read_config
    from mcore_rl.families.registry import model_of
    from mcore_rl.parallel.device import detect
    from mcore_rl.rollout.vllm.engine.environment import engine_arguments
    from tests.support.vllm_platforms import EXTENSION, chosen_experts

    _, model = model_of(read_config(directory))
    platform = replace(detect(Device.cpu), kind=Device.cuda, device_type="cuda", backend="nccl")
    config = RolloutConfig(max_prompt_length=32, max_response_length=32)
    arguments = engine_arguments(directory, config, model, platform, EXTENSION)
    settings = AsyncEngineArgs(**arguments).create_engine_config()
    with set_current_vllm_config(settings):
        head_size = settings.model_config.get_head_size()
        attention = get_attn_backend(head_size, torch.bfloat16, "auto").get_name()
        version = get_flash_attn_version(head_size=head_size)
    experts, kept, _ = chosen_experts(settings, settings.kernel_config.moe_backend)
    return {
        "attention": f"{attention} {version}",
        "experts": experts,
        "kept": kept,
        "executor": Executor.get_class(settings).__name__,
        "extension": settings.parallel_config.worker_extension_cls,
        "dtype": str(settings.model_config.dtype),
        "sleeps": settings.model_config.enable_sleep_mode,
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
