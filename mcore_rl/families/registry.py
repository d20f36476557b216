"""The families by name, and the one that a ``config.json`` belongs to.

An installed distribution adds families of its own by entry points of the group ``mcore_rl.families``: the name is the
family's, the object a ``Family``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from mcore_rl.config.model import ModelConfig
from mcore_rl.config.model_violations import model_violations
from mcore_rl.families import (
    deepseek_v2,
    deepseek_v3,
    ernie4_5,
    gemma2,
    gemma3,
    glm4_moe,
    glm4_moe_lite,
    gpt_oss,
    llama,
    minimax_m2,
    mistral,
    mixtral,
    olmoe,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_5,
    qwen3_5_moe,
    qwen3_moe,
    qwen3_next,
    seed_oss,
    smollm3,
)
from mcore_rl.families.family import Family
from mcore_rl.families.fields import Fields
from mcore_rl.families.readership import READERSHIP
from mcore_rl.families.text_part import TEXT_PARTS, TextPart, own_text, text_config, text_part_of
from mcore_rl.families.towers import PICTURES, read_mrope
from mcore_rl.families.unsupported import advice
from mcore_rl.ground.errors import ConfigError, Violation, refuse_if_any

GROUP = "mcore_rl.families"
UNQUANTISED = (
    "Choose the bfloat16 checkpoint that this one was made from, or dequantise it first with the tool that quantised it"
)
_MODULES = (
    llama,
    mistral,
    mixtral,
    qwen2,
    qwen3,
    qwen2_moe,
    qwen3_moe,
    qwen3_next,
    qwen3_5,
    qwen3_5_moe,
    gemma2,
    gemma3,
    olmoe,
    phi3,
    deepseek_v3,
    deepseek_v2,
    glm4_moe,
    glm4_moe_lite,
    minimax_m2,
    gpt_oss,
    seed_oss,
    smollm3,
    ernie4_5,
)
BUILT_IN: dict[str, Family] = {module.FAMILY.name: module.FAMILY for module in _MODULES}


def _added() -> tuple[dict[str, Family], list[Violation]]:
    """The families of other distributions, and what is wrong with their entry points."""
    added = dict[str, Family]()
    violations = list[Violation]()
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        try:
            added[point.name] = _loaded(point, BUILT_IN | added)
        except ConfigError as error:
            violations += error.violations
    return added, violations


def _loaded(point: EntryPoint, taken: Mapping[str, Family]) -> Family:
    source = f"{point.dist.name} {point.dist.version}" if point.dist else "an installed distribution"
    try:
        family = point.load()
    except Exception as error:  # whatever a foreign module may raise
        problem = f"of {source} cannot be imported: {error!r}"
        remedy = f"Mend or uninstall {source}"
        raise ConfigError([Violation(f"entry point {point.name}", point.value, problem, remedy)]) from error
    problem = ""
    if not isinstance(family, Family):
        problem = "is no mcore_rl.families.family.Family"
    elif family.name != point.name:
        problem = f"gives a family of another name, {family.name}"
    elif family.name in taken:
        problem = "has the name of a family that is there"
    elif clash := {name for each in taken.values() for name in each.architectures} & set(family.architectures):
        problem = f"reads {', '.join(sorted(clash))}, as a family that is there does"
    else:
        return family
    remedy = f"Mend or uninstall {source}"
    raise ConfigError([Violation(f"entry point {point.name}", point.value, f"of {source} {problem}", remedy)])


_ADDED, _WRONG = _added()
FAMILIES: dict[str, Family] = BUILT_IN | _ADDED

# Key in ``model_violations`` -> the field of config.json that the user wrote.
_WRITTEN = {
    "model.num_layers": "num_hidden_layers",
    "model.hidden_size": "hidden_size",
    "model.ffn_hidden_size": "intermediate_size",
    "model.num_attention_heads": "num_attention_heads",
    "model.num_query_groups": "num_key_value_heads",
    "model.head_dim": "head_dim",
    "model.vocab_size": "vocab_size",
    "model.max_position_embeddings": "max_position_embeddings",
    "model.rotary_percent": "partial_rotary_factor",
    "model.no_rope_layers": "no_rope_layers",
    "model.sliding_window": "sliding_window",
    "model.softmax_scale": "query_pre_attn_scalar",
    "model.attention_soft_cap": "attn_logit_softcapping",
    "model.output_soft_cap": "final_logit_softcapping",
    "model.mla.q_lora_rank": "q_lora_rank",
    "model.mla.kv_lora_rank": "kv_lora_rank",
    "model.mla.qk_nope_head_dim": "qk_nope_head_dim",
    "model.mla.qk_rope_head_dim": "qk_rope_head_dim",
    "model.mla.v_head_dim": "v_head_dim",
    "model.linear_attention.layers": "layer_types",
    "model.linear_attention.num_key_heads": "linear_num_key_heads",
    "model.linear_attention.num_value_heads": "linear_num_value_heads",
    "model.linear_attention.key_head_dim": "linear_key_head_dim",
    "model.linear_attention.value_head_dim": "linear_value_head_dim",
    "model.linear_attention.conv_kernel_dim": "linear_conv_kernel_dim",
    "model.moe.num_experts": "number of experts",
    "model.moe.top_k": "num_experts_per_tok",
    "model.moe.ffn_hidden_size": "moe_intermediate_size",
    "model.moe.num_groups": "n_group",
    "model.moe.top_k_groups": "topk_group",
    "model.mrope": "rope_parameters",
    "model.mrope.sections": "rope_parameters.mrope_section",
    "model.vision.ffn_hidden_size": "intermediate_size",
    "model.vision.merge_size": "spatial_merge_size",
    "model.vision.num_positions": "num_position_embeddings",
    "model.vision.deepstack": "deepstack_visual_indexes",
}
_TOWER = "model.vision."  # its other keys are named as the fields of vision_config


def family_of(config: Mapping[str, Any], *, pictures: bool = False) -> Family:
    """The family of a Hugging Face ``config`` by its ``architectures`` and ``model_type``.

    A sequence classifier is of the family of its decoder; who asks for logits misses their tensor (``demand_weights``).
    A multimodal checkpoint is of the family of its text part, or, with ``pictures``, of that of the whole.

    Raises ConfigError if no family has them, if the two disagree, or if an installed family is wrong.
    """
    refuse_if_any(_WRONG)
    part = text_part_of(config)
    if part is not None:
        refuse_if_any([*_other_text(config, part)])
    if pictures:
        return _family_with_tower(config, part)
    if part is not None:
        config = text_config(config)
    names = config.get("architectures")
    known = {architecture: family for family in FAMILIES.values() for architecture in family.architectures}
    value = names[0] if isinstance(names, list) and len(names) == 1 else None
    family = known.get(value.replace("ForSequenceClassification", "ForCausalLM")) if isinstance(value, str) else None
    if family is None:
        every = (*known, *(each.architecture for each in TEXT_PARTS))
        problem = "is not supported"
        remedy = f"Choose a checkpoint of one of {', '.join(every)}"
        if isinstance(value, str):
            remedy = f"{advice(value, config, tuple(known))}{remedy}"
        raise ConfigError([Violation("config.json: architectures", names, problem, remedy)])
    model_type = config.get("model_type")
    if model_type not in (family.model_type, *family.other_model_types):
        problem = f"does not go with architectures={family.architectures[0]}"
        remedy = f"Restore the checkpoint's own config.json, which says {family.model_type}"
        raise ConfigError([Violation("config.json: model_type", model_type, problem, remedy)])
    return family


def _family_with_tower(config: Mapping[str, Any], part: TextPart | None) -> Family:
    known = {architecture: family for family in PICTURES.values() for architecture in family.architectures}
    if part is None or part.architecture not in known:
        problem = "is of no model that sees pictures here"
        remedy = f"Choose a checkpoint of one of {', '.join(known)}, or read it as a text model"
        raise ConfigError([Violation("config.json: architectures", config.get("architectures"), problem, remedy)])
    return known[part.architecture]


def _other_text(config: Mapping[str, Any], part: TextPart) -> Iterator[Violation]:
    """Refuses a text part of another kind than ``part`` speaks of."""
    kind = config.get("model_type")
    if kind != part.model_type:
        problem = f"does not go with architectures={part.architecture}"
        remedy = f"Restore the checkpoint's own config.json, which says {part.model_type}"
        yield Violation("config.json: model_type", kind, problem, remedy)
    own = own_text(config, part)
    if own is not None and (kind := own.get("model_type", part.text_types[0])) not in part.text_types:
        problem = f"is the text part of another model than those of {part.architecture} that are read"
        remedy = f"Choose a checkpoint whose text part is of {' or '.join(part.text_types)}"
        yield Violation(f"config.json: {part.text}.model_type", kind, problem, remedy)


def model_of(config: Mapping[str, Any], *, pictures: bool = False) -> tuple[Family, ModelConfig]:
    """The family and the model of a Hugging Face ``config``, as ``json.load`` gives it.

    pictures: of a multimodal ``config`` the whole, with its vision tower; else its text part, a text model.
    Raises ConfigError with every field that has a wrong type, or that could change a number and is not implemented.
    """
    family, model, _ = _read(config, pictures=pictures)
    return family, model


def unread_fields(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The fields of ``config`` that neither transformers' nor vLLM's code of its family reads; they change nothing.

    Raises as ``model_of``.
    """
    return _read(config)[2]


