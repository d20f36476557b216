"""Which fused kernels and overlaps an engine uses: what its settings ask for, as far as the machine has it.

``None`` in a setting takes what is there.  Asking for what is not there is refused before Megatron would raise, or
compute without it in silence.  What is there is what Megatron itself found when it was imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.core.tensor_parallel import layers as parallel_linears
from megatron.core.transformer.moe import fused_a2a, moe_utils

from mcore_rl.config.engine import Dispatcher, EngineConfig, FlexBackend, LayerSpec
from mcore_rl.config.model import ModelConfig
from mcore_rl.ground.errors import Violation
from mcore_rl.parallel.device import Platform
from mcore_rl.parallel.layout import Layout
from mcore_rl.parallel.weight_gradient import adds_up

# What transformer_config.py (__post_init__, moe_permute_fusion) looks for, Transformer Engine 2.1 and newer.
PERMUTE_KERNELS = (
    "fused_permute",
    "fused_permute_with_probs",
    "fused_sort_chunks_by_index",
    "fused_sort_chunks_by_index_with_probs",
    "fused_unpermute",
)


@dataclass(frozen=True, kw_only=True)
class Fusions:
    """What is used; see the settings of the same names."""

    overlap_grad_reduce: bool = False
    gradient_accumulation_fusion: bool = False
    permute_fusion: bool = False
    tp_comm_overlap: bool = False


UNFUSED = Fusions()


def resolve_fusions(
    config: EngineConfig, model: ModelConfig, layout: Layout, platform: Platform, layer_spec: LayerSpec
) -> tuple[Fusions, list[Violation]]:
    """(what is used, violations).  layer_spec: resolved, not ``auto``."""
    violations = []
    accumulates = config.gradient_accumulation_fusion
    permutes = config.moe.permute_fusion
    no_accumulation = _no_accumulation(platform)
    no_permutation = _no_permutation(model, platform)
    for key, wanted, problem in (
        ("gradient_accumulation_fusion", accumulates, no_accumulation),
        ("moe.permute_fusion", permutes, no_permutation),
    ):
        if wanted and problem is not None:
            violations.append(Violation(key, True, problem, f"Write {key}=null, which uses it where it is there"))
    if config.moe.dispatcher is Dispatcher.flex and model.moe is not None:
        violations += _flex_violations(config.moe.flex_backend, layout, platform)
    if config.tp_comm_overlap:
        violations += _overlap_violations(config, model, layout, layer_spec)
    if permutes is None:
        permutes = layer_spec is LayerSpec.transformer_engine and no_permutation is None
    if accumulates is None:
        accumulates = no_accumulation is None
    fusions = Fusions(
        overlap_grad_reduce=config.overlaps_reduction(accelerator=platform.is_accelerator),
        gradient_accumulation_fusion=accumulates,
        permute_fusion=permutes,
        tp_comm_overlap=config.tp_comm_overlap,
    )
    return fusions, violations


def share_buffers(rows: int, model: ModelConfig, layout: Layout, platform: Platform) -> None:
    """Makes the buffers of ``tp_comm_overlap``, once per process, as Megatron's training does.  Collective.

    rows: of a microbatch on one context rank, over its tensor ranks.
    """
    from transformer_engine.pytorch.module import base  # type: ignore[import-not-found]  # where it is installed

    unquantised: dict[str, Any] = {"use_fp8": False}
    if "UserBufferQuantizationMode" in vars(base):  # 2.7 and newer
        unquantised = {"quantization_modes": [base.UserBufferQuantizationMode.NONE]}
    base.initialize_ub(
        shape=[rows, model.hidden_size],
        tp_size=layout.tp,
        ub_cfgs={},
        bootstrap_backend=platform.backend,
        **unquantised,
    )


def _overlap_violations(
    config: EngineConfig, model: ModelConfig, layout: Layout, layer_spec: LayerSpec
) -> list[Violation]:
    """Refuses ``tp_comm_overlap`` where Transformer Engine would do without it in silence, or fail in a step."""
    problems = {
        "Transformer Engine's layers do it, and they are not used here": layer_spec is LayerSpec.local,
        "parallel.tp=1: there is nothing to communicate": layout.tp == 1,
        "it has no buffers for latent attention's projections": model.mla is not None,
        "its buffers have one shape, which microbatch_tokens gives": config.microbatch_tokens is None,
    }
    return [
        Violation("tp_comm_overlap", True, problem, "Write tp_comm_overlap=false")
        for problem, holds in problems.items()
        if holds
    ]


def _no_accumulation(platform: Platform) -> str | None:
    if not platform.is_accelerator:
        return "it is a kernel for accelerators"
    if not parallel_linears._grad_accum_fusion_available and not adds_up(platform.device_type):
        return "torch adds no bfloat16 product to a float32 matrix here, and NVIDIA Apex is not installed"
    return None


def _no_permutation(model: ModelConfig, platform: Platform) -> str | None:
    if model.moe is None:
        return "the model has no experts"
    if not platform.is_accelerator:
        return "it is a kernel for accelerators"
    if any(vars(moe_utils).get(name) is None for name in PERMUTE_KERNELS):
        return "Transformer Engine 2.1 or newer cannot be imported"
    return None


def _flex_violations(backend: FlexBackend, layout: Layout, platform: Platform) -> list[Violation]:
    """Refuses the flex dispatcher where ``MoEFlexTokenDispatcher`` (token_dispatcher.py) would raise."""
    there = {FlexBackend.deepep: fused_a2a.HAVE_DEEP_EP, FlexBackend.hybridep: fused_a2a.HAVE_HYBRIDEP}
    violations = []
    remedy = "Write moe.dispatcher=alltoall"
    if not platform.is_accelerator:
        violations.append(Violation("moe.dispatcher", "flex", "its kernels are for accelerators", remedy))
    elif not there[backend]:
        problem = f"DeepEP's package deep_ep, with {backend.value}, cannot be imported"
        violations.append(Violation("moe.flex_backend", backend.value, problem, f"Install it. {remedy}"))
    if layout.ep * layout.etp == 1:
        problem = "it sends tokens between ranks, and parallel.ep and parallel.etp are 1"
        violations.append(Violation("moe.dispatcher", "flex", problem, f"{remedy}, or raise parallel.ep"))
    return violations
