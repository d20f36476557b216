"""Rows for Megatron's tensors that several families share; a family's table joins these with its own.

Names on the left are those of Megatron-core's local layers; ``weights/names.py`` knows Transformer Engine's.
"""

from __future__ import annotations

from dataclasses import replace

from mcore_rl.config.model import ModelConfig
from mcore_rl.families.rules import (
    Axis,
    HfTensor,
    Layers,
    Rule,
    Stage,
    grouped_qkv,
    hf,
    megatron_vocab,
    split,
)

LAYER = "decoder.layers.{l}."
ATTENTION = LAYER + "self_attention."
HF_LAYER = "model.layers.{l}."
HF_ATTENTION = HF_LAYER + "self_attn."
HF_MLP = HF_LAYER + "mlp."


def tied(model: ModelConfig) -> bool:
    """Whether the output projection is the embedding."""
    return model.tie_output


def untied(model: ModelConfig) -> bool:
    """Whether the output projection is a tensor of its own."""
    return not model.tie_output


EMBEDDING_TENSOR = hf("model.embed_tokens.weight", "vocab", "hidden")
OUTPUT_TENSOR = hf("lm_head.weight", "vocab", "hidden")

ENDS = (
    Rule("embedding.word_embeddings.weight", (EMBEDDING_TENSOR,), megatron_vocab, axis=Axis.tensor, stage=Stage.first),
    Rule("decoder.final_layernorm.weight", (hf("model.norm.weight", "hidden"),), stage=Stage.last),
    Rule(
        "output_layer.weight",
        (OUTPUT_TENSOR,),
        megatron_vocab,
        axis=Axis.tensor,
        stage=Stage.last,
        only=untied,
    ),
    # The last stage of a tied model has a copy of the embedding as its output projection.
    Rule(
        "output_layer.weight",
        (EMBEDDING_TENSOR,),
        megatron_vocab,
        axis=Axis.tensor,
        stage=Stage.last_copy,
        only=tied,
        checkpoint="embedding.word_embeddings.weight",
    ),
)

# A critic has this in place of the output projection; transformers' ...ForSequenceClassification names it so.
VALUE_HEAD = Rule("output_layer.weight", (hf("score.weight", "one", "hidden"),), stage=Stage.last, absent_ok=True)

_INPUT_NORM = Rule(LAYER + "input_layernorm.weight", (hf(HF_LAYER + "input_layernorm.weight", "hidden"),))
# Transformer Engine fuses the norm with the projection behind it, if there is one, and names it so in checkpoints.
INPUT_NORM = replace(_INPUT_NORM, checkpoint=ATTENTION + "linear_qkv.layer_norm_weight")


def pre_mlp_norm(name: str) -> tuple[Rule, ...]:
    """The norm before the MLP, by its Hugging Face ``name``; it has another key in layers with experts."""
    dense, experts = (
        Rule(LAYER + "pre_mlp_layernorm.weight", (hf(name, "hidden"),), layers=layers, checkpoint=key)
        for layers, key in ((Layers.dense, LAYER + "mlp.linear_fc1.layer_norm_weight"), (Layers.experts, None))
    )
    return dense, experts


PRE_MLP_NORM = pre_mlp_norm(HF_LAYER + "post_attention_layernorm.weight")
NORMS = (INPUT_NORM, *PRE_MLP_NORM)
UNFUSED_NORMS = (_INPUT_NORM, *PRE_MLP_NORM)


def grouped_qkv_tensors(kind: str, *dims: str) -> tuple[HfTensor, ...]:
    """Query, key and value projections.  kind: weight or bias.  dims: the dimensions after the rows."""
    return tuple(
        hf(f"{HF_ATTENTION}{part}_proj.{kind}", rows, *dims)
        for part, rows in (("q", "query"), ("k", "key"), ("v", "key"))
    )


