"""What is said of architectures that no family reads, against the sources of transformers' own classes."""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from mcore_rl.families.registry import FAMILIES
from mcore_rl.families.unsupported import advice, features

SUPPORTED = tuple(name for family in FAMILIES.values() for name in family.architectures)
# What is said -> what the source of the modeling file then has.
IN_SOURCE = {
    "state-space layers": r"mamba|ssm",
    "linear attention": r"delta|lightning|linear_attn|linearattention",
    "convolutions": r"conv1d|shortconv",
    "latent attention": r"kv_a_proj|kv_lora_rank",
    "sparse attention": r"index",
    "experts": r"expert",
    "windows in some layers": r"sliding",
    "multipliers": r"multiplier|logits_scaling",
    "biases": r"bias",
}


def source_of(config: Any) -> str:
    """The modeling file beside the class of ``config``, in lower case."""
    name = type(config).__module__.replace("configuration_", "modeling_")
    return inspect.getsource(importlib.import_module(name)).lower()


@pytest.mark.tier("ci")  # it makes over 150 configurations and reads as many files
def test_what_is_said_of_the_decoders_of_transformers_is_so() -> None:
    wrong, silent = [], []
    for kind, architecture in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        if architecture in SUPPORTED:
            continue
        try:
            config = CONFIG_MAPPING[kind]()
        except Exception:  # noqa: BLE001 - whatever a foreign class raises: it has parts without defaults, or needs a library or the hub
            continue
        fields = config.to_dict()
        said = advice(architecture, fields, SUPPORTED)
        if not said and "Assistant" not in architecture:  # their default configurations have no layers
            silent.append(architecture)
        assert said.count("\n") == 0
        source = source_of(config)
        wrong += [(kind, what) for what in features(fields) if not re.search(IN_SOURCE[what], source)]
        if " nearest by " in said and "for its" not in said and isinstance(fields.get("num_experts_per_tok"), int):
            wrong += [(kind, "experts")] if "experts" not in features(fields) and "expert" in source else []
    assert not wrong
    assert not silent


@pytest.mark.parametrize(
    ("architecture", "fields", "said"),
    [
        ("NewForCausalLM", {"num_hidden_layers": 2}, "LlamaForCausalLM, and it differs in code of its own"),
        (
            "NewForCausalLM",
            {"num_hidden_layers": 2, "num_experts": 8, "index_topk": 4},
            "MixtralForCausalLM, for its experts, and it differs in sparse attention and code of its own",
        ),
        ("NewForCausalLM", {"num_hidden_layers": 2, "kv_lora_rank": 8}, "DeepseekV3ForCausalLM, for its latent"),
        ("NewForCausalLM", {"num_hidden_layers": 2, "layer_types": ["mamba"]}, "It has state-space layers"),
        ("NewForMaskedLM", {"num_hidden_layers": 2}, "It does not continue text"),
        ("NewForConditionalGeneration", {"is_encoder_decoder": True}, "It is an encoder-decoder"),
        ("NewForCausalLM", {"layer_types": 7, "num_hidden_layers": 2}, "LlamaForCausalLM"),
    ],
)
def test_the_nearest_follows_from_the_fields(architecture: str, fields: dict[str, Any], said: str) -> None:
    assert said in advice(architecture, fields, SUPPORTED)
