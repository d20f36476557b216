"""Tiny multimodal models of transformers, and their checkpoints in every spelling that is published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, PreTrainedModel

from tests.support.published import TINY

# Architecture -> (model type, the text model's type, the field of TINY it is made of).
TEXT = {
    "Gemma3ForConditionalGeneration": ("gemma3", "gemma3_text", "gemma3_text"),
    "Mistral3ForConditionalGeneration": ("mistral3", "mistral", "mistral"),
    "Qwen2_5_VLForConditionalGeneration": ("qwen2_5_vl", "qwen2_5_vl_text", "qwen2"),
    "Qwen3VLForConditionalGeneration": ("qwen3_vl", "qwen3_vl_text", "qwen3"),
    "Qwen3VLMoeForConditionalGeneration": ("qwen3_vl_moe", "qwen3_vl_moe_text", "qwen3_moe"),
    "Qwen3_5ForConditionalGeneration": ("qwen3_5", "qwen3_5_text", "qwen3_5_text"),
    "Qwen3_5MoeForConditionalGeneration": ("qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_moe_text"),
    "KimiK25ForConditionalGeneration": ("kimi_k25", "deepseek_v3", "deepseek_v3"),
}
_SIGLIP = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, image_size=56)
_QWEN = dict(depth=2, hidden_size=32, intermediate_size=48, num_heads=2)
_VISION: dict[str, dict[str, Any]] = {
    "gemma3": {**_SIGLIP, "patch_size": 14, "model_type": "siglip_vision_model"},
    "mistral3": {**_SIGLIP, "patch_size": 14, "head_dim": 16, "model_type": "pixtral"},
    "qwen2_5_vl": {**_QWEN, "fullatt_block_indexes": [1]},
    "qwen3_vl": {**_QWEN, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16},
    "qwen3_vl_moe": {**_QWEN, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16},
    "qwen3_5": {**_QWEN, "num_position_embeddings": 16},
    "qwen3_5_moe": {**_QWEN, "num_position_embeddings": 16},
    "kimi_k25": dict(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, pos_emb_height=4,
        pos_emb_width=4,
    ),
}  # fmt: skip
TOKENS_OF_TEXT = 195  # of 199: the others stand for pictures, and Kimi's whole embeds them otherwise
_WHOLE: dict[str, dict[str, Any]] = {
    "gemma3": {"mm_tokens_per_image": 4, "image_token_index": 195, "boi_token_index": 196, "eoi_token_index": 197},
    "mistral3": {"image_token_index": 195},
    "kimi_k25": {"projection_hidden_size": 32, "image_token_id": 195, "video_token_id": 196},
}
_TOKENS = {
    "image_token_id": 195, "video_token_id": 196, "vision_start_token_id": 197, "vision_end_token_id": 198,
}  # fmt: skip
_NOT_TEXT = ("architectures", "model_type", "quantization_config", "topk_method", "scoring_func")


def config(architecture: str, **text_changes: object) -> dict[str, Any]:
    """A config.json of ``architecture``, as transformers' class takes it.  text_changes: fields of its text part."""
    kind, text_kind, family = TEXT[architecture]
    text = {name: value for name, value in TINY[family].items() if name not in _NOT_TEXT}
    if kind == "gemma3":
        text.pop("final_logit_softcapping", None)  # the multimodal class does not cap
    text |= {"model_type": text_kind, **text_changes}
    if kind == "qwen3_vl_moe":  # transformers 5.19 misreads published experts whose gate and up are square
        text["moe_intermediate_size"] = text_changes.get("moe_intermediate_size", 96)
    vision = dict(_VISION[kind])
    if "qwen" in kind and "rope_parameters" not in text:
        axes = text["head_dim"] // 2 if "head_dim" in text else text["hidden_size"] // text["num_attention_heads"] // 2
        section = [axes - 2 * (axes // 3), axes // 3, axes // 3]
        rope = {"rope_theta": text.pop("rope_theta", 1e4), "rope_type": "default", "mrope_section": section}
        text["rope_parameters"] = rope | ({"mrope_interleaved": True} if "qwen3" in kind else {})
        text.pop("rope_scaling", None)  # of a type that no such model has
    if "qwen" in kind:
        vision["out_hidden_size"] = text["hidden_size"]
    tied = bool(text.get("tie_word_embeddings", family == "gemma3_text"))
    whole = {"architectures": [architecture], "model_type": kind, "tie_word_embeddings": tied}
    return whole | _WHOLE.get(kind, _TOKENS) | {"text_config": text, "vision_config": vision}


def build(architecture: str, dtype: torch.dtype = torch.float32, **text_changes: object) -> PreTrainedModel:
    """A random model of ``architecture`` by transformers, in evaluation mode."""
    values = config(architecture, **text_changes)
    kind = values.pop("model_type")
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(CONFIG_MAPPING[kind](**values), dtype=dtype)
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):  # a state that is forgotten at once would show no error in it
            parameter.data = (0.02 + 0.5 * torch.rand_like(parameter)).log()
        elif parameter.dim() == 1:  # norms and biases begin at one number each
            parameter.data += 0.1 * torch.randn_like(parameter)
    for name, buffer in model.named_buffers():
        if "e_score_correction_bias" in name:
            buffer.copy_(0.1 * torch.randn_like(buffer))
    for name, module in model.named_modules():
        if name.endswith(("q_a_layernorm", "kv_a_layernorm")):  # in which transformers has 1e-6 written
            module.variance_epsilon = model.config.get_text_config().rms_norm_eps
    return model.eval()


# How published files are spelt: what stands before the text model's names, its head, and the rest.
SPELLINGS = {
    "newest": ("model.language_model.", "lm_head.", "model."),
    "within": ("language_model.model.", "language_model.lm_head.", ""),
    "flat": ("model.", "lm_head.", ""),
}
# Architecture -> the spellings in which its checkpoints are published.
PUBLISHED = {
    "Gemma3ForConditionalGeneration": ("within", "newest"),
    "Mistral3ForConditionalGeneration": ("within", "newest"),
    "Qwen2_5_VLForConditionalGeneration": ("flat", "newest"),
    "Qwen3VLForConditionalGeneration": ("newest",),
    "Qwen3VLMoeForConditionalGeneration": ("newest",),
    "Qwen3_5ForConditionalGeneration": ("newest",),
    "Qwen3_5MoeForConditionalGeneration": ("newest",),
    "KimiK25ForConditionalGeneration": ("within",),
}


def stored(model: PreTrainedModel, architecture: str, spelling: str, experts: str) -> dict[str, Tensor]:
    """The tensors of ``model`` as a checkpoint of ``architecture`` has them.

    experts: ``module`` as in transformers' modules, ``published`` as Qwen3-VL-MoE's are, transposed, ``alone`` one by
    one, as Kimi's.
    """
    text, head, rest = SPELLINGS[spelling]
    made: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name.startswith("lm_head."):
            if not model.config.tie_word_embeddings:
                made[head + name.removeprefix("lm_head.")] = tensor
        elif name.startswith("model.language_model."):
            within = text + name.removeprefix("model.language_model.")
            if within.endswith((".experts.gate_up_proj", ".experts.down_proj")):
                made |= _experts(within, tensor, experts)
            else:
                made[within] = tensor
        else:
            made[rest + name.removeprefix("model.")] = tensor
    return {name: tensor.detach().clone().contiguous() for name, tensor in made.items()}


def _experts(name: str, tensor: Tensor, experts: str) -> dict[str, Tensor]:
    if experts == "module":
        return {name: tensor}
    if experts == "published":
        return {name: tensor.transpose(1, 2)}
    parts = ("gate_proj", "up_proj") if name.endswith("gate_up_proj") else ("down_proj",)
    folder = name.rpartition(".")[0]
    return {
        f"{folder}.{number}.{part}.weight": rows
        for number, expert in enumerate(tensor)
        for part, rows in zip(parts, expert.chunk(len(parts)), strict=True)
    }


def _fill_padding(model: PreTrainedModel) -> None:
    """Makes the padding's token one like the others.

    transformers makes its row 0, where a norm amplifies by a thousand what differs, and drops its gradient.
    """
    embedding = model.get_input_embeddings()
    with torch.no_grad():
        embedding.weight[embedding.weight.norm(dim=1) == 0] = embedding.weight[-1].clone()
    embedding.padding_idx = None


def write(
    architecture: str,
    directory: Path,
    spelling: str | None = None,
    experts: str | None = None,
    *,
    files: int = 2,
    dtype: torch.dtype = torch.float32,
    **text_changes: object,
) -> PreTrainedModel:
    """Write a checkpoint of ``build(architecture)`` with the files beside it; its tower is in float32 in any case."""
    model = build(architecture, **text_changes)
    _fill_padding(model)
    kind = TEXT[architecture][0]
    spelling = spelling or PUBLISHED[architecture][0]
    experts = experts or {"kimi_k25": "alone", "qwen3_5_moe": "module"}.get(kind, "published")
    tensors = stored(model, architecture, spelling, experts)
    text, head, _ = SPELLINGS[spelling]
    for name in tensors:
        is_text = name.startswith((text, head)) and "visual" not in name and "vision" not in name
        if is_text and "projector" not in name and not name.endswith("correction_bias"):
            tensors[name] = tensors[name].to(dtype)
    directory.mkdir(parents=True)
    names = list(tensors)
    where = {name: f"model-{place % files + 1:05}-of-{files:05}.safetensors" for place, name in enumerate(names)}
    if files == 1:
        where = dict.fromkeys(names, "model.safetensors")
    for file in sorted(set(where.values())):
        held = {name: tensor for name, tensor in tensors.items() if where[name] == file}
        save_file(held, directory / file, {"format": "pt"})
    if files > 1:
        index = {"metadata": {}, "weight_map": where}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    saved = json.loads(model.config.to_json_string(use_diff=False)) | {"architectures": [architecture]}
    saved["dtype"] = saved["text_config"]["dtype"] = str(dtype).removeprefix("torch.")
    (directory / "config.json").write_text(json.dumps(saved))
    (directory / "preprocessor_config.json").write_text('{"do_resize": true}')
    (directory / "tokenizer.json").write_text('{"version": "1.0"}')
    return model
