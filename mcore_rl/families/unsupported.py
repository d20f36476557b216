"""What to tell the user of a checkpoint whose architecture no family reads: what is nearest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# Architecture -> (the nearest that is supported, what it differs in).
NEAREST = {
    "ApertusForCausalLM": ("LlamaForCausalLM", "an MLP without a gate and norms over query and key heads"),
    "ArceeForCausalLM": ("LlamaForCausalLM", "an MLP without a gate"),
    "BailingMoeForCausalLM": ("Qwen2MoeForCausalLM", "fused projections"),
    "BailingMoeV2ForCausalLM": ("Glm4MoeForCausalLM", "fused projections, and transformers 5.19 has no class of it"),
    "CohereForCausalLM": ("LlamaForCausalLM", "LayerNorm, attention beside the MLP and scaled logits"),
    "Cohere2ForCausalLM": ("LlamaForCausalLM", "LayerNorm, attention beside the MLP and some layers without positions"),
    "DeepseekForCausalLM": ("Qwen2MoeForCausalLM", "shared experts, which have no gate"),
    "DeepseekV32ForCausalLM": ("DeepseekV3ForCausalLM", "sparse attention"),
    "DeepseekV4ForCausalLM": ("DeepseekV3ForCausalLM", "sparse attention of another kind"),
    "Ernie4_5_MoeForCausalLM": (
        "Ernie4_5ForCausalLM",
        "experts that a bias of softmax scores chooses, which Megatron has for sigmoids alone",
    ),
    "Exaone4ForCausalLM": ("Qwen3ForCausalLM", "norms behind each block and layers without positions"),
    "FalconForCausalLM": ("LlamaForCausalLM", "LayerNorm and an MLP without a gate"),
    "GemmaForCausalLM": ("Gemma2ForCausalLM", "having no soft caps and no windows"),
    "Glm4ForCausalLM": ("LlamaForCausalLM", "partly rotated heads and norms behind each block"),
    "GlmMoeDsaForCausalLM": ("DeepseekV3ForCausalLM", "sparse attention"),
    "GraniteForCausalLM": ("LlamaForCausalLM", "multipliers of embeddings, attention, residuals and logits"),
    "GraniteMoeForCausalLM": ("MixtralForCausalLM", "multipliers of embeddings, attention, residuals and logits"),
    "GraniteMoeHybridForCausalLM": (
        "MixtralForCausalLM",
        "multipliers of embeddings, attention, residuals and logits, and most checkpoints in layers of a state space",
    ),
    "GraniteMoeSharedForCausalLM": (
        "Qwen2MoeForCausalLM",
        "multipliers of embeddings, attention, residuals and logits, and a shared expert without a gate",
    ),
    "HunYuanDenseV1ForCausalLM": ("Qwen3ForCausalLM", "norms over query and key heads behind the rotation"),
    "HunYuanMoEV1ForCausalLM": (
        "Qwen3MoeForCausalLM",
        "norms over query and key heads behind the rotation and a shared expert without a gate",
    ),
    "InternLM2ForCausalLM": ("LlamaForCausalLM", "a fused projection"),
    "Llama4ForCausalLM": ("LlamaForCausalLM", "experts, chunked attention and layers without positions"),
    "Llama4ForConditionalGeneration": ("LlamaForCausalLM", "experts, chunked attention and images"),
    "MiMoForCausalLM": ("Qwen2ForCausalLM", "layers of multi-token prediction"),
    "MiniCPMForCausalLM": ("LlamaForCausalLM", "scaled embeddings, residuals and logits"),
    "MllamaForConditionalGeneration": ("LlamaForCausalLM", "images"),
    "NemotronHForCausalLM": (
        "Qwen3NextForCausalLM",
        "layers of a Mamba-2 state space, attention without positions, and MLPs of squared ReLU without a gate",
    ),
    "OlmoForCausalLM": ("LlamaForCausalLM", "LayerNorm without weights"),
    "Olmo2ForCausalLM": ("LlamaForCausalLM", "norms behind each block and over whole queries and keys"),
    "Olmo3ForCausalLM": (
        "OlmoeForCausalLM",
        "norms behind each block and none before, and windows in most layers",
    ),
    "PhimoeForCausalLM": ("MixtralForCausalLM", "another routing, LayerNorm and biases"),
    "Qwen2VLForConditionalGeneration": ("Qwen2ForCausalLM", "images"),
    "StableLmForCausalLM": ("LlamaForCausalLM", "LayerNorm and partly rotated heads"),
    "Starcoder2ForCausalLM": ("LlamaForCausalLM", "LayerNorm, biases and an MLP without a gate"),
}
# What a checkpoint is, and why it is not trained, by beginnings of its model type.
_DECODERS = "only decoders can be trained"
_STATE_SPACE = "layers of a state space are not trained"
_KINDS = (
    ("an encoder", _DECODERS, ("bert", "roberta", "deberta", "electra", "xlm", "modernbert", "mpnet", "nomic")),
    ("an encoder-decoder", _DECODERS, ("t5", "mt5", "bart", "mbart", "whisper", "pegasus", "m2m", "marian")),
    ("a state-space model", _STATE_SPACE, ("mamba", "rwkv", "falcon_mamba")),
    ("a recurrent model", "recurrent layers are not trained", ("xlstm", "recurrent_gemma")),
    (
        "a hybrid of attention and state-space layers",
        _STATE_SPACE,
        ("nemotron_h", "jamba", "zamba", "bamba", "falcon_h1", "granitemoehybrid"),
    ),
)


_OTHER_ENDS = ("MaskedLM", "SequenceClassification", "TokenClassification", "QuestionAnswering")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_DECODER_FIELDS = ("num_hidden_layers", "vocab_size")
_MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
LINEAR = "linear attention"
LATENT = "latent attention"
EXPERTS = "experts"
WINDOWS = "windows in some layers"
# What an architecture can be nearest in -> the supported one that has it; the first that applies is named.
_NEAREST_BY = (
    ({LINEAR, EXPERTS}, "Qwen3NextForCausalLM"),
    ({LINEAR}, "Qwen3_5ForCausalLM"),
    ({LATENT, EXPERTS}, "DeepseekV3ForCausalLM"),
    ({LATENT}, "DeepseekV3ForCausalLM"),
    ({EXPERTS}, "MixtralForCausalLM"),
    ({WINDOWS}, "Gemma3ForCausalLM"),
    (set[str](), "LlamaForCausalLM"),
)


def features(config: Mapping[str, Any]) -> list[str]:
    """What ``config`` says of its layers; it names only what a field states, and never that something is not there."""
    of_mlp = config.get("ffn_config")  # DBRX
    parts = [config, of_mlp] if isinstance(of_mlp, dict) else [config]
    listed = config.get("layer_types")
    kinds = {str(kind) for kind in listed} if isinstance(listed, list) else set[str]()
    # transformers 5 calls layers of a state space linear_attention, too (granitemoehybrid).
    state_space = any(key.startswith(("mamba_", "ssm_")) for key in config) or "mamba" in kinds
    present = {
        "state-space layers": state_space,
        LINEAR: "linear_attention" in kinds and not state_space,
        "convolutions": "conv" in kinds,
        LATENT: bool(config.get("kv_lora_rank")),
        "sparse attention": bool(config.get("index_topk")),
        EXPERTS: any(isinstance(part.get(key), int) and part[key] > 1 for part in parts for key in _EXPERTS),
        WINDOWS: {"sliding_attention", "full_attention"} <= kinds,
        "multipliers": any(config.get(key) not in (None, 1, 1.0) for key in _MULTIPLIERS),
        "biases": bool(config.get("attention_bias") or config.get("mlp_bias")),
    }
    return [name for name, is_there in present.items() if is_there]


def _nearest_by_fields(config: Mapping[str, Any]) -> str:
    stated = features(config)
    has, nearest = next((has, name) for has, name in _NEAREST_BY if has <= set(stated))
    others = [name for name in stated if name not in has]
    shared = f", for its {' and '.join(sorted(has))}" if has else ""
    differs = f"{', '.join(others)} and " if others else ""
    return f"The nearest by config.json is {nearest}{shared}, and it differs in {differs}code of its own. "


def advice(architecture: str, config: Mapping[str, Any], supported: Sequence[str]) -> str:
    """A sentence on ``architecture``, with a blank behind it: what is nearest; "": it says nothing of its layers.

    supported: the architectures that are read here.
    """
    if architecture in NEAREST and architecture not in supported:
        nearest, difference = NEAREST[architecture]
        return f"The nearest is {nearest}, and it differs in {difference}. "
    kind = str(config.get("model_type", "")).lower()
    for what, reason, beginnings in _KINDS:
        if kind.startswith(beginnings) and not kind.endswith("-decoder"):
            return f"It is {what}, and {reason}. "
    if any(config.get(part) for part in ("vision_config", "audio_config")):
        return "It reads more than text, and only decoders of text can be trained. "
    if config.get("is_encoder_decoder"):
        return f"It is an encoder-decoder, and {_DECODERS}. "
    if config.get("type_vocab_size"):  # BERT's, and of those after it
        return f"It is an encoder, and {_DECODERS}. "
    if architecture.endswith(_OTHER_ENDS):
        return f"It does not continue text, and {_DECODERS}. "
    if "state-space layers" in features(config):
        return f"It has state-space layers, and {_STATE_SPACE}. "
    text = config.get("text_config")
    of_text = text if isinstance(text, dict) else config
    return _nearest_by_fields(of_text) if any(of_text.get(key) for key in _DECODER_FIELDS) else ""
