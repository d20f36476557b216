"""What vLLM decides on an accelerator that is not here: kernels of experts, engines on nodes; it prints JSON.

    python -m tests.support.vllm_platforms cuda|rocm DIRECTORY

DIRECTORY: of a mixture's config.json.  The platform is vLLM's own class with answers about a device put in, and what
the wheel for it brings (FlashInfer, AITER) is said to be there.  ``AsyncEngineArgs`` then makes the ``VllmConfig``,
fused_moe/oracle/unquantized.py chooses, and what it does to weights at loading is done to some.  No kernel runs.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import os
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mcore_rl.config.engine import Device
from mcore_rl.config.placement import engine_nodes
from mcore_rl.config.rollout import MoeBackend, RolloutConfig, parse_rollout_layout
from mcore_rl.families.config_json import read_config
from mcore_rl.families.registry import model_of
from mcore_rl.parallel.device import detect
from mcore_rl.rollout.vllm.engine.engine_node import EngineNode, Meeting
from mcore_rl.rollout.vllm.engine.environment import engine_arguments

EXTENSION = "mcore_rl.sync.receiver.SyncReceiver"
DEVICES = {
    "cuda": {"sm90": (9, 0), "sm100": (10, 0)},
    "rocm": {"gfx942": (9, 4), "gfx942 with AITER asked for": (9, 4)},
}


def answers(name: str) -> dict[str, Any]:
    """What a device of the platform answers, of 80 GiB and eight to a node."""
    values = dict(
        get_device_name=name, get_device_total_memory=80 << 30, device_count=8, is_fully_connected=True,
        num_compute_units=132, is_integrated_gpu=False, get_all_device_numa_nodes=None,
        is_cumem_allocator_available=True,
    )  # fmt: skip
    return {method: staticmethod(lambda *_, _value=value, **__: _value) for method, value in values.items()}


def cuda_platform(name: str) -> Any:
    """A ``CudaPlatform`` of compute capability ``name``."""
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    capability = DeviceCapability(*DEVICES["cuda"][name])
    methods = answers(name) | {"get_device_capability": staticmethod(lambda *_, **__: capability)}
    return type(name, (NonNvmlCudaPlatform,), methods)()


def rocm_platform(name: str) -> Any:
    """A ``RocmPlatform`` of the architecture that ``name`` begins with."""
    architecture = name.partition(" ")[0]
    torch.cuda.get_device_properties = lambda *_: types.SimpleNamespace(gcnArchName=f"{architecture}:sramecc+:xnack-")
    from vllm.platforms.cpu import CpuPlatform

    # ROCm's kernels are in vllm._C, which in the CPU's build are those for AVX-512 with bfloat16: not every CPU has it.
    CpuPlatform.import_kernels()
    sys.modules.setdefault("vllm._C", types.ModuleType("vllm._C"))
    from vllm.platforms.rocm import RocmPlatform

    return type(name, (RocmPlatform,), answers(name))()


def bring_libraries(vendor: str) -> None:
    """Says that the libraries of the vendor's wheel are there, to those who ask whether they are."""
    if vendor == "rocm":
        find_spec = importlib.util.find_spec
        aiter = importlib.machinery.ModuleSpec("aiter", None)
        importlib.util.find_spec = lambda name, *rest: aiter if name == "aiter" else find_spec(name, *rest)
    else:
        for name in ("_vllm_fa2_C", "_vllm_fa3_C"):
            sys.modules[f"vllm.vllm_flash_attn.{name}"] = types.ModuleType(name)
        for name in ("fp8", "block_fp8", "fp4"):  # the CUDA build's operators, which quantised layers ask at import
            setattr(torch.ops._C, f"cutlass_scaled_mm_supports_{name}", lambda _: True)
        from vllm.utils import flashinfer

        for name in ("has_flashinfer", "has_flashinfer_trtllm_fused_moe", "has_flashinfer_cutlass_fused_moe"):
            setattr(flashinfer, name, lambda: True)


