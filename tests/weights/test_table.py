"""What each rank holds: by hand for one uneven layout, and as an exact cover for many."""

from __future__ import annotations

from collections import Counter
from math import prod

import numpy as np
import pytest

from mcore_rl.config.model import MlaConfig, ModelConfig, MoeConfig
from mcore_rl.config.parallel import ParallelConfig, parse_layout
from mcore_rl.config.role import Head
from mcore_rl.families import deepseek_v3, llama, mixtral, qwen2, qwen2_moe
from mcore_rl.families.family import Family
from mcore_rl.families.rules import Rule
from mcore_rl.weights.table import Table
from mcore_rl.weights.tensor_slice import TensorSlice


def family(weights: tuple[Rule, ...]) -> Family:
    return Family("probe", (), "", lambda fields: dense(), weights, ())


def dense(**changes: object) -> ModelConfig:
    sizes = dict(num_layers=4, hidden_size=8, ffn_hidden_size=16, vocab_size=13, max_position_embeddings=32)
    wanted = sizes | dict(num_attention_heads=4, num_query_groups=4, head_dim=2)
    return ModelConfig(**(wanted | changes))  # type: ignore[arg-type]


def moe(**changes: object) -> ModelConfig:
    return dense(moe=MoeConfig(num_experts=4, top_k=2, ffn_hidden_size=8, **changes))  # type: ignore[arg-type]


def test_names_of_an_uneven_placement_by_hand() -> None:
    """3 layers over stages of 2 and 1, experts over 2: stage 1 counts its layer and its experts from 0."""
    parallel = ParallelConfig(pp=2, ep=2, pipeline_layers=[2, 1])
    model = dense(num_layers=3, moe=MoeConfig(num_experts=4, top_k=2, ffn_hidden_size=8))
    table = Table(family(mixtral.TABLES.weights), model, parallel, world_size=4)
    experts = [
        (local.name, local.layer, local.expert, local.hf_names)
        for local in table.tensors(3)  # stage 1, second half of the experts
        if local.rule.per_expert
    ]
    theirs = "model.layers.2.block_sparse_moe.experts."
    ours = "decoder.layers.0.mlp.experts.local_experts."
    assert experts == [
        (f"{ours}0.linear_fc1.weight", 2, 2, (f"{theirs}2.w1.weight", f"{theirs}2.w3.weight")),
        (f"{ours}1.linear_fc1.weight", 2, 3, (f"{theirs}3.w1.weight", f"{theirs}3.w3.weight")),
        (f"{ours}0.linear_fc2.weight", 2, 2, (f"{theirs}2.w2.weight",)),
        (f"{ours}1.linear_fc2.weight", 2, 3, (f"{theirs}3.w2.weight",)),
    ]
    ends = [local.name for local in table.tensors(3) if local.layer is None]
    assert ends == ["decoder.final_layernorm.weight", "output_layer.weight"]
    assert [local.name for local in table.tensors(0) if local.layer is None] == ["embedding.word_embeddings.weight"]


def test_virtual_stages_count_their_own_layers() -> None:
    table = Table(family(llama.TABLES.weights), dense(), parse_layout("pp=2,vpp=2"))
    norms = [(local.chunk, local.name, local.layer) for local in table.tensors(1) if "input_layernorm" in local.name]
    assert norms == [
        (0, "decoder.layers.0.input_layernorm.weight", 1),
        (1, "decoder.layers.0.input_layernorm.weight", 3),
    ]


@pytest.mark.parametrize(("layout", "copies"), [("", 0), ("tp=2", 0), ("pp=2", 1), ("pp=2,vpp=2", 1)])
def test_a_tied_model_has_a_copy_of_its_embedding_only_in_another_last_stage(layout: str, copies: int) -> None:
    table = Table(family(qwen2.TABLES.weights), dense(tie_output=True, qkv_bias=True), parse_layout(layout))
    ranks = [table.tensors(rank) for rank in range(table.layout.world_size)]
    heads = [local for rank in ranks for local in rank if local.name == "output_layer.weight"]
    assert len(heads) == copies * table.layout.tp
    assert all(local.hf_names == ("model.embed_tokens.weight",) for local in heads)
    assert "lm_head.weight" not in table.hf_tensors


