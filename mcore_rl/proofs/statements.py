"""Which slice of which Hugging Face tensors every Megatron parameter is: stated by hand, family by family.

The proof compares the families' tables with these lines, so nothing here is taken from them: no rule, no block, no
``ModelConfig``.  A line is written from two model definitions, transformers' modeling_<family>.py (5.19), which says
what a tensor is used for, and Megatron-core's (0.16.1), which says how a parameter is used.  What a word of it says
is sliced by numpy from whole tensors.  Where a layer or an expert is, Megatron's own modules say
(``training/meta.py``).

A family is one entry of ``STATEMENTS``; without one it is not proven.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mcore_rl.ground.arrays import Int64Array

ReadHf = Callable[[str], Int64Array]


@dataclass(frozen=True)
class Holder:
    """The rank that holds a parameter, and the checkpoint that it is of.

    tp, etp: its place among ``num_tp`` tensor and ``num_etp`` expert tensor ranks.  kv_heads: key/value heads of the
    model.  tied: whether the output projection is the embedding.  expert: that the parameter is of.
    linear_key_heads: of linear attention, if any.
    """

    tp: int
    num_tp: int
    etp: int
    num_etp: int
    kv_heads: int
    tied: bool
    expert: int | None = None
    linear_key_heads: int = 0


# (reads a Hugging Face tensor by its name, the rank) -> the parameter on that rank.  In a layer, names stand without
# ``model.layers.N.``; ``{e}`` is the expert.
StatedParameter = Callable[[ReadHf, Holder], Int64Array]


def whole(name: str) -> StatedParameter:
    """Every rank holds all of it."""
    return lambda read, rank: read(name)


def rows(name: str) -> StatedParameter:
    """A column-parallel linear layer: its outputs, which are rows, are cut (ColumnParallelLinear)."""
    return lambda read, rank: np.split(read(name), rank.num_tp, axis=0)[rank.tp]


def columns(name: str) -> StatedParameter:
    """A row-parallel linear layer: its inputs, which are columns, are cut (RowParallelLinear)."""
    return lambda read, rank: np.split(read(name), rank.num_tp, axis=1)[rank.tp]


def gate_up(gate: str, up: str) -> StatedParameter:
    """The first projection of a gated MLP: a rank's rows of the gate, then those of up (``glu`` in mlp.py)."""
    return lambda read, rank: np.concatenate([rows(gate)(read, rank), rows(up)(read, rank)])


def expert_columns(name: str) -> StatedParameter:
    """``columns`` over the ranks that share an expert."""
    return lambda read, rank: np.split(read(name), rank.num_etp, axis=1)[rank.etp]


def expert_gate_up(gate: str, up: str) -> StatedParameter:
    """``gate_up`` over the ranks that share an expert."""
    return lambda read, rank: np.concatenate(
        [np.split(read(name), rank.num_etp, axis=0)[rank.etp] for name in (gate, up)]
    )


def vocabulary(name: str) -> StatedParameter:
    """Rows of the vocabulary, with zeros behind the last to a multiple of the ranks (VocabParallelEmbedding)."""

    def held(read: ReadHf, rank: Holder) -> Int64Array:
        table = read(name)
        padding = np.zeros((-len(table) % rank.num_tp, *table.shape[1:]), dtype=np.int64)
        return np.split(np.concatenate([table, padding]), rank.num_tp)[rank.tp]

    return held


def output(read: ReadHf, rank: Holder) -> Int64Array:
    """The output projection; that of a tied model on another stage than the embedding is a copy of the embedding."""
    return vocabulary("model.embed_tokens.weight" if rank.tied else "lm_head.weight")(read, rank)


def grouped(query: str, key: str, value: str) -> StatedParameter:
    """``linear_qkv``: for each key/value head of a rank its query heads, its key head, its value head.

    ``get_query_key_value_tensors`` in megatron/core/transformer/attention.py; transformers' ``repeat_kv`` shares a
    key/value head between neighbouring query heads.
    """

    return lambda read, rank: _by_head([read(name) for name in (query, key, value)], rank)


def _by_head(tensors: Sequence[Int64Array], rank: Holder) -> Int64Array:
    by_head = [tensor.reshape(rank.kv_heads, -1, *tensor.shape[1:]) for tensor in tensors]
    together = np.concatenate(by_head, axis=1).reshape(-1, *tensors[0].shape[1:])
    return np.split(together, rank.num_tp)[rank.tp]


def gated_grouped(query: str, key: str, value: str) -> StatedParameter:
    """``grouped`` whose queries have a gate: all query heads of a key/value head, then all their gates.

    Qwen3NextAttention's ``q_proj`` has a head's query, then its gate (``chunk``), then the next head's.
    """

    def held(read: ReadHf, rank: Holder) -> Int64Array:
        queries = read(query)
        keys = read(key)
        values = read(value)
        head_dim = len(keys) // rank.kv_heads
        heads = queries.reshape(rank.kv_heads, -1, 2, head_dim, queries.shape[1])
        both = [heads[:, :, part].reshape(-1, queries.shape[1]) for part in (0, 1)]
        return _by_head([*both, keys, values], rank)

    return held


