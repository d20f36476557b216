"""The vision towers of Qwen-VL: what their configuration says, and the rows of their tensors in both tables.

A model with a tower is a family of its own (``PICTURES``): the language model is that of a text family, whose
rows and reader it shares, and the tower stands beside it.  The tower is whole on every rank of the first pipeline stage
and has the names of transformers' module; vLLM splits its linear layers over tensor ranks
(vllm/model_executor/models/qwen2_5_vl.py and qwen3_vl.py, 0.32).

The tables name a tower's tensors ``visual.*``; how files spell them is in ``text_part.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from mcore_rl.config.model import ModelConfig, MropeConfig, TowerKind, VisionConfig
from mcore_rl.families import qwen2, qwen3, qwen3_moe
from mcore_rl.families.family import Family, Tower
from mcore_rl.families.fields import Fields
from mcore_rl.families.readership import READERSHIP
from mcore_rl.families.rules import Axis, Layers, Rule, Sections, ShardLayout, Stage, hf, split

TOWER = "visual."  # before the tables' names of its tensors
LOCAL = "vision."  # before Megatron's: the tower is ``chunk.vision``
# Fields of vision_config that nothing reads for still pictures: other names of what is read, and seconds of videos.
_UNREAD = ("in_chans", "spatial_patch_size", "tokens_per_second", "num_attention_heads")
_AXIAL = {"rope_type": "axial", "rope_theta": 10000.0}
# By OpenAI's CLIP, as Qwen2.5-VL's preprocessor_config.json has them; Qwen3-VL's are VisionConfig's defaults.
_CLIP_MEAN = [0.48145466, 0.4578275, 0.40821073]
_CLIP_STD = [0.26862954, 0.26130258, 0.27577711]


# ---- config.json ----


def read_qwen2_5_vl(fields: Fields, model: ModelConfig) -> VisionConfig:
    """Reads ``Qwen2_5_VLVisionConfig``, whose blocks attend within windows."""
    vision = _read(fields, model, TowerKind.qwen2_5_vl, "silu", (32, 3584, 3420, 14))
    vision.window_size = fields.take("window_size", int, 112)
    vision.full_blocks = _listed(fields, "fullatt_block_indexes", [7, 15, 23, 31])
    vision.pixel_mean = list(_CLIP_MEAN)
    vision.pixel_std = list(_CLIP_STD)
    return vision


def read_qwen3_vl(fields: Fields, model: ModelConfig) -> VisionConfig:
    """Reads ``Qwen3VLVisionConfig`` and ``Qwen3VLMoeVisionConfig``."""
    vision = _read(fields, model, TowerKind.qwen3_vl, "gelu_pytorch_tanh", (27, 1152, 4304, 16))
    vision.num_positions = fields.take("num_position_embeddings", int, 2304)
    vision.deepstack = _listed(fields, "deepstack_visual_indexes", [8, 16, 24])
    return vision


def _read(
    fields: Fields, model: ModelConfig, kind: TowerKind, activation: str, defaults: tuple[int, int, int, int]
) -> VisionConfig:
    """defaults: depth, width, width of the MLP and patch."""
    depth, width, ffn, patch = defaults
    fields.ignore(*_UNREAD)
    fields.demand("hidden_act", activation, because="is another activation than the tower's")
    fields.demand("in_channels", 3, because="is not the number of colours of a picture")
    because = f"is not the language model's hidden_size={model.hidden_size}, to which features are added"
    fields.demand("out_hidden_size", model.hidden_size, because=because)
    rope = fields.optional("rope_parameters", dict)
    if rope and (_AXIAL | rope) != _AXIAL:
        fields.refuse("rope_parameters", "rotates otherwise than vLLM 0.32 does", f"Leave it out, or write {_AXIAL}")
    return VisionConfig(
        kind=kind,
        depth=fields.take("depth", int, depth),
        hidden_size=fields.take("hidden_size", int, width),
        num_heads=fields.take("num_heads", int, 16),
        ffn_hidden_size=fields.take("intermediate_size", int, ffn),
        patch_size=fields.take("patch_size", int, patch),
        merge_size=fields.take("spatial_merge_size", int, 2),
        temporal_patch_size=fields.take("temporal_patch_size", int, 2),
    )


def _listed(fields: Fields, name: str, default: list[int]) -> list[int]:
    given = fields.listed(name, int)
    return default if given is None else given


def read_mrope(own: Mapping[str, Any], tower: Tower) -> tuple[MropeConfig | None, str]:
    """(the rotation that a text part's fields ``own`` speak of; "", or what is wrong with them)."""
    ropes = (own.get(name) for name in ("rope_scaling", "rope_parameters"))
    rope = next((each for each in ropes if isinstance(each, dict) and each), {})
    sections = rope.get("mrope_section")
    if not isinstance(sections, list) or any(type(each) is not int for each in sections):
        return None, "has no mrope_section, a list of three integers"
    if rope.get("mrope_interleaved", tower.interleaved) is not tower.interleaved:
        return None, f"has mrope_interleaved={str(not tower.interleaved).lower()}, which transformers' model has not"
    return MropeConfig(sections=sections, interleaved=tower.interleaved), ""


# ---- the tower in the table of Megatron's tensors: transformers' modules, whole ----


def _whole(name: str, *dims: str, layers: Layers = Layers.all) -> Rule:
    stage = Stage.tower if "{l}" in name else Stage.first
    return Rule(LOCAL + name, (hf(TOWER + name, *dims),), layers=layers, stage=stage)


def _linear(name: str, outputs: str, inputs: str, layers: Layers = Layers.all) -> tuple[Rule, Rule]:
    """A linear layer whose outputs vLLM cuts."""
    weight = _whole(f"{name}.weight", outputs, inputs, layers=layers)
    return weight, _whole(f"{name}.bias", outputs, layers=layers)


def _second(name: str, outputs: str, inputs: str, layers: Layers = Layers.all) -> tuple[Rule, Rule]:
    """A linear layer whose inputs vLLM cuts, in columns: nothing cuts it here, and parts are compared along them."""
    weight, bias = _linear(name, outputs, inputs, layers)
    return replace(weight, dim=1), bias


def _layer_norm(name: str, width: str, layers: Layers = Layers.all) -> tuple[Rule, Rule]:
    return _whole(f"{name}.weight", width, layers=layers), _whole(f"{name}.bias", width, layers=layers)


_PATCHES = ("vision_hidden", "colours", "vision_frames", "vision_patch", "vision_patch")
_BLOCK = "blocks.{l}."
_ATTENTION = (
    *_linear(_BLOCK + "attn.qkv", "vision_qkv", "vision_hidden"),
    *_second(_BLOCK + "attn.proj", "vision_hidden", "vision_hidden"),
)
QWEN2_5_VL = (
    _whole("patch_embed.proj.weight", *_PATCHES),
    _whole(_BLOCK + "norm1.weight", "vision_hidden"),
    _whole(_BLOCK + "norm2.weight", "vision_hidden"),
    *_ATTENTION,
    *_linear(_BLOCK + "mlp.gate_proj", "vision_ffn", "vision_hidden"),
    *_linear(_BLOCK + "mlp.up_proj", "vision_ffn", "vision_hidden"),
    *_second(_BLOCK + "mlp.down_proj", "vision_hidden", "vision_ffn"),
    _whole("merger.ln_q.weight", "vision_hidden"),
    *_linear("merger.mlp.0", "vision_merged", "vision_merged"),
    *_second("merger.mlp.2", "hidden", "vision_merged"),
)
_DEEPSTACK = "deepstack_merger_list.{l}."
QWEN3_VL = (
    _whole("patch_embed.proj.weight", *_PATCHES),
    _whole("patch_embed.proj.bias", "vision_hidden"),
    _whole("pos_embed.weight", "vision_positions", "vision_hidden"),
    *_layer_norm(_BLOCK + "norm1", "vision_hidden"),
    *_layer_norm(_BLOCK + "norm2", "vision_hidden"),
    *_ATTENTION,
    *_linear(_BLOCK + "mlp.linear_fc1", "vision_ffn", "vision_hidden"),
    *_second(_BLOCK + "mlp.linear_fc2", "vision_hidden", "vision_ffn"),
    *_layer_norm("merger.norm", "vision_hidden"),
    *_linear("merger.linear_fc1", "vision_merged", "vision_merged"),
    *_second("merger.linear_fc2", "hidden", "vision_merged"),
    *_layer_norm(_DEEPSTACK + "norm", "vision_merged", Layers.deepstack),
    *_linear(_DEEPSTACK + "linear_fc1", "vision_merged", "vision_merged", Layers.deepstack),
    *_second(_DEEPSTACK + "linear_fc2", "hidden", "vision_merged", Layers.deepstack),
)


# ---- the tower in the table of vLLM's tensors ----

_QKV = Sections(split, ("vision_hidden", "vision_hidden", "vision_hidden"))
_ROWS = ("linear_fc1.weight", "linear_fc1.bias", "merger.mlp.0.weight", "merger.mlp.0.bias")  # ends of names


def _of_vllm(tower: Iterable[Rule]) -> tuple[Rule, ...]:
    """The rows of vLLM's tower, from those of transformers': gate and up are one tensor there."""
    rows = []
    for rule in tower:
        name = rule.hf[0].name
        if ".gate_proj." in name:
            both = (rule.hf[0], hf(name.replace(".gate_proj.", ".up_proj."), *rule.hf[0].dims))
            fused = name.replace(".gate_proj.", ".gate_up_proj.")
            rows.append(replace(rule, name=fused, hf=both, layout=split, axis=Axis.tensor))
        elif ".up_proj." not in name:
            layout: ShardLayout = _QKV if ".attn.qkv." in name else split
            cut = layout is _QKV or rule.dim == 1 or name.endswith(_ROWS)
            rows.append(replace(rule, name=name, layout=layout, axis=Axis.tensor) if cut else replace(rule, name=name))
    return tuple(rows)


def _within(rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """The rows of vLLM's language model ``rules``, where it is a part of the whole."""
    return tuple(replace(rule, name=f"language_model.{rule.name}") for rule in rules)


# ---- the families ----


def _family(name: str, architecture: str, text: Family, rows: tuple[Rule, ...], tower: Tower) -> Family:
    return replace(
        text,
        name=name,
        architectures=(architecture,),
        model_type=name,
        weights=(*text.weights, *rows),
        rollout=(*_within(text.rollout), *_of_vllm(rows)),
        readers=READERSHIP[text.name],
        tower=tower,
    )


_QWEN3_VL = Tower(read=read_qwen3_vl, interleaved=True)
# The families whose models see pictures, by name; ``text_part.TEXT_PARTS`` has their checkpoints as text models.
PICTURES: dict[str, Family] = {
    "qwen2_5_vl": _family(
        "qwen2_5_vl",
        "Qwen2_5_VLForConditionalGeneration",
        qwen2.FAMILY,
        QWEN2_5_VL,
        Tower(read=read_qwen2_5_vl, interleaved=False),
    ),
    "qwen3_vl": _family("qwen3_vl", "Qwen3VLForConditionalGeneration", qwen3.FAMILY, QWEN3_VL, _QWEN3_VL),
    "qwen3_vl_moe": _family(
        "qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration", qwen3_moe.FAMILY, QWEN3_VL, _QWEN3_VL
    ),
}