def outcome(directory: Path, vendor: str, backend: MoeBackend, updated: bool) -> dict[str, Any]:
    """What becomes of a rollout with ``backend``: vLLM's setting, its choice, and whether weights stay as loaded."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    _, model = model_of(read_config(directory))
    platform = replace(detect(Device.cpu), kind=Device[vendor], device_type="cuda", backend="nccl")
    config = RolloutConfig(moe_backend=backend, max_prompt_length=32, max_response_length=32)
    arguments = engine_arguments(directory, config, model, platform, EXTENSION if updated else None)
    settings = AsyncEngineArgs(**arguments).create_engine_config()
    setting = settings.kernel_config.moe_backend
    try:
        chosen, kept, with_adapters = chosen_experts(settings, setting)
    except (ValueError, NotImplementedError) as error:
        return {"setting": setting, "refused": str(error)}
    return {"setting": setting, "chosen": chosen, "kept": kept} | with_adapters


def chosen_experts(settings: Any, setting: str) -> tuple[str, bool | None, dict[str, str]]:
    """(the backend, whether weights stay in place as loaded, the backends where the engine applies adapters).

    None: a library that is not here would convert them.  Of the last, one is vLLM's choice, one that of our workers.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import (
        FusedMoEConfig,
        FusedMoEParallelConfig,
        RoutingMethodType,
    )
    from vllm.model_executor.layers.fused_moe.oracle import unquantized

    from mcore_rl.rollout.vllm.receiver.plain_experts import as_without_adapters

    hf = settings.model_config.hf_config
    with set_current_vllm_config(settings):
        moe = FusedMoEConfig(
            num_experts=hf.num_local_experts, num_local_experts=hf.num_local_experts,
            num_logical_experts=hf.num_local_experts, experts_per_token=hf.num_experts_per_tok,
            hidden_dim=hf.hidden_size, intermediate_size=hf.intermediate_size, activation=MoEActivation.SILU,
            device="cuda", routing_method=RoutingMethodType.Renormalize, in_dtype=torch.bfloat16,
            moe_parallel_config=FusedMoEParallelConfig.make_no_parallel(), moe_backend=setting,
            max_num_tokens=settings.scheduler_config.max_num_batched_tokens,
        )  # fmt: skip
        backend, experts = unquantized.select_unquantized_moe_backend(moe)
        assert experts is not None
        adapted = replace(moe, is_lora_enabled=True)
        choices = {"adapters, vLLM's": unquantized.select_unquantized_moe_backend, "adapters": as_without_adapters}
        with_adapters = {name: choose(adapted)[0].name for name, choose in choices.items()}
        w13 = torch.randn(hf.num_local_experts, 2 * hf.intermediate_size, hf.hidden_size).bfloat16()
        w2 = torch.randn(hf.num_local_experts, hf.hidden_size, hf.intermediate_size).bfloat16()
        before = w13.clone(), w2.clone()
        try:
            after = unquantized.convert_to_unquantized_kernel_format(backend, moe, w13, w2)
        except (ImportError, AttributeError):  # FlashInfer's and AITER's own kernels convert
            return backend.name, None, with_adapters
    kept = all(map(torch.equal, before, after)) and after[0].data_ptr() == w13.data_ptr()
    return backend.name, kept, with_adapters


def on_nodes(directory: Path, vendor: str, text: str) -> list[dict[str, Any]]:
    """What becomes of an engine of a layout on nodes of two devices: vLLM's settings on each of them."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.executor import Executor

    _, model = model_of(read_config(directory))
    platform = replace(detect(Device.cpu), kind=Device[vendor], device_type="cuda", backend="nccl")
    layout = parse_rollout_layout(text)
    config = RolloutConfig(tp=layout.tp, dp=layout.dp, ep=layout.ep, max_prompt_length=32, max_response_length=32)
    nodes, meeting = engine_nodes(layout, 2), Meeting(host="10.0.0.1", port=4711, rpc_port=4712)
    parts = []
    for rank in range(nodes):
        node = EngineNode(
            nnodes=nodes, node_rank=rank, address=f"10.0.0.{rank}", meeting=meeting if nodes > 1 else None
        )
        arguments = engine_arguments(directory, config, model, platform, EXTENSION, node=node)
        settings = AsyncEngineArgs(**arguments).create_engine_config(headless=rank > 0)
        parallel = settings.parallel_config
        names = ("nnodes", "node_rank", "node_rank_within_dp", "local_world_size", "data_parallel_rank",
                 "data_parallel_size_local")  # fmt: skip
        cores = f"{parallel.data_parallel_master_ip}:{parallel.data_parallel_rpc_port}"
        parts.append(
            {name: getattr(parallel, name) for name in names}
            | dict(executor=Executor.get_class(settings).__name__, extension=parallel.worker_extension_cls)
            | dict(ranks_meet=f"{parallel.master_addr}:{parallel.master_port}", cores_meet=cores)
        )
    return parts


def refusal_of(backend: str) -> str:
    """What vLLM says to a backend that it has not: the list of those that it has."""
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import map_unquantized_backend

    try:
        return str(map_unquantized_backend(backend))
    except ValueError as error:
        return str(error)


def main(vendor: str, directory: str) -> None:
    """Print {experts: device -> case -> outcome, nodes: layout -> settings of each node}."""
    make: Callable[[str], Any] = {"cuda": cuda_platform, "rocm": rocm_platform}[vendor]
    sys.modules["vllm._C_stable_libtorch"] = types.ModuleType("vllm._C_stable_libtorch")
    from vllm import platforms

    results: dict[str, dict[str, Any]] = {}
    names = list(DEVICES[vendor])
    made = {name: make(name) for name in names}
    current = platforms._current_platform = made[names[0]]
    bring_libraries(vendor)
    from vllm._aiter_ops import rocm_aiter_ops
    from vllm.utils import flashinfer

    for name in names:
        current.__class__ = type(made[name])  # modules keep the object that they found first
        if name.endswith("asked for"):
            os.environ["VLLM_ROCM_USE_AITER"] = "1"
            rocm_aiter_ops.refresh_env_variables()
        cases = {backend.value: outcome(Path(directory), vendor, backend, True) for backend in MoeBackend}
        cases["not updated"] = outcome(Path(directory), vendor, MoeBackend.auto, False)
        results[name] = cases | {"unknown": {"refused": refusal_of("none")}}
    flashinfer.has_flashinfer = lambda: False  # its fused reductions are operators of the CUDA build
    layouts = ("tp=2", "tp=4", "tp=2,dp=2,ep=4", "tp=4,dp=2,ep=8", "tp=1,dp=4,ep=4")
    nodes = {layout: on_nodes(Path(directory), vendor, layout) for layout in layouts}
    print(json.dumps({"experts": results, "nodes": nodes}))


if __name__ == "__main__":
    main(*sys.argv[1:])
