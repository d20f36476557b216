"""Rows that several families share; a family's tables join these with its own.

Megatron's names are those of Megatron-core's local layers; ``weights/names.py`` knows Transformer Engine's.  vLLM's
tensors (0.32) are those of a rollout rank before any kernel packs them: it fuses linear layers (``qkv_proj``,
``gate_up_proj``), stacks the experts of a rank into one tensor, and pads the vocabulary to a multiple of 64
(vllm/model_executor/layers/vocab_parallel_embedding.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from mcore_rl.config.model import ModelConfig
from mcore_rl.config.rollout import VOCAB_PADDING
from mcore_rl.families.rules import (
    Axis,
    HfTensor,
    Layers,
    Rule,
    Stage,
    grouped_qkv,
    hf,
    megatron_vocab,
    padded_vocab,
    replicated_qkv,
    split,
)

LAYER = "decoder.layers.{l}."
ATTENTION = LAYER + "self_attention."
HF_LAYER = "model.layers.{l}."
HF_ATTENTION = HF_LAYER + "self_attn."
HF_MLP = HF_LAYER + "mlp."


@dataclass(frozen=True)
class Tables:
    """Rows of both tables of a family.  weights: Megatron's tensors.  rollout: vLLM's."""

    weights: tuple[Rule, ...]
    rollout: tuple[Rule, ...]

    def __add__(self, more: Tables) -> Tables:
        """These rows, and ``more`` behind them."""
        return Tables(self.weights + more.weights, self.rollout + more.rollout)

    def replaced(self, **values: Any) -> Tables:
        """These rows with other ``values`` of fields of ``Rule``."""
        weights, rollout = (tuple(replace(rule, **values) for rule in rules) for rules in (self.weights, self.rollout))
        return Tables(weights, rollout)


def of_vllm(rule: Rule) -> Rule:
    """vLLM's row of a tensor that it cuts as Megatron does, under its Hugging Face name."""
    return replace(rule, name=rule.hf[0].name, checkpoint=None, stored_parts=())


def alike(*rules: Rule) -> Tables:
    """Megatron's ``rules``, and vLLM's rows of the same tensors, which it cuts alike."""
    return Tables(rules, tuple(map(of_vllm, rules)))


def same(tensor: HfTensor, layers: Layers = Layers.all) -> Rule:
    """vLLM's row of a tensor that every rank holds whole, under its Hugging Face name."""
    return Rule(tensor.name, (tensor,), layers=layers)


def norm(name: str, size: str = "hidden") -> Rule:
    """vLLM's row of a layer's norm ``name``."""
    return same(hf(f"{HF_LAYER}{name}.weight", size))


def tied(model: ModelConfig) -> bool:
    """Whether the output projection is the embedding."""
    return model.tie_output


def untied(model: ModelConfig) -> bool:
    """Whether the output projection is a tensor of its own."""
    return not model.tie_output


EMBEDDING_TENSOR = hf("model.embed_tokens.weight", "vocab", "hidden")
OUTPUT_TENSOR = hf("lm_head.weight", "vocab", "hidden")
_EMBEDDING = Rule(
    "embedding.word_embeddings.weight", (EMBEDDING_TENSOR,), megatron_vocab, axis=Axis.tensor, stage=Stage.first
)
_FINAL_NORM = Rule("decoder.final_layernorm.weight", (hf("model.norm.weight", "hidden"),), stage=Stage.last)
_OUTPUT = Rule("output_layer.weight", (OUTPUT_TENSOR,), megatron_vocab, axis=Axis.tensor, stage=Stage.last, only=untied)
# The last stage of a tied model has a copy of the embedding as its output projection.
_TIED_OUTPUT = replace(_OUTPUT, hf=(EMBEDDING_TENSOR,), stage=Stage.last_copy, only=tied, checkpoint=_EMBEDDING.name)
_vllm_vocab = padded_vocab(VOCAB_PADDING)
ENDS = Tables(
    (_EMBEDDING, _FINAL_NORM, _OUTPUT, _TIED_OUTPUT),
    # With tied embeddings the head is the embedding's module, without a tensor of its own.
    (
        replace(of_vllm(_EMBEDDING), layout=_vllm_vocab),
        of_vllm(_FINAL_NORM),
        replace(of_vllm(_OUTPUT), layout=_vllm_vocab),
    ),
)

# A critic has this in place of the output projection; transformers' ...ForSequenceClassification names it so.
VALUE_HEAD = Rule("output_layer.weight", (hf("score.weight", "one", "hidden"),), stage=Stage.last, absent_ok=True)

_INPUT_NORM = Rule(LAYER + "input_layernorm.weight", (hf(HF_LAYER + "input_layernorm.weight", "hidden"),))
# Transformer Engine fuses the norm with the projection behind it, if there is one, and names it so in checkpoints.
INPUT_NORM = replace(_INPUT_NORM, checkpoint=ATTENTION + "linear_qkv.layer_norm_weight")


def pre_mlp_norm(name: str) -> tuple[Rule, ...]:
    """Megatron's rows of the norm before the MLP, by its Hugging Face ``name``.

    It has another key in layers with experts.
    """
    dense, experts = (
        Rule(LAYER + "pre_mlp_layernorm.weight", (hf(name, "hidden"),), layers=layers, checkpoint=key)
        for layers, key in ((Layers.dense, LAYER + "mlp.linear_fc1.layer_norm_weight"), (Layers.experts, None))
    )
    return dense, experts