OUTPUT_PROJECTION = Rule(
    ATTENTION + "linear_proj.weight",
    (hf(HF_ATTENTION + "o_proj.weight", "hidden", "query"),),
    split,
    dim=1,
    axis=Axis.tensor,
)
GROUPED_ATTENTION = (
    Rule(ATTENTION + "linear_qkv.weight", grouped_qkv_tensors("weight", "hidden"), grouped_qkv, axis=Axis.tensor),
    OUTPUT_PROJECTION,
)
QKV_BIAS = (Rule(ATTENTION + "linear_qkv.bias", grouped_qkv_tensors("bias"), grouped_qkv, axis=Axis.tensor),)
QK_NORM = (
    Rule(ATTENTION + "q_layernorm.weight", (hf(HF_ATTENTION + "q_norm.weight", "head"),)),
    Rule(ATTENTION + "k_layernorm.weight", (hf(HF_ATTENTION + "k_norm.weight", "head"),)),
)
# A norm over all heads of a token: each tensor rank holds the weights of its own heads.
JOINT_QK_NORM = (
    Rule(ATTENTION + "q_layernorm.weight", (hf(HF_ATTENTION + "q_norm.weight", "query"),), split, axis=Axis.tensor),
    Rule(ATTENTION + "k_layernorm.weight", (hf(HF_ATTENTION + "k_norm.weight", "key"),), split, axis=Axis.tensor),
)


def gated_mlp(local: str, theirs: str, width: str, layers: Layers) -> tuple[Rule, ...]:
    """A gated MLP, split over tensor ranks.

    local, theirs: prefixes of Megatron's and Hugging Face's names, ending in a dot.  width: the inner size, a key of
    ``SIZES``.
    """
    fused = (hf(theirs + "gate_proj.weight", width, "hidden"), hf(theirs + "up_proj.weight", width, "hidden"))
    down = (hf(theirs + "down_proj.weight", "hidden", width),)
    return (
        Rule(local + "linear_fc1.weight", fused, split, axis=Axis.tensor, layers=layers),
        Rule(local + "linear_fc2.weight", down, split, dim=1, axis=Axis.tensor, layers=layers),
    )


DENSE_MLP = gated_mlp(LAYER + "mlp.", HF_MLP, "ffn", Layers.dense)
# DeepSeek's names, and those of families after it.
SHARED_EXPERTS = gated_mlp(LAYER + "mlp.shared_experts.", HF_MLP + "shared_experts.", "shared_ffn", Layers.experts)
BIAS_OF_EXPERTS = hf(HF_MLP + "gate.e_score_correction_bias", "experts")
ROUTER_BIAS = Rule(LAYER + "mlp.router.expert_bias", (BIAS_OF_EXPERTS,), layers=Layers.experts, dtype="float32")


def experts(
    theirs: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj", router: str = "gate.weight"
) -> tuple[Rule, ...]:
    """Router and experts.

    theirs: prefix of the Hugging Face names, ending in a dot.  gate, up, down: the family's names of the matrices.
    """
    local = LAYER + "mlp.experts.local_experts.{e}."
    stored = LAYER + "mlp.experts.experts."
    each = theirs + "experts.{e}."
    fused = (hf(f"{each}{gate}.weight", "expert_ffn", "hidden"), hf(f"{each}{up}.weight", "expert_ffn", "hidden"))
    return (
        Rule(LAYER + "mlp.router.weight", (hf(theirs + router, "experts", "hidden"),), layers=Layers.experts),
        Rule(
            local + "linear_fc1.weight",
            fused,
            split,
            axis=Axis.expert_tensor,
            layers=Layers.experts,
            checkpoint=stored + "linear_fc1.weight",
        ),
        Rule(
            local + "linear_fc2.weight",
            (hf(f"{each}{down}.weight", "hidden", "expert_ffn"),),
            split,
            dim=1,
            axis=Axis.expert_tensor,
            layers=Layers.experts,
            checkpoint=stored + "linear_fc2.weight",
        ),
    )