def _read(config: Mapping[str, Any], *, pictures: bool = False) -> tuple[Family, ModelConfig, tuple[str, ...]]:
    family = family_of(config, pictures=pictures)
    part = text_part_of(config)
    fields = Fields(text_config(config), readers=readers_of(family))
    for name, value in part.only.items() if part else ():
        fields.demand(name, value, because="is not read by transformers' multimodal class")
    _demand_read_weights(fields, family)
    model = family.read(fields)
    tower = _read_tower(config, part, family, fields, model) if part is not None else None
    violations = fields.violations + fields.unread()
    of_tower = list[Violation]()
    # Else some sizes are defaults, and a violation would not be about the user's values.
    if fields.sound and (tower is None or tower.sound):
        of_model = model_violations(model)
        violations += [_as_written(each) for each in of_model if not each.key.startswith(_TOWER)]
        of_tower += [_as_written(each) for each in of_model if each.key.startswith(_TOWER)]
    if part is not None and own_text(config, part) is not None:
        inner = f"config.json: {part.text}."
        violations = [replace(each, key=each.key.replace("config.json: ", inner, 1)) for each in violations]
    if tower is not None:
        of_tower += [*tower.violations, *tower.unread()]
        violations += [replace(each, key=each.key.replace("config.json: ", _OF_TOWER, 1)) for each in of_tower]
    refuse_if_any(violations)
    return family, model, tuple(fields.notes)


