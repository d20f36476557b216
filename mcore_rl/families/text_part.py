"""The text part of a multimodal checkpoint: the language model in it, which is trained like any other.

A multimodal checkpoint holds a language model of one of the families, under longer names, and beside it a tower for
pictures and a projector, the rest.  ``TEXT_PARTS`` says of each architecture where the two are, once: config.json is
read through ``text_config``, weights through ``spelling_of`` (``checkpoints/rest.py``).  Everything behind these sees
the text model alone, by the names of its family's tables; the rest is copied, byte for byte.

For text without pictures the two are the same function.  Qwen-VL's positions have three axes, and a token of text has
the same position on each, so that its rotation is the plain one (``tests/parity/test_text_parts.py``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

HEAD = "lm_head."
SCORE = "score."  # a value head, in the tables and in all files
MODEL = "model."  # before the names of the tables' tensors, but for the head


@dataclass(frozen=True)
class NamesInFiles:
    """How the names in a checkpoint's files begin.

    model, head: in place of the tables' ``model.`` and ``lm_head.``.  rest: of the tensors that are not trained.
    """

    model: str
    head: str
    rest: tuple[str, ...]

    def of_tables(self, name: str) -> str | None:
        """The tables' name of tensor ``name`` of the files; None: it is of the rest, or of nothing that is known."""
        if name.startswith(self.rest):
            return None
        if name.startswith(self.head):
            return HEAD + name.removeprefix(self.head)
        return MODEL + name.removeprefix(self.model) if name.startswith(self.model) else None

    def of_tower(self, name: str) -> str:
        """The tables' name of a tower tensor."""
        return name.removeprefix(MODEL)

    def in_files(self, name: str) -> str:
        """The files' name of the tables' tensor ``name``."""
        for rest in self.rest:
            if name.startswith(self.of_tower(rest)):
                return rest + name.removeprefix(self.of_tower(rest))
        if name.startswith(HEAD):
            return self.head + name.removeprefix(HEAD)
        if name.startswith(SCORE):
            return name
        assert name.startswith(MODEL), f"{name} is no tensor of a language model"
        return self.model + name.removeprefix(MODEL)


@dataclass(frozen=True)
class TextPart:
    """The text part of one architecture.

    architecture, model_type: of the whole, as in ``config.json``.
    text: the field with the text's configuration; a config.json without it has the text's fields among its own.
    text_types: the ``model_type`` that the text's configuration may have.
    text_architecture, text_model_type: of the language model by itself, which decide its family.
    rest: beginnings of the names of the other tensors, as the newest spelling has them behind ``model.``.
    defaults: fields whose defaults in transformers' class are not those of the language model by itself.
    only: field -> its only value in transformers' class, which does not read it.
    ties_by_text: ``tie_word_embeddings`` is the text's own.  The whole's is true by transformers' default of classes
    whose published checkpoints are not tied; of the others transformers ties by the whole's.
    """

    architecture: str
    model_type: str
    text_architecture: str
    text_model_type: str
    text_types: tuple[str, ...]
    rest: tuple[str, ...]
    text: str = "text_config"
    defaults: Mapping[str, Any] = field(default_factory=dict)
    only: Mapping[str, Any] = field(default_factory=dict)
    ties_by_text: bool = False

    @property
    def spellings(self) -> tuple[NamesInFiles, ...]:
        """The spellings of published checkpoints; the first under which every name is known is that of the files."""
        return (
            NamesInFiles("model.language_model.", HEAD, tuple(MODEL + name for name in self.rest)),
            NamesInFiles("language_model.model.", "language_model.lm_head.", self.rest),
            NamesInFiles(MODEL, HEAD, self.rest),
        )


