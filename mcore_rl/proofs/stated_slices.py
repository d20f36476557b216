"""The words of the statements (``statements.py``): which slice of a whole tensor a rank's parameter is, by numpy.

Each is read off two model definitions, transformers' (5.19) and Megatron-core's (0.16.1), and takes nothing from the
families' tables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mcore_rl.arrays import Int64Array

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
