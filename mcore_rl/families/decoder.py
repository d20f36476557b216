"""The fields of ``config.json`` that the families share, as transformers names and reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mcore_rl.config.model import Activation, ModelConfig
from mcore_rl.families.fields import ANYWAY, FULL, Fields
from mcore_rl.families.rope import Reader, read_partial_rotary_factor, read_rope

# Fields with the number of layers of multi-token prediction, which are no part of the policy: neither read nor written.
PREDICTION_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers")
SLIDING = "sliding_attention"
LINEAR = "linear_attention"
# Other names under which vLLM looks for the longest sequence; it takes the least of those that are there.
OTHER_LENGTHS = (
    "n_positions",
    "max_seq_len",
    "seq_length",
    "max_sequence_length",
    "max_seq_length",
    "model_max_length",
    "seq_len",
)


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """The defaults of transformers' configuration class (5.19) for fields missing in ``config.json``, by its names.

    num_key_value_heads: None: num_attention_heads.  head_dim: None: hidden_size / num_attention_heads.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    tie_word_embeddings: bool = False


def read_decoder(
    fields: Fields,
    defaults: Defaults,
    *,
    partial_rotary_factor: float | None = None,
    kinds: Mapping[str, Reader] | None = None,
) -> ModelConfig:
    """A decoder of SiLU-gated MLPs without windows, biases or experts: the common base of the families.

    partial_rotary_factor: the class's default; None: the family rotates whole heads.  kinds: of
    ``read_rope``.
    """
    model = read_sizes(fields, defaults)
    heads = model.num_attention_heads
    hidden = model.hidden_size
    head_dim = fields.optional("head_dim", int, defaults.head_dim)
    if head_dim is None and heads >= 1:
        if hidden % heads:
            remedy = "Write head_dim, or a multiple of num_attention_heads"
            fields.refuse("hidden_size", f"num_attention_heads={heads} does not divide hidden_size={hidden}", remedy)
        head_dim = hidden // heads
    model.head_dim = head_dim or 0
    fields.demand("hidden_act", "silu", because="gates the MLP by another function")
    if partial_rotary_factor is not None:
        model.rotary_percent = read_partial_rotary_factor(fields, partial_rotary_factor)
    partial = partial_rotary_factor is not None
    longest = model.max_position_embeddings
    model.rotary_base, model.rope, _ = read_rope(fields, defaults.rope_theta, longest, kinds=kinds, partial=partial)
    return model


def read_sizes(fields: Fields, defaults: Defaults) -> ModelConfig:
    """The sizes alone; the family sets head_dim, activation and rope."""
    heads = fields.take("num_attention_heads", int, defaults.num_attention_heads)
    longest = fields.take("max_position_embeddings", int, defaults.max_position_embeddings)
    for name in OTHER_LENGTHS:
        if type(length := fields.values.get(name)) is int:
            fields.ignore(name)
            if length < longest:
                problem = f"is less than max_position_embeddings={longest}, and vLLM draws no longer sequence"
                fields.refuse(name, problem, ANYWAY.format(name))
    return ModelConfig(
        num_layers=fields.take("num_hidden_layers", int, defaults.num_hidden_layers),
        hidden_size=fields.take("hidden_size", int, defaults.hidden_size),
        ffn_hidden_size=fields.take("intermediate_size", int, defaults.intermediate_size),
        num_attention_heads=heads,
        num_query_groups=_or(fields.optional("num_key_value_heads", int, defaults.num_key_value_heads), heads),
        head_dim=0,
        vocab_size=fields.take("vocab_size", int, defaults.vocab_size),
        max_position_embeddings=longest,
        norm_epsilon=fields.take("rms_norm_eps", float, defaults.rms_norm_eps),
        activation=Activation.silu,
        tie_output=fields.take("tie_word_embeddings", bool, defaults.tie_word_embeddings),
    )


def _or(value: int | None, other: int) -> int:
    return other if value is None else value


def demand_plain_heads(fields: Fields, model: ModelConfig) -> None:
    """Refuse heads of another width than vLLM 0.32 takes those of the family to have."""
    width = model.hidden_size // max(model.num_attention_heads, 1)
    fields.demand("head_dim", width, None, because=f"is not {width}, as vLLM 0.32 takes it to be")


def demand_untied(fields: Fields) -> None:
    """Refuse an output projection that is the embedding, in a family whose models in vLLM 0.32 have none such."""
    fields.demand("tie_word_embeddings", False, because="ties the output to the embedding, and vLLM 0.32 does not")


def window_every_layer(fields: Fields, model: ModelConfig, default: int | None) -> None:
    """Apply ``sliding_window`` to every layer, unless it is null (Mistral, Mixtral).  default: if it is missing."""
    window = fields.optional("sliding_window", int, default)
    set_window(model, window, list(range(model.num_layers)))
    if window is not None:
        fields.demand("layer_types", None, because="is read by vLLM alone, and here every layer has a window")


def window_some_layers(fields: Fields, model: ModelConfig, sliding: list[int]) -> None:
    """Apply ``sliding_window`` in the layers of ``layer_types`` (else ``sliding``) if ``use_sliding_window`` (Qwen)."""
    wanted = fields.take("use_sliding_window", bool, False)
    window = fields.optional("sliding_window", int, 4096)
    layers = read_layer_types(fields, model, sliding if wanted and window is not None else [])
    set_window(model, window if wanted else None, layers)
    if layers and (not wanted or window is None):
        fields.refuse("layer_types", f"names {SLIDING}, and no window is on", "Write use_sliding_window and its size")
    elif layers and len(layers) < model.num_layers:
        problem = f"puts a window into layers {layers} only, and vLLM 0.32 has it in every layer of this family or none"
        fields.refuse("use_sliding_window", problem, "Choose a checkpoint with windows in all layers, or in none")


def window_last_layers(fields: Fields, model: ModelConfig) -> None:
    """``window_some_layers`` from ``max_window_layers`` on (Qwen2, Qwen3)."""
    full = fields.take("max_window_layers", int, 28)
    window_some_layers(fields, model, [layer for layer in range(model.num_layers) if layer >= full])


def read_layer_types(fields: Fields, model: ModelConfig, default: list[int], other: str = SLIDING) -> list[int]:
    """The layers (from 0) that ``layer_types`` calls ``other`` instead of ``FULL``; ``default`` if it is missing."""
    types = fields.listed("layer_types", str)
    if types is None:
        return default
    if len(types) != model.num_layers or not set(types) <= {other, FULL}:
        problem = f"must name one of {other} and {FULL} for each of the {model.num_layers} layers"
        fields.refuse("layer_types", problem, "Choose a checkpoint with these kinds of attention")
        return default
    return [layer for layer, kind in enumerate(types) if kind == other]


def set_window(model: ModelConfig, window: int | None, layers: list[int]) -> None:
    """Set a window of ``window`` tokens in ``layers``; do nothing if either is missing."""
    if window is not None and layers:
        model.sliding_window = window
        model.sliding_layers = layers


def read_dense_layers(fields: Fields, num_layers: int) -> list[int]:
    """The layers without experts, by ``decoder_sparse_step`` and ``mlp_only_layers`` (Qwen)."""
    step = fields.take("decoder_sparse_step", int, 1)
    named = fields.listed("mlp_only_layers", int) or []
    if step < 1:
        fields.refuse("decoder_sparse_step", "experts are in every so many layers", "Write 1 or more")
        return []
    return [layer for layer in range(num_layers) if layer in named or (layer + 1) % step]