_QWEN_VL_DEFAULTS = {
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
}
_QWEN3_VL_DEFAULTS = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 128000,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500000.0,
}
_QWEN3_VL_MOE_DEFAULTS = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "max_position_embeddings": 128000,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500000.0,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
}
TEXT_PARTS = (
    TextPart(
        architecture="Gemma3ForConditionalGeneration",
        model_type="gemma3",
        text_architecture="Gemma3ForCausalLM",
        text_model_type="gemma3_text",
        text_types=("gemma3_text",),
        rest=("vision_tower.", "multi_modal_projector."),
        only={"final_logit_softcapping": None},
    ),
    TextPart(
        architecture="Mistral3ForConditionalGeneration",
        model_type="mistral3",
        text_architecture="MistralForCausalLM",
        text_model_type="mistral",
        text_types=("mistral",),
        rest=("vision_tower.", "multi_modal_projector."),
        ties_by_text=True,
    ),
    TextPart(
        architecture="Qwen2_5_VLForConditionalGeneration",
        model_type="qwen2_5_vl",
        text_architecture="Qwen2ForCausalLM",
        text_model_type="qwen2",
        text_types=("qwen2_5_vl_text", "qwen2_5_vl"),
        rest=("visual.",),
        defaults=_QWEN_VL_DEFAULTS,
    ),
    TextPart(
        architecture="Qwen3VLForConditionalGeneration",
        model_type="qwen3_vl",
        text_architecture="Qwen3ForCausalLM",
        text_model_type="qwen3",
        text_types=("qwen3_vl_text",),
        rest=("visual.",),
        defaults=_QWEN3_VL_DEFAULTS,
    ),
    TextPart(
        architecture="Qwen3VLMoeForConditionalGeneration",
        model_type="qwen3_vl_moe",
        text_architecture="Qwen3MoeForCausalLM",
        text_model_type="qwen3_moe",
        text_types=("qwen3_vl_moe_text",),
        rest=("visual.",),
        defaults=_QWEN3_VL_MOE_DEFAULTS,
        only={"norm_topk_prob": True},
    ),
    TextPart(
        architecture="Qwen3_5ForConditionalGeneration",
        model_type="qwen3_5",
        text_architecture="Qwen3_5ForCausalLM",
        text_model_type="qwen3_5_text",
        text_types=("qwen3_5_text",),
        rest=("visual.",),
    ),
    TextPart(
        architecture="Qwen3_5MoeForConditionalGeneration",
        model_type="qwen3_5_moe",
        text_architecture="Qwen3_5MoeForCausalLM",
        text_model_type="qwen3_5_moe_text",
        text_types=("qwen3_5_moe_text",),
        rest=("visual.",),
    ),
    TextPart(
        architecture="KimiK25ForConditionalGeneration",
        model_type="kimi_k25",
        text_architecture="DeepseekV3ForCausalLM",
        text_model_type="deepseek_v3",
        text_types=("kimi_k2", "deepseek_v3"),
        rest=("vision_tower.", "mm_projector."),
        ties_by_text=True,
    ),
)
_BY_ARCHITECTURE = {part.architecture: part for part in TEXT_PARTS}

# Fields of the whole that hold for its text, too, whatever the text's own configuration says.
_TIES = "tie_word_embeddings"
_QUANTISED = ("quantization_config", "compression_config")
# Fields of a flat config.json that are no size of a language model.
_NOT_OF_TEXT = (
    "vision_config",
    "image_token_id",
    "video_token_id",
    "vision_token_id",
    "vision_start_token_id",
    "vision_end_token_id",
)
# What a rotation by positions of three axes has beyond a plain one, and the type that some call it.
_AXES = ("mrope_section", "mrope_interleaved")
_OF_AXES = "mrope"
_ROPES = ("rope_scaling", "rope_parameters")


def text_part_of(config: Mapping[str, Any]) -> TextPart | None:
    """The row of the multimodal architecture of ``config``, the content of config.json; None: it is none."""
    names = config.get("architectures")
    return _BY_ARCHITECTURE.get(str(names[0])) if isinstance(names, list) and len(names) == 1 else None


def own_text(config: Mapping[str, Any], part: TextPart) -> Mapping[str, Any] | None:
    """The text's fields as they stand by themselves in ``config``; None: among those of the whole."""
    inner = config.get(part.text)
    return inner if isinstance(inner, Mapping) and inner else None


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of the language model in the checkpoint of ``config``; of any other, a copy of ``config``."""
    part = text_part_of(config)
    if part is None:
        return dict(config)
    own = own_text(config, part)
    if own is None:
        given = {name: value for name, value in config.items() if name not in _NOT_OF_TEXT}
    else:
        of_whole = _QUANTISED if part.ties_by_text else (_TIES, *_QUANTISED)
        given = {**own, **{name: config[name] for name in of_whole if name in config}}
    ropes = {name: given[name] for name in _ROPES if isinstance(given.get(name), Mapping)}
    inside = any("rope_theta" in rope for rope in ropes.values())
    defaults = {name: value for name, value in part.defaults.items() if name != "rope_theta" or not inside}
    plain = {name: _of_one_axis(rope) for name, rope in ropes.items()}
    named = {"architectures": [part.text_architecture], "model_type": part.text_model_type}
    return {**defaults, **given, **plain, **named}


def _of_one_axis(rope: Mapping[str, Any]) -> dict[str, Any] | None:
    """``rope`` for positions that are the same on all axes."""
    plain = {name: value for name, value in rope.items() if name not in _AXES}
    plain |= {name: "default" for name in ("type", "rope_type") if plain.get(name) == _OF_AXES}
    return plain or None


def with_text(config: Mapping[str, Any], changed: Mapping[str, Any], removed: Collection[str] = ()) -> dict[str, Any]:
    """``config`` with the fields ``changed`` of its text model, and without those ``removed``.

    A field that both have (tie_word_embeddings) is changed in both.
    """
    part = text_part_of(config)
    own = None if part is None else own_text(config, part)
    made = {name: value for name, value in config.items() if name not in removed}
    if part is None or own is None:
        return made | dict(changed)
    inner = {name: value for name, value in own.items() if name not in removed} | dict(changed)
    of_both = {name: value for name, value in changed.items() if name in config and name in (_TIES, *_QUANTISED)}
    return made | of_both | {part.text: inner}
