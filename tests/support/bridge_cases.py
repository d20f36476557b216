"""What tests/support/bridges.py asks mbridge and Megatron-Bridge: models of each, layouts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mcore_rl.config.model import ModelConfig
from tests.support import checkpoints, models

WORLD_SIZE = 4
LAYOUTS = ("", "tp=2,pp=2", "tp=4", "pp=2,vpp=2")  # tp=4: twice the key/value heads
EXPERT_LAYOUTS = ("", "pp=2,vpp=2,ep=2", "tp=2,pp=2,ep=2,etp=1", "tp=2,ep=2,etp=2")
VERSIONS = {"mbridge": "0.15.1", "megatron-bridge": "0.3.1"}

_BOTH = ("llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3", "glm4_moe")
_SHARED = {name: checkpoints.MODELS[name] for name in _BOTH} | {"moonlight": models.deepseek_v3(q_lora_rank=None)}
_MEGATRON_BRIDGE = ("mistral", "deepseek_v2", "olmoe", "gemma2", "gemma3_text")
LIKE = {"moonlight": "deepseek_v3"}  # a model of which family it is
# The models of each bridge.  Megatron-Bridge pads no vocabulary: its loading refuses one that does not divide.
MODELS: dict[str, dict[str, ModelConfig]] = {
    "mbridge": _SHARED
    | {
        "mixtral": checkpoints.MODELS["mixtral"],
        "qwen2_moe": replace(models.qwen2_moe(()), head_dim=12),  # its bridge knows no layer without experts
    },
    "megatron-bridge": {
        name: replace(model, vocab_size=104)
        for name, model in (_SHARED | {name: checkpoints.MODELS[name] for name in _MEGATRON_BRIDGE}).items()
    },
}


def layouts(model: ModelConfig) -> Iterator[str]:
    """Those of its kind; a norm over all heads is split over tensor ranks by us, and held whole by Megatron-Bridge."""
    of_kind = LAYOUTS if model.moe is None else EXPERT_LAYOUTS
    return (layout for layout in of_kind if not (model.joint_qk_norm and "tp=" in layout))
