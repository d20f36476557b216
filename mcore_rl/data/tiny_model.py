"""A tiny model with random weights and a tokenizer of its own, as a Hugging Face checkpoint: something to start from.

The tokenizer is made from the texts of parquet files in the field's schema; the model is of any family of
``model_configs/`` that has a tiny configuration, or of ``PICTURES``, with a vision tower.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcore_rl.config.data import MAX_PIXELS, MIN_PIXELS
from mcore_rl.config.resources import MODEL_CONFIGS
from mcore_rl.families.checkpoints import find_checkpoint, published_config
from mcore_rl.families.config_json import read_config
from mcore_rl.families.registry import model_of
from mcore_rl.ground.errors import ConfigError, Violation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PROCESSOR = "preprocessor_config.json"

SIZES = dict(hidden_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
# What the tiny configurations of model_configs/ have to be proven: positions stretched from few ones to few more.
STRETCHED = ("rope_scaling", "rope_theta", "rope_local_base_freq", "original_max_position_embeddings")


# Of models that see pictures: their text parts and towers, beside ``SIZES``.
TOWER = dict(depth=2, hidden_size=64, num_heads=2, intermediate_size=128, out_hidden_size=SIZES["hidden_size"])
PICTURES: dict[str, dict[str, dict[str, Any]]] = {
    "qwen2_5_vl": {
        "text": {"model_type": "qwen2_5_vl_text"},
        "rope": {"mrope_section": [4, 6, 6]},
        "vision": {"patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]},
    },
    "qwen3_vl": {
        "text": {"model_type": "qwen3_vl_text"},
        "rope": {"mrope_section": [4, 6, 6], "mrope_interleaved": True},
        "vision": {"patch_size": 16, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
    },
}
PICTURES["qwen3_vl_moe"] = PICTURES["qwen3_vl"] | {
    "text": {
        "model_type": "qwen3_vl_moe_text",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
        "norm_topk_prob": True,
    },
}


@dataclass(frozen=True)
class TinyModel:
    """What was written.  config: of ``config.json``."""

    config: dict[str, Any]
    num_parameters: int
    num_tokens: int


def texts(directory: Path) -> list[str]:
    """Everything that is asked and answered in the parquet files of ``directory``."""
    import pyarrow.parquet as pq

    pieces: list[str] = []
    for path in sorted(directory.glob("*.parquet")):
        for row in pq.read_table(path).to_pylist():
            pieces += [message["content"] for message in row["prompt"]]
            pieces.append(str((row.get("extra_info") or {}).get("answer") or ""))
    if not pieces:
        problem = "has no parquet files"
        remedy = "Write them with mcore-rl prepare"
        raise ConfigError([Violation("--data", directory, problem, remedy)])
    return pieces


def configuration(family: str) -> dict[str, Any]:
    """The ``config.json`` of a tiny model of ``family``, whose positions go as far as ``max_position_embeddings``.

    Raises ConfigError if model_configs/ has no tiny one of that family.
    """
    known = published_config(find_checkpoint(f"tiny-{family.replace('_', '-')}", MODEL_CONFIGS), MODEL_CONFIGS)
    values = {key: value for key, value in known.items() if key not in STRETCHED} | SIZES | {"dtype": "float32"}
    values["rope_parameters"] = rope = {"rope_type": "default", "rope_theta": known.get("rope_theta", 10000.0)}
    if known["model_type"] == "gpt_oss":  # its positions are of yarn always
        rope |= known["rope_scaling"] | {"factor": 1.0}
    if "kv_lora_rank" in known:  # latent attention: a key for each head, of widths of its own
        values["num_key_value_heads"] = values["num_attention_heads"]
        del values["head_dim"]
    if "head_dim" not in known:
        values.pop("head_dim", None)
    if "rope_local_base_freq" in known:  # layers of two kinds, each with its own positions
        local = rope | {"rope_theta": known["rope_local_base_freq"]}
        values["rope_parameters"] = {"full_attention": rope, "sliding_attention": local}
    return values


def write_tiny_model(
    out: Path, data: Path, *, family: str = "mixtral", vocab_size: int = 512, max_length: int = 1024, seed: int = 1
) -> TinyModel:
    """Writes a checkpoint of ``family``, in float32, to the directory ``out``.

    data: a directory of parquet files, for the tokenizer.  vocab_size: at most.  max_length: the context, in tokens.
    Raises ConfigError if the family has no tiny model, or ``data`` no files.
    """
    sees = family in PICTURES
    values = {} if sees else configuration(family)
    pieces = texts(data)
    import torch  # when all is checked
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    from mcore_rl.data.tiny_tokenizer import build_tokenizer

    tokenizer = build_tokenizer(pieces, out, vocab_size, pictures=sees)
    of_text = {
        "vocab_size": len(tokenizer),
        "max_position_embeddings": max_length,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    values = _seeing(family, tokenizer, of_text) if sees else values | of_text
    if "factor" in values.get("rope_parameters", ()):
        values["rope_parameters"]["original_max_position_embeddings"] = max_length
    torch.manual_seed(seed)
    kind: Any = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    model = kind.from_config(AutoConfig.for_model(**values))
    model.save_pretrained(out)
    if sees:
        (out / PROCESSOR).write_text(json.dumps(_processor(out), indent=2) + "\n", encoding="utf-8")
        values |= SIZES
    return TinyModel(values, sum(parameter.numel() for parameter in model.parameters()), len(tokenizer))


def _seeing(family: str, tokenizer: PreTrainedTokenizerFast, of_text: dict[str, Any]) -> dict[str, Any]:
    """The ``config.json`` of a family of ``PICTURES``.  of_text: of its part that reads text."""
    parts = PICTURES[family]
    text = SIZES | {
        "intermediate_size": 256,
        **of_text,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, **parts["rope"]},
        **parts["text"],
    }
    if family == "qwen2_5_vl":  # whose heads are as wide as the hidden states allow
        del text["head_dim"]
    names = {
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
    }
    return {
        "model_type": family,
        "dtype": "float32",
        "tie_word_embeddings": False,
        "text_config": text,
        "vision_config": TOWER | parts["vision"],
        **{key: tokenizer.convert_tokens_to_ids(name) for key, name in names.items()},
    }


def _processor(out: Path) -> dict[str, Any]:
    """``preprocessor_config.json`` of the checkpoint in ``out``: the numbers by which pixels are normalised."""
    vision = model_of(read_config(out), pictures=True)[1].vision
    assert vision is not None, "such a model sees pictures"
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": vision.patch_size,
        "merge_size": vision.merge_size,
        "temporal_patch_size": vision.temporal_patch_size,
        "image_mean": vision.pixel_mean,
        "image_std": vision.pixel_std,
        "size": {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS},
    }
