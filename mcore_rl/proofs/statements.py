"""Which slice of which Hugging Face tensors every Megatron parameter is: stated by hand, family by family.

The proof compares the families' tables with these lines, so nothing here is taken from them: no rule, no block, no
``ModelConfig``.  A line is written from two model definitions, transformers' modeling_<family>.py (5.19), which says
what a tensor is used for, and Megatron-core's (0.16.1), which says how a parameter is used.  What a word of it says
is sliced by numpy from whole tensors (``stated_slices.py``).  Where a layer or an expert is, Megatron's own modules say
(``training/meta.py``).

A family is one entry of ``STATEMENTS``; without one it is not proven.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from mcore_rl.arrays import Int64Array
from mcore_rl.proofs.stated_slices import (
    Holder,
    StatedParameter,
    columns,
    delta_channels,
    delta_projection,
    expert_columns,
    expert_gate_up,
    flat_delta_projection,
    fused_gate_up,
    fused_grouped,
    gate_up,
    gated_grouped,
    grouped,
    output,
    rows,
    stacked_columns,
    stacked_gate_up,
    vocabulary,
    whole,
)

NO_STATEMENT = (
    "{family}: no statement of this family in proofs/statements.py. Write one, from transformers' and Megatron's models"
)


@dataclass(frozen=True)
class Statement:
    """A family's parameters by Megatron's names.

    outside: outside the layers.  layer: within one, dense or with experts, without ``decoder.layers.N.``; ``{e}`` is
    the expert.  What a model does not have is not looked for.
    """

    outside: Mapping[str, StatedParameter]
    layer: Mapping[str, StatedParameter]


TOWER = "vision."  # before the names of the vision tower's parameters
ENDS: dict[str, StatedParameter] = {
    "embedding.word_embeddings.weight": vocabulary("model.embed_tokens.weight"),
    "decoder.final_layernorm.weight": whole("model.norm.weight"),
    "output_layer.weight": output,
}
NORMS: dict[str, StatedParameter] = {
    "input_layernorm.weight": whole("input_layernorm.weight"),
    "pre_mlp_layernorm.weight": whole("post_attention_layernorm.weight"),
}
ATTENTION: dict[str, StatedParameter] = {
    "self_attention.linear_qkv.weight": grouped(
        "self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"
    ),
    "self_attention.linear_proj.weight": columns("self_attn.o_proj.weight"),
}
QKV_BIAS: dict[str, StatedParameter] = {
    "self_attention.linear_qkv.bias": grouped(
        "self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"
    ),
}
QK_NORM: dict[str, StatedParameter] = {
    "self_attention.q_layernorm.weight": whole("self_attn.q_norm.weight"),
    "self_attention.k_layernorm.weight": whole("self_attn.k_norm.weight"),
}
MLP: dict[str, StatedParameter] = {
    "mlp.linear_fc1.weight": gate_up("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.linear_fc2.weight": columns("mlp.down_proj.weight"),
}
EXPERTS: dict[str, StatedParameter] = {
    "mlp.router.weight": whole("mlp.gate.weight"),
    "mlp.experts.local_experts.{e}.linear_fc1.weight": expert_gate_up(
        "mlp.experts.{e}.gate_proj.weight", "mlp.experts.{e}.up_proj.weight"
    ),
    "mlp.experts.local_experts.{e}.linear_fc2.weight": expert_columns("mlp.experts.{e}.down_proj.weight"),
}

SHARED_EXPERTS: dict[str, StatedParameter] = {
    "mlp.shared_experts.linear_fc1.weight": gate_up(
        "mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"
    ),
    "mlp.shared_experts.linear_fc2.weight": columns("mlp.shared_experts.down_proj.weight"),
}
ROUTER_BIAS: dict[str, StatedParameter] = {
    "mlp.router.expert_bias": whole("mlp.gate.e_score_correction_bias"),
}
# multi_latent_attention.py: the down projections are whole on every rank, heads are cut.  DeepseekV2Attention and
# DeepseekV3Attention have the same tensors.
LATENT_ATTENTION: dict[str, StatedParameter] = {
    "self_attention.linear_q_proj.weight": rows("self_attn.q_proj.weight"),
    "self_attention.linear_q_down_proj.weight": whole("self_attn.q_a_proj.weight"),
    "self_attention.q_layernorm.weight": whole("self_attn.q_a_layernorm.weight"),
    "self_attention.linear_q_up_proj.weight": rows("self_attn.q_b_proj.weight"),
    "self_attention.linear_kv_down_proj.weight": whole("self_attn.kv_a_proj_with_mqa.weight"),
    "self_attention.kv_layernorm.weight": whole("self_attn.kv_a_layernorm.weight"),
    "self_attention.linear_kv_up_proj.weight": rows("self_attn.kv_b_proj.weight"),
    "self_attention.linear_proj.weight": columns("self_attn.o_proj.weight"),
}
# Gemma2DecoderLayer and Gemma3DecoderLayer norm what goes into attention and MLP, and what comes out.
SANDWICH: dict[str, StatedParameter] = {
    "input_layernorm.weight": whole("input_layernorm.weight"),
    "self_attention.linear_proj.post_layernorm.weight": whole("post_attention_layernorm.weight"),
    "pre_mlp_layernorm.weight": whole("pre_feedforward_layernorm.weight"),
    "mlp.linear_fc2.post_layernorm.weight": whole("post_feedforward_layernorm.weight"),
}

# GatedDeltaNet in megatron/core/ssm/gated_delta_net.py; the norm of a head is whole on every rank.
DELTA_NET: dict[str, StatedParameter] = {
    "self_attention.in_proj.weight": delta_projection(
        "linear_attn.in_proj_qkvz.weight", "linear_attn.in_proj_ba.weight", "linear_attn.out_proj.weight",
        "linear_attn.A_log", "linear_attn.norm.weight",
    ),
    "self_attention.conv1d.weight": delta_channels("linear_attn.conv1d.weight", "linear_attn.out_proj.weight"),
    "self_attention.dt_bias": rows("linear_attn.dt_bias"),
    "self_attention.A_log": rows("linear_attn.A_log"),
    "self_attention.out_norm.weight": whole("linear_attn.norm.weight"),
    "self_attention.out_proj.weight": columns("linear_attn.out_proj.weight"),
}  # fmt: skip
# Qwen3_5GatedDeltaNet splits what in_proj_qkv makes into all queries, all keys, all values.
FLAT_DELTA_NET = DELTA_NET | {
    "self_attention.in_proj.weight": flat_delta_projection(
        "linear_attn.in_proj_qkv.weight", "linear_attn.in_proj_z.weight", "linear_attn.in_proj_b.weight",
        "linear_attn.in_proj_a.weight",
    ),
}  # fmt: skip
GATED_ATTENTION: dict[str, StatedParameter] = {
    "self_attention.linear_qkv.weight": gated_grouped(
        "self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"
    ),
    "self_attention.linear_proj.weight": columns("self_attn.o_proj.weight"),
}
GATED_SHARED_EXPERT: dict[str, StatedParameter] = {
    "mlp.shared_experts.linear_fc1.weight": gate_up(
        "mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight"
    ),
    "mlp.shared_experts.linear_fc2.weight": columns("mlp.shared_expert.down_proj.weight"),
    "mlp.shared_experts.gate_weight": whole("mlp.shared_expert_gate.weight"),
}

# OlmoeAttention and MiniMaxM2Attention norm all heads at once; a rank has the weights of its own
# (training/norm.py).
JOINT_QK_NORM: dict[str, StatedParameter] = {
    "self_attention.q_layernorm.weight": rows("self_attn.q_norm.weight"),
    "self_attention.k_layernorm.weight": rows("self_attn.k_norm.weight"),
}
# In modeling_mixtral.py act(w1(x)) * w3(x) goes through w2; modeling_minimax_m2.py saves the same names.
NUMBERED_EXPERTS: dict[str, StatedParameter] = {
    "mlp.router.weight": whole("block_sparse_moe.gate.weight"),
    "mlp.experts.local_experts.{e}.linear_fc1.weight": expert_gate_up(
        "block_sparse_moe.experts.{e}.w1.weight", "block_sparse_moe.experts.{e}.w3.weight"
    ),
    "mlp.experts.local_experts.{e}.linear_fc2.weight": expert_columns("block_sparse_moe.experts.{e}.w2.weight"),
}

LLAMA = Statement(ENDS, NORMS | ATTENTION | MLP)
QWEN2 = Statement(ENDS, NORMS | ATTENTION | QKV_BIAS | MLP)
QWEN3 = Statement(ENDS, NORMS | ATTENTION | QK_NORM | MLP)

STATEMENTS: dict[str, Statement] = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "smollm3": LLAMA,
    "ernie4_5": LLAMA,
    "qwen2": QWEN2,
    "seed_oss": QWEN2,
    "qwen3": QWEN3,
    "mixtral": Statement(ENDS, NORMS | ATTENTION | NUMBERED_EXPERTS),
    "qwen2_moe": Statement(ENDS, NORMS | ATTENTION | QKV_BIAS | MLP | EXPERTS | GATED_SHARED_EXPERT),
    "qwen3_moe": Statement(ENDS, NORMS | ATTENTION | QK_NORM | MLP | EXPERTS),
    "qwen3_next": Statement(ENDS, NORMS | DELTA_NET | GATED_ATTENTION | QK_NORM | MLP | EXPERTS | GATED_SHARED_EXPERT),
    "qwen3_5_text": Statement(ENDS, NORMS | FLAT_DELTA_NET | GATED_ATTENTION | QK_NORM | MLP),
    "qwen3_5_moe_text": Statement(
        ENDS, NORMS | FLAT_DELTA_NET | GATED_ATTENTION | QK_NORM | EXPERTS | GATED_SHARED_EXPERT
    ),
    "gemma2": Statement(ENDS, ATTENTION | MLP | SANDWICH),
    "gemma3_text": Statement(ENDS, ATTENTION | QK_NORM | MLP | SANDWICH),
    "olmoe": Statement(ENDS, NORMS | ATTENTION | JOINT_QK_NORM | EXPERTS),
    "phi3": Statement(
        ENDS,
        NORMS
        | {
            "self_attention.linear_qkv.weight": fused_grouped("self_attn.qkv_proj.weight", "self_attn.o_proj.weight"),
            "self_attention.linear_proj.weight": columns("self_attn.o_proj.weight"),
            "mlp.linear_fc1.weight": fused_gate_up("mlp.gate_up_proj.weight"),
            "mlp.linear_fc2.weight": columns("mlp.down_proj.weight"),
        },
    ),
    "deepseek_v3": Statement(ENDS, NORMS | LATENT_ATTENTION | MLP | EXPERTS | ROUTER_BIAS | SHARED_EXPERTS),
    # DeepseekV2TopkRouter has no bias
    "deepseek_v2": Statement(ENDS, NORMS | LATENT_ATTENTION | MLP | EXPERTS | SHARED_EXPERTS),
    "gpt_oss": Statement(
        ENDS,
        NORMS
        | ATTENTION
        | QKV_BIAS
        | {
            "self_attention.linear_proj.bias": whole("self_attn.o_proj.bias"),
            # one more score in each head's softmax (eager_attention_forward; DotProductAttention)
            "self_attention.core_attention.softmax_offset": rows("self_attn.sinks"),
            "mlp.router.weight": whole("mlp.router.weight"),
            "mlp.router.bias": whole("mlp.router.bias"),
            "mlp.experts.local_experts.{e}.linear_fc1.weight": stacked_gate_up("mlp.experts.gate_up_proj"),
            "mlp.experts.local_experts.{e}.linear_fc1.bias": stacked_gate_up("mlp.experts.gate_up_proj_bias"),
            "mlp.experts.local_experts.{e}.linear_fc2.weight": stacked_columns("mlp.experts.down_proj"),
            "mlp.experts.local_experts.{e}.linear_fc2.bias": (
                lambda read, rank: read("mlp.experts.down_proj_bias")[rank.expert]
            ),
        },
    ),
    # Glm4MoeAttention has biases and norms where the configuration says so
    "glm4_moe": Statement(ENDS, NORMS | ATTENTION | QKV_BIAS | QK_NORM | MLP | EXPERTS | ROUTER_BIAS | SHARED_EXPERTS),
    # Glm4MoeLiteAttention is DeepseekV3Attention
    "glm4_moe_lite": Statement(ENDS, NORMS | LATENT_ATTENTION | MLP | EXPERTS | ROUTER_BIAS | SHARED_EXPERTS),
    "minimax_m2": Statement(
        ENDS,
        NORMS
        | ATTENTION
        | JOINT_QK_NORM
        | NUMBERED_EXPERTS
        | {"mlp.router.expert_bias": whole("block_sparse_moe.e_score_correction_bias")},
    ),
}
# The language models beside a vision tower are those of the text families (modeling_qwen2_5_vl.py, modeling_qwen3_vl.py
# and modeling_qwen3_vl_moe.py have the same modules by other names).
STATEMENTS |= {
    "qwen2_5_vl": STATEMENTS["qwen2"],
    "qwen3_vl": STATEMENTS["qwen3"],
    "qwen3_vl_moe": STATEMENTS["qwen3_moe"],
}


def stated(
    statement: Statement, whole: Mapping[str, Int64Array], key: str, layer: int | None, expert: int | None, rank: Holder
) -> Int64Array:
    """The parameter ``key`` of a Megatron module's state dict on ``rank``, cut from the tensors ``whole``.

    layer, expert: of the parameter, in the whole model.  Raises KeyError if nobody stated it.
    """
    if key.startswith(TOWER):  # transformers' own module, which no axis cuts
        return whole[key.replace(TOWER, "visual.", 1)]
    if layer is None:
        return statement.outside[key](whole.__getitem__, rank)
    within = key.split(".", 3)[3]  # behind decoder.layers.N.
    if expert is not None:
        before, _, behind = within.partition("local_experts.")
        within = f"{before}local_experts.{{e}}.{behind.partition('.')[2]}"
    holder = replace(rank, expert=expert)
    return statement.layer[within](lambda name: whole[f"model.layers.{layer}.{name.format(e=expert)}"], holder)
