"""The published configurations of ``model_configs/hf_configs.json``, and transformers' view of them."""

from __future__ import annotations

import copy
import json
from collections import UserDict
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from mcore_rl.families.text_part import text_config
from tests.house.source import ROOT

MODEL_CONFIGS = ROOT / "model_configs"


class _Copied(UserDict[str, dict[str, Any]]):
    """Gives copies: transformers' classes fill in the dictionaries that they are given."""

    def __getitem__(self, name: str) -> dict[str, Any]:
        return copy.deepcopy(super().__getitem__(name))


_PUBLISHED = json.loads((MODEL_CONFIGS / "hf_configs.json").read_text(encoding="utf-8"))
FACTS = _Copied({hf_id: text_config(facts) for hf_id, facts in _PUBLISHED.items()})  # of multimodal ones the text part
TINY = _Copied({facts["model_type"]: facts for hf_id, facts in FACTS.items() if hf_id.startswith("tiny-")})

# What every checkpoint of a family writes, because the class's default is none of vLLM's.
WRITTEN = {
    "glm4_moe": {"head_dim": 128},
    "glm4_moe_lite": {"first_k_dense_replace": 1},
    "minimax_m2": {"rotary_dim": 64, "scoring_func": "sigmoid", "use_routing_bias": True},
    "deepseek_v2": {"num_experts_per_tok": 6, "n_group": 1, "topk_group": 1},
}


def class_type(facts: dict[str, Any]) -> str:
    """transformers' model type of ``facts``; vLLM reads Kimi-K2 by the same class."""
    return {"kimi_k2": "deepseek_v3"}.get(facts["model_type"], facts["model_type"])


def class_config(facts: dict[str, Any]) -> PreTrainedConfig:
    """transformers' configuration object; weights are never quantised here."""
    values = {key: value for key, value in facts.items() if key not in ("model_type", "quantization_config")}
    return CONFIG_MAPPING[class_type(facts)](**copy.deepcopy(values))  # it fills in what it is given


def meta_model(facts: dict[str, Any]) -> PreTrainedModel:
    """transformers' model without memory for its weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(class_config(facts))


def saved_shapes(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    """Names and shapes that ``save_pretrained`` would write: experts one by one, a tied output left out."""
    state = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    return {name: tuple(tensor.shape) for name, tensor in revert_weight_conversion(model, state).items()}