_OF_TOWER = "config.json: vision_config."


def _read_tower(
    config: Mapping[str, Any], part: TextPart, family: Family, text: Fields, model: ModelConfig
) -> Fields | None:
    """Reads the tower into ``model``; returns the fields of its configuration.  None: the family has none."""
    if family.tower is None:
        return None
    fields = Fields(config.get("vision_config") or {})
    model.vision = family.tower.read(fields, model)
    model.mrope, problem = read_mrope(own_text(config, part) or config, family.tower)
    if problem:
        text.refuse("rope_parameters", problem, "Restore the checkpoint's own config.json")
    return fields


def readers_of(family: Family) -> frozenset[str] | None:
    """The names that transformers' or vLLM's code of ``family`` reads; None: not known."""
    return READERSHIP.get(family.name) if family.readers is None else family.readers


def _as_written(violation: Violation) -> Violation:
    written = _WRITTEN.get(violation.key, violation.key.removeprefix(_TOWER))
    return replace(violation, key=f"config.json: {written}")


def _demand_read_weights(fields: Fields, family: Family) -> None:
    """Refuse quantised weights, except fp8 in blocks of 128 by 128 and gpt-oss's mxfp4."""
    if fields.values.get("compression_config"):
        fields.refuse("compression_config", "weights quantised by compressed-tensors are not read", UNQUANTISED)
    inner = fields.inside("quantization_config")
    if inner is None:
        return
    method = inner.values.get("quant_method")
    if method == "mxfp4" and family.mxfp4:
        return
    if method == "fp8":
        block = inner.values.get("weight_block_size")
        if block == [128, 128] and inner.values.get("fmt", "e4m3") in ("e4m3", "float8_e4m3fn"):
            return
        kind = f"in blocks of {block}" if block else "without weight_block_size"
        problem = f"fp8 {kind} is not read: it is in blocks of [128, 128], e4m3"
    else:
        name = method or ("modelopt" if "producer" in inner.values else "an unnamed method")
        problem = f"weights quantised by {name} are not read"
    fields.refuse("quantization_config", problem, UNQUANTISED)
