"""What tests/support/bridges.py asks mbridge and Megatron-Bridge: models of each, layouts, and what they cannot do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from mcore_rl.config.megatron_versions import megatron_version
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.parallel import parse_layout
from mcore_rl.parallel.layout import layout_violations
from tests.support import checkpoints, models

WORLD_SIZE = 4
LAYOUTS = ("", "tp=2,pp=2", "tp=4", "pp=2,vpp=2")  # tp=4: twice the key/value heads
EXPERT_LAYOUTS = ("", "pp=2,vpp=2,ep=2", "tp=2,pp=2,ep=2,etp=1", "tp=2,ep=2,etp=2")
OF_MEGATRON = {"0.16.1": "0.3.1", "0.19.2": "0.6.2"}  # megatron-core's -> Megatron-Bridge's
VERSIONS = {"mbridge": "0.15.1", "megatron-bridge": OF_MEGATRON[megatron_version()]}
LIKE = {"moonlight": "deepseek_v3"}  # a model of which family it is

_BOTH = ("llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3", "glm4_moe")
_SHARED = {name: checkpoints.MODELS[name] for name in _BOTH} | {"moonlight": models.deepseek_v3(q_lora_rank=None)}
_SINCE_0_6_2 = {"glm4_moe_lite", "minimax_m2"}
_MEGATRON_BRIDGE = ("gpt_oss", "qwen3_next", "mistral", "deepseek_v2", "olmoe", "gemma2", "gemma3_text")
_MEGATRON_BRIDGE += () if VERSIONS["megatron-bridge"] == "0.3.1" else tuple(sorted(_SINCE_0_6_2))
_DIVISIBLE = 104  # a vocabulary: Megatron-Bridge pads none ("a vocabulary that tp does not divide" below)
# The models of each bridge.
MODELS: dict[str, dict[str, ModelConfig]] = {
    "mbridge": _SHARED
    | {
        "mixtral": checkpoints.MODELS["mixtral"],
        "qwen2_moe": replace(models.qwen2_moe(()), head_dim=12),  # every layer has experts ("dense layers" below)
    },
    "megatron-bridge": {
        name: replace(model, vocab_size=_DIVISIBLE)
        for name, model in (_SHARED | {name: checkpoints.MODELS[name] for name in _MEGATRON_BRIDGE}).items()
    },
}
# Families without a bridge: neither registers one for their ``model_type`` (mbridge) or class (Megatron-Bridge).
_NEITHER = {"phi3", "seed_oss", "smollm3", "ernie4_5", "qwen3_5_text", "qwen3_5_moe_text"}
UNKNOWN = {
    "mbridge": {"mistral", "gemma2", "gemma3_text", "olmoe", "deepseek_v2", "gpt_oss", "qwen3_next"}
    | _NEITHER
    | _SINCE_0_6_2,
    "megatron-bridge": {"mixtral", "qwen2_moe"} | _NEITHER | (_SINCE_0_6_2 - set(_MEGATRON_BRIDGE)),
}


def layouts(bridge: str, model: ModelConfig) -> Iterator[str]:
    """Those of its kind that it can have (experts with biases are never cut), less those that LIMITS has."""
    for layout in LAYOUTS if model.moe is None else EXPERT_LAYOUTS:
        whole_norm = model.joint_qk_norm and "tp=" in layout
        tied_stages = model.tie_output and "vpp=" in layout and bool(LIMITS["a tied output under vpp"].now)
        limited = bridge == "megatron-bridge" and (whole_norm or tied_stages)
        if not limited and not layout_violations(model, parse_layout(layout), WORLD_SIZE):
            yield layout


@dataclass(frozen=True, kw_only=True)
class Limit:
    """What a bridge does not do, at all or without an adaptation of ``bridge_adapters``.

    models: asked one after the other, each to be loaded and exported; the last comes out wrong, or one is refused.
    without: the adaptation that is left out.  says: part of the refusal, or of a name that comes out wrong.
    beside_0_19: the same with the versions beside megatron-core 0.19.2, where it differs; "" where all comes out right.
    """

    bridge: str
    models: tuple[ModelConfig, ...]
    says: str
    layout: str = ""
    without: str = ""
    beside_0_19: str | None = None

    @property
    def now(self) -> str:
        """What it says with the versions that are installed."""
        return self.says if self.beside_0_19 is None or megatron_version() == "0.16.1" else self.beside_0_19


_MIXTRAL, _QWEN2 = (checkpoints.MODELS[name] for name in ("mixtral", "qwen2"))
LIMITS = {
    # Qwen2MoEBridge._MLP_MAPPING has no name of theirs.
    "dense layers": Limit(
        bridge="mbridge", models=(checkpoints.MODELS["qwen2_moe"],), says="Unsupported parameter name: decoder.layers."
    ),
    # Bridge.export_weights gathers them over tp, and _weight_merge_across_tp expects as many as etp has.
    "experts whole under tp": Limit(
        bridge="mbridge",
        models=(_MIXTRAL,),
        layout="tp=2,etp=1",
        says="assert len(mcore_weights) == self.mpu.etp_size",
    ),
    # Qwen2Bridge._adjust_mapping_for_shared_weights writes into a table of the class.
    "a Qwen2 behind a tied one": Limit(
        bridge="mbridge",
        models=(_QWEN2, replace(_QWEN2, tie_output=False)),
        says="output_layer.weight",
    ),
    # DeepseekV3Bridge._build_config, for a megatron-core that had the field.
    "DeepSeek under megatron-core 0.16": Limit(
        bridge="mbridge",
        models=(checkpoints.MODELS["deepseek_v3"],),
        without="fields of megatron-core 0.16",
        says="unexpected keyword argument 'max_position_embeddings'",
    ),
    # DequantFP8SafetensorIO opens files with device="cuda".
    "DeepSeek without a GPU": Limit(
        bridge="mbridge",
        models=(checkpoints.MODELS["deepseek_v3"],),
        without="files read on a CPU",
        says="Found no NVIDIA driver" if torch.version.cuda else "requires a CUDA or other accelerator backend",
    ),
    # Bridge.export_weights gathers what is marked as split; Transformer Engine's Linear marks every weight (its
    # module/linear.py), also those of latents, which Megatron keeps whole (parallel_mode="duplicated").  0.19.2 takes
    # the mark from those (extensions/transformer_engine.py, TELinear.__init__).
    "latents under tp": Limit(
        bridge="mbridge",
        models=(checkpoints.MODELS["deepseek_v3"],),
        layout="tp=2,etp=2",
        without="down projections that are whole",
        says="self_attn.kv_a_proj_with_mqa.weight",
        beside_0_19="",
    ),
    # ColumnParallelMapping.hf_to_megatron; 0.6.2 pads there, and exports the padding too.
    "a vocabulary that tp does not divide": Limit(
        bridge="megatron-bridge",
        models=(checkpoints.MODELS["llama"],),
        layout="tp=2",
        says="Cannot evenly split dimension 0 size 101 across 2 TP ranks",
        beside_0_19="lm_head.weight",
    ),
    # Its mapping of OLMoE's norm over all heads is replicated, and so are the norms of its provider's model.
    "a norm over all heads under tp": Limit(
        bridge="megatron-bridge",
        models=(replace(checkpoints.MODELS["olmoe"], vocab_size=_DIVISIBLE),),
        layout="tp=2",
        says="layernorm",
    ),
    # MegatronModelBridge._broadcast_shared_embeddings looks at the first chunk of a rank, "TODO: Fix for VPP"; 0.6.2
    # looks at the last one of the last stage.
    "a tied output under vpp": Limit(
        bridge="megatron-bridge",
        models=(replace(_QWEN2, vocab_size=_DIVISIBLE),),
        layout="pp=2,vpp=2",
        says="Output layer not found",
        beside_0_19="",
    ),
    # AutoMapping knows Megatron's classes.
    "our classes": Limit(
        bridge="megatron-bridge",
        models=(checkpoints.MODELS["qwen3_moe"],),
        without="our classes",
        says="Cannot determine parallelism type for module 'Router'",
    ),
    # RMSNorm2ZeroCenteredRMSNormMapping subtracts 1.
    "the norm behind the delta rule": Limit(
        bridge="megatron-bridge",
        models=(checkpoints.MODELS["qwen3_next"],),
        without="a norm that is not zero-centred",
        says="self_attention.out_norm.weight",
    ),
    # MegatronParamMapping.scatter_to_tp_ranks; 0.6.2 makes them contiguous itself.
    "gloo and views": Limit(
        bridge="megatron-bridge",
        models=(replace(checkpoints.MODELS["llama"], vocab_size=_DIVISIBLE),),
        layout="tp=2",
        without="contiguous parts",
        says="self_attention.linear_proj.weight",
        beside_0_19="",
    ),
    "objects between stages": Limit(
        bridge="megatron-bridge",
        models=(checkpoints.MODELS["llama"],),
        layout="pp=2",
        without="objects sent",
        says="sent an object that names",
    ),
}