PRE_MLP_NORM = pre_mlp_norm(HF_LAYER + "post_attention_layernorm.weight")
NORMS = Tables((INPUT_NORM, *PRE_MLP_NORM), (norm("input_layernorm"), norm("post_attention_layernorm")))
UNFUSED_NORMS = Tables((_INPUT_NORM, *PRE_MLP_NORM), NORMS.rollout)


def _grouped_qkv(kind: str, *dims: str) -> Tables:
    """Query, key and value projections.  kind: weight or bias.  dims: the dimensions after the rows."""
    tensors = tuple(
        hf(f"{HF_ATTENTION}{part}_proj.{kind}", rows, *dims)
        for part, rows in (("q", "query"), ("k", "key"), ("v", "key"))
    )
    fused = Rule(f"{ATTENTION}linear_qkv.{kind}", tensors, grouped_qkv, axis=Axis.tensor)
    return Tables((fused,), (replace(fused, name=f"{HF_ATTENTION}qkv_proj.{kind}", layout=replicated_qkv),))


OUTPUT_PROJECTION = alike(
    Rule(
        ATTENTION + "linear_proj.weight",
        (hf(HF_ATTENTION + "o_proj.weight", "hidden", "query"),),
        split,
        dim=1,
        axis=Axis.tensor,
    )
)
GROUPED_ATTENTION = _grouped_qkv("weight", "hidden") + OUTPUT_PROJECTION
QKV_BIAS = _grouped_qkv("bias")
QK_NORM = alike(
    Rule(ATTENTION + "q_layernorm.weight", (hf(HF_ATTENTION + "q_norm.weight", "head"),)),
    Rule(ATTENTION + "k_layernorm.weight", (hf(HF_ATTENTION + "k_norm.weight", "head"),)),
)
# A norm over all heads of a token: each tensor rank holds the weights of its own heads.
JOINT_QK_NORM = alike(
    Rule(ATTENTION + "q_layernorm.weight", (hf(HF_ATTENTION + "q_norm.weight", "query"),), split, axis=Axis.tensor),
    Rule(ATTENTION + "k_layernorm.weight", (hf(HF_ATTENTION + "k_norm.weight", "key"),), split, axis=Axis.tensor),
)


def gated_mlp(local: str, theirs: str, width: str, layers: Layers, axis: Axis = Axis.tensor) -> Tables:
    """A gated MLP, split over tensor ranks.

    local, theirs: prefixes of Megatron's and Hugging Face's names, ending in a dot.  width: the inner size, a key of
    ``SIZES``.  axis: vLLM's.
    """
    fused = (hf(theirs + "gate_proj.weight", width, "hidden"), hf(theirs + "up_proj.weight", width, "hidden"))
    down = (hf(theirs + "down_proj.weight", "hidden", width),)
    fc1 = Rule(local + "linear_fc1.weight", fused, split, axis=Axis.tensor, layers=layers)
    fc2 = Rule(local + "linear_fc2.weight", down, split, dim=1, axis=Axis.tensor, layers=layers)
    theirs_fc1 = replace(fc1, name=theirs + "gate_up_proj.weight", axis=axis)
    return Tables((fc1, fc2), (theirs_fc1, replace(of_vllm(fc2), axis=axis)))


DENSE_MLP = gated_mlp(LAYER + "mlp.", HF_MLP, "ffn", Layers.dense)


def shared_experts(axis: Axis) -> Tables:
    """Experts that all tokens share, by DeepSeek's names, and those of families after it.  axis: vLLM's."""
    return gated_mlp(LAYER + "mlp.shared_experts.", HF_MLP + "shared_experts.", "shared_ffn", Layers.experts, axis)


def router_bias(name: str) -> Tables:
    """The bias by which experts are chosen, by its Hugging Face ``name``."""
    bias = (hf(name, "experts"),)
    return alike(Rule(LAYER + "mlp.router.expert_bias", bias, layers=Layers.experts, dtype="float32"))


ROUTER_BIAS = router_bias(HF_MLP + "gate.e_score_correction_bias")


def experts(
    theirs: str,
    gate: str = "gate_proj",
    up: str = "up_proj",
    down: str = "down_proj",
    router: str = "gate.weight",
    router_dtype: str | None = None,
) -> Tables:
    """Router and experts.

    theirs: prefix of the Hugging Face names, ending in a dot.  gate, up, down: the family's names of the matrices.
    router_dtype: vLLM's; None: the model's.
    """
    local = LAYER + "mlp.experts.local_experts.{e}."
    stored = LAYER + "mlp.experts.experts."
    each = theirs + "experts.{e}."
    choice = Rule(LAYER + "mlp.router.weight", (hf(theirs + router, "experts", "hidden"),), layers=Layers.experts)
    fc1 = Rule(
        local + "linear_fc1.weight",
        (hf(f"{each}{gate}.weight", "expert_ffn", "hidden"), hf(f"{each}{up}.weight", "expert_ffn", "hidden")),
        split,
        axis=Axis.expert_tensor,
        layers=Layers.experts,
        checkpoint=stored + "linear_fc1.weight",
    )
    fc2 = replace(
        fc1,
        name=local + "linear_fc2.weight",
        hf=(hf(f"{each}{down}.weight", "hidden", "expert_ffn"),),
        dim=1,
        checkpoint=stored + "linear_fc2.weight",
    )
    w13, w2 = (
        replace(rule, name=f"{theirs}experts.routed_experts.{name}", checkpoint=None, stacked=True)
        for rule, name in ((fc1, "w13_weight"), (fc2, "w2_weight"))
    )
    return Tables((choice, fc1, fc2), (replace(of_vllm(choice), dtype=router_dtype), w13, w2))
