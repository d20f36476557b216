"""Rows for vLLM's tensors (0.32) that several families share: a rollout rank's tensors before any kernel packs them.

vLLM fuses linear layers (``qkv_proj``, ``gate_up_proj``), stacks the experts of a rank into one tensor, and pads the
vocabulary to a multiple of 64 (vllm/model_executor/layers/vocab_parallel_embedding.py).
"""

from __future__ import annotations

from dataclasses import replace

from mcore_rl.config.rollout import VOCAB_PADDING
from mcore_rl.families.blocks import (
    BIAS_OF_EXPERTS,
    EMBEDDING_TENSOR,
    HF_ATTENTION,
    HF_LAYER,
    HF_MLP,
    grouped_qkv_tensors,
    untied,
)
from mcore_rl.families.rules import (
    Axis,
    HfTensor,
    Layers,
    Rule,
    Stage,
    hf,
    padded_vocab,
    replicated_qkv,
    split,
)

vllm_vocab = padded_vocab(VOCAB_PADDING)


def same(tensor: HfTensor, layers: Layers = Layers.all, stage: Stage = Stage.layer) -> Rule:
    """A tensor that every rank holds whole, under its Hugging Face name."""
    return Rule(tensor.name, (tensor,), layers=layers, stage=stage)


def norm(name: str, size: str = "hidden") -> Rule:
    """The rule of a layer's norm ``name``."""
    return same(hf(f"{HF_LAYER}{name}.weight", size))


ENDS = (
    Rule(EMBEDDING_TENSOR.name, (EMBEDDING_TENSOR,), vllm_vocab, axis=Axis.tensor, stage=Stage.first),
    same(hf("model.norm.weight", "hidden"), stage=Stage.last),
    # With tied embeddings the head is the embedding's module, without a tensor of its own.
    Rule(
        "lm_head.weight",
        (hf("lm_head.weight", "vocab", "hidden"),),
        vllm_vocab,
        axis=Axis.tensor,
        stage=Stage.last,
        only=untied,
    ),
)
NORMS = (norm("input_layernorm"), norm("post_attention_layernorm"))
OUTPUT_PROJECTION = Rule(
    HF_ATTENTION + "o_proj.weight",
    (hf(HF_ATTENTION + "o_proj.weight", "hidden", "query"),),
    split,
    dim=1,
    axis=Axis.tensor,
)
GROUPED_ATTENTION = (
    Rule(HF_ATTENTION + "qkv_proj.weight", grouped_qkv_tensors("weight", "hidden"), replicated_qkv, axis=Axis.tensor),
    OUTPUT_PROJECTION,
)
QKV_BIAS = (Rule(HF_ATTENTION + "qkv_proj.bias", grouped_qkv_tensors("bias"), replicated_qkv, axis=Axis.tensor),)
QK_NORM = (norm("self_attn.q_norm", "head"), norm("self_attn.k_norm", "head"))
JOINT_QK_NORM = (norm("self_attn.q_norm", "query"), norm("self_attn.k_norm", "key"))  # of all heads, on every rank


def gated_mlp(prefix: str, width: str, layers: Layers, axis: Axis = Axis.tensor) -> tuple[Rule, ...]:
    """``gate_up_proj`` and ``down_proj`` below ``prefix`` (ends in a dot)."""
    fused = (hf(prefix + "gate_proj.weight", width, "hidden"), hf(prefix + "up_proj.weight", width, "hidden"))
    down = hf(prefix + "down_proj.weight", "hidden", width)
    return (
        Rule(prefix + "gate_up_proj.weight", fused, split, axis=axis, layers=layers),
        Rule(down.name, (down,), split, dim=1, axis=axis, layers=layers),
    )


DENSE_MLP = gated_mlp(HF_MLP, "ffn", Layers.dense)
ROUTER_BIAS = Rule(BIAS_OF_EXPERTS.name, (BIAS_OF_EXPERTS,), layers=Layers.experts, dtype="float32")


def experts(
    theirs: str,
    gate: str = "gate_proj",
    up: str = "up_proj",
    down: str = "down_proj",
    router_dtype: str | None = None,
) -> tuple[Rule, ...]:
    """Router and stacked experts below ``theirs`` (ends in a dot).  router_dtype: None: the model's."""
    each = theirs + "experts.{e}."
    stored = theirs + "experts.routed_experts."
    router = hf(theirs + "gate.weight", "experts", "hidden")
    w13 = (hf(f"{each}{gate}.weight", "expert_ffn", "hidden"), hf(f"{each}{up}.weight", "expert_ffn", "hidden"))
    w2 = (hf(f"{each}{down}.weight", "hidden", "expert_ffn"),)
    one = Rule(stored + "w13_weight", w13, split, axis=Axis.expert_tensor, layers=Layers.experts, stacked=True)
    return (
        replace(same(router, Layers.experts), dtype=router_dtype),
        one,
        replace(one, name=stored + "w2_weight", hf=w2, dim=1),
    )