def test_a_critic_has_a_value_head_that_a_checkpoint_may_lack() -> None:
    table = Table(family(qwen2.TABLES.weights), dense(tie_output=True), parse_layout("tp=2,pp=2"), head=Head.value)
    (head,) = [local for local in table.tensors(3) if local.name == "output_layer.weight"]
    assert head.hf_names == ("score.weight",)
    assert table.shape(head) == (1, 8), "whole on every tensor rank"
    assert table.hf_tensors["score.weight"].absent_ok
    assert sum(info.absent_ok for info in table.hf_tensors.values()) == 1


def test_pieces_of_a_padded_shard_by_hand() -> None:
    """13 rows over 4 shards of 4: the last holds row 12 and three rows of padding."""
    table = Table(family(llama.TABLES.weights), dense(), parse_layout("tp=4"))
    (embedding,) = [local for local in table.tensors(3) if local.name == "embedding.word_embeddings.weight"]
    assert table.shape(embedding) == (4, 8)
    (piece,) = table.pieces(embedding)
    assert (piece.hf, piece.hf_region, piece.local_region) == (
        "model.embed_tokens.weight",
        TensorSlice((12, 0), (1, 8)),
        TensorSlice((0, 0), (1, 8)),
    )


DENSE_LAYOUTS = ("", "tp=2", "tp=4,pp=2", "pp=4", "pp=2,vpp=2", "cp=2")


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        *(("llama", layout) for layout in DENSE_LAYOUTS),
        *(("qwen2_moe", layout) for layout in (*DENSE_LAYOUTS, "tp=2,ep=2,etp=1", "tp=2,etp=2")),
    ],
)
def test_one_replica_holds_every_element_and_only_whole_tensors_twice(kind: str, layout: str) -> None:
    """Counts, per element, the ranks that hold it; equal to what the axes that do not split its tensor make of it."""
    parallel = parse_layout(layout)
    model = dense() if kind == "llama" else moe(dense_layers=[1], shared_ffn_hidden_size=8, shared_gate=True)
    weights = (llama if kind == "llama" else qwen2_moe).TABLES.weights
    table = Table(family(weights), model, parallel)
    counts = {name: np.zeros(info.shape, dtype=int) for name, info in table.hf_tensors.items()}
    for rank in range(table.layout.world_size):
        for local in table.tensors(rank):
            held = table.pieces(local)
            assert sum(prod(piece.shape) for piece in held) <= prod(table.shape(local))
            for piece in held:
                counts[piece.hf][tuple(slice(start, start + size) for start, size in piece.hf_region.spans)] += 1
    by_name = {tensor.name: rule for rule in table.rules for tensor in rule.hf}
    layer_ranks = table.layout.tp * table.layout.cp
    for name, count in counts.items():
        (rule,) = [by_name[t] for t in by_name if _fits(t, name)]
        split_over = {"none": 1, "tensor": parallel.tp, "expert_tensor": parallel.etp}[rule.axis.name]
        split_over *= parallel.ep if rule.per_expert else 1
        assert (count == layer_ranks / split_over).all(), name


def _fits(template: str, name: str) -> bool:
    parts, words = template.split("."), name.split(".")
    return len(parts) == len(words) and all(a == b or a in ("{l}", "{e}") for a, b in zip(parts, words, strict=True))


def test_local_names_of_a_rank_are_distinct() -> None:
    table = Table(family(deepseek_v3.TABLES.weights), _latent(), parse_layout("tp=2,ep=2,pp=2,vpp=2"))
    for rank in range(4):
        names = Counter((local.chunk, local.name) for local in table.tensors(rank))
        assert set(names.values()) == {1}


def _latent() -> ModelConfig:
    latent = MlaConfig(q_lora_rank=4, kv_lora_rank=4, qk_nope_head_dim=2, qk_rope_head_dim=2, v_head_dim=2)
    experts = MoeConfig(num_experts=4, top_k=2, ffn_hidden_size=8, shared_ffn_hidden_size=8, dense_layers=[0])
    return dense(mla=latent, head_dim=4, moe=experts)