def delta_projection(qkvz: str, ba: str, out: str, a_log: str, norm: str) -> StatedParameter:
    """``in_proj`` of linear attention: a rank's queries, keys, values, gates, betas, alphas (``split`` in ``forward``).

    Qwen3NextGatedDeltaNet's ``fix_query_key_value_ordering`` takes from the two tensors, for each key head: its query,
    key, values, gates; its betas, alphas.  ``out`` has a column for each value, ``a_log`` a number for each value head.
    """

    def held(read: ReadHf, rank: Holder) -> Int64Array:
        heads = rank.linear_key_heads
        values = read(out).shape[1]
        value_heads = len(read(a_log))
        assert len(read(norm)) * value_heads == values
        first = read(qkvz).reshape(heads, -1, read(qkvz).shape[1])
        second = read(ba).reshape(heads, -1, read(ba).shape[1])
        key = (first.shape[1] - 2 * values // heads) // 2
        parts = np.split(first, [key, 2 * key, 2 * key + values // heads], axis=1)
        parts += np.split(second, [value_heads // heads], axis=1)
        cut = (np.split(part, rank.num_tp, axis=0)[rank.tp] for part in parts)
        return np.concatenate([part.reshape(-1, part.shape[2]) for part in cut])

    return held


def flat_delta_projection(qkv: str, z: str, b: str, a: str) -> StatedParameter:
    """``delta_projection`` of four tensors, of which the first has all queries, all keys, all values.

    There are as many gates as values, and as many keys as queries.
    """

    def held(read: ReadHf, rank: Holder) -> Int64Array:
        values = len(read(z))
        key = (len(read(qkv)) - values) // 2
        parts = [*np.split(read(qkv), [key, 2 * key]), read(z), read(b), read(a)]
        return np.concatenate([np.split(part, rank.num_tp)[rank.tp] for part in parts])

    return held


def delta_channels(name: str, out: str) -> StatedParameter:
    """The convolution: a rank's channels of queries, keys and values (``conv_dim_local_tp``); all of each in a row."""

    def held(read: ReadHf, rank: Holder) -> Int64Array:
        values = read(out).shape[1]
        key = (len(read(name)) - values) // 2
        parts = np.split(read(name), [key, 2 * key])
        return np.concatenate([np.split(part, rank.num_tp)[rank.tp] for part in parts])

    return held


def fused_grouped(fused: str, output: str) -> StatedParameter:
    """``grouped`` of one tensor that has all queries, then all keys, then all values (Phi3Attention's ``query_pos``).

    There are as many rows of queries as the projection ``output`` has columns, both ``num_attention_heads * head_dim``;
    the other rows are half keys, half values.
    """

    def held(read: ReadHf, rank: Holder) -> Int64Array:
        tensor = read(fused)
        query = read(output).shape[1]
        key = (len(tensor) - query) // 2
        return _by_head(np.split(tensor, [query, query + key]), rank)

    return held


def fused_gate_up(name: str) -> StatedParameter:
    """``gate_up`` of one tensor, whose first half is the gate (``chunk`` in Phi3MLP)."""

    def held(read: ReadHf, rank: Holder) -> Int64Array:
        gate, up = np.split(read(name), 2)
        return np.concatenate([np.split(half, rank.num_tp)[rank.tp] for half in (gate, up)])

    return held


def stacked_gate_up(name: str) -> StatedParameter:
    """``expert_gate_up`` of a stack of experts [inputs, outputs], in which gate and up take turns.

    ``forward`` of GptOssExperts multiplies by them from the right; ``_apply_gate`` takes every second output.
    """

    def held(read: ReadHf, rank: Holder) -> Int64Array:
        own = read(name)[rank.expert]
        return np.concatenate([np.split(own[..., turn::2].T, rank.num_etp)[rank.etp] for turn in (0, 1)])

    return held


def stacked_columns(name: str) -> StatedParameter:
    """``expert_columns`` of a stack of experts [inputs, outputs]."""
    return lambda read, rank: np.split(read(name)[rank.expert].T, rank.num_etp, axis=1)[rank.etp]


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
        "linear_attn.in_proj_qkvz.weight",
        "linear_attn.in_proj_ba.weight",
        "linear_attn.out_proj.weight",
        "linear_attn.A_log",
        "linear_attn.norm.weight",
    ),
    "self_attention.conv1d.weight": delta_channels("linear_attn.conv1d.weight", "linear_attn.out_proj.weight"),
    "self_attention.dt_bias": rows("linear_attn.dt_bias"),
    "self_attention.A_log": rows("linear_attn.A_log"),
    "self_attention.out_norm.weight": whole("linear_attn.norm.weight"),
    "self_attention.out_proj.weight": columns("linear_attn.out_proj.weight"),
}
# Qwen3_5GatedDeltaNet splits what in_proj_qkv makes into all queries, all keys, all values.
FLAT_DELTA_NET = DELTA_NET | {
    "self_attention.in_proj.weight": flat_delta_projection(
        "linear_attn.in_proj_qkv.weight",
        "linear_attn.in_proj_z.weight",
        "linear_attn.in_proj_b.weight",
        "linear_attn.in_proj_a.weight",
    ),
}
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
