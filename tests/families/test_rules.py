"""Each layout against slicing written out by hand, and the invariant of all of them: every element is held."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mcore_rl.config.model import LinearAttentionConfig, MlaConfig, ModelConfig, MoeConfig, TowerKind, VisionConfig
from mcore_rl.families.rules import (
    SIZES,
    Axis,
    Layers,
    Range,
    Rule,
    Sections,
    ShardLayout,
    ShardRanges,
    Stage,
    delta_projections,
    grouped_qkv,
    hf,
    padded_vocab,
    replicated_qkv,
    split,
    whole,
)

HEADS, GROUPS, HEAD_DIM = 8, 4, 2
MODEL = ModelConfig(
    num_layers=3,
    hidden_size=6,
    ffn_hidden_size=8,
    num_attention_heads=HEADS,
    num_query_groups=GROUPS,
    head_dim=HEAD_DIM,
    vocab_size=10,
    max_position_embeddings=32,
    moe=MoeConfig(num_experts=4, top_k=2, ffn_hidden_size=4, shared_ffn_hidden_size=12, dense_layers=[0]),
    mla=MlaConfig(q_lora_rank=3, kv_lora_rank=5, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=3),
)
SEEING = replace(
    MODEL,
    vision=VisionConfig(
        kind=TowerKind.qwen3_vl, depth=2, hidden_size=8, num_heads=2, ffn_hidden_size=10, patch_size=7, merge_size=3,
        num_positions=16,
    ),
)  # fmt: skip
LINEAR = replace(
    MODEL,
    linear_attention=LinearAttentionConfig(
        layers=[1], num_key_heads=2, num_value_heads=4, key_head_dim=3, value_head_dim=5, conv_kernel_dim=4
    ),
)


def laid_out(layout: ShardLayout, tensors: list[np.ndarray], num_shards: int, index: int) -> np.ndarray:
    """What ``layout`` says that a shard holds of one-dimensional ``tensors``; padding is -1."""
    shard = layout(MODEL, [len(tensor) for tensor in tensors], num_shards, index)
    held = [tensors[part.source][part.begin : part.end] for part in shard.ranges]
    local = np.full(shard.size, -1)
    local[: sum(map(len, held))] = np.concatenate(held) if held else []
    return local


def numbered(*sizes: int) -> list[np.ndarray]:
    """Tensors that share no number."""
    starts = np.cumsum([0, *sizes])
    return [np.arange(start, start + size) for start, size in zip(starts, sizes, strict=False)]


QKV = numbered(HEADS * HEAD_DIM, GROUPS * HEAD_DIM, GROUPS * HEAD_DIM)


@pytest.mark.parametrize("num_shards", [1, 2, 4, 8, 16])  # 8 and 16: parts of heads
def test_grouped_qkv_keeps_each_key_head_behind_its_query_heads(num_shards: int) -> None:
    by_group = [part.reshape(GROUPS, -1) for part in QKV]
    expected = np.split(np.concatenate(by_group, axis=1).reshape(-1), num_shards)
    for index in range(num_shards):
        np.testing.assert_array_equal(laid_out(grouped_qkv, QKV, num_shards, index), expected[index])


@pytest.mark.parametrize("num_shards", [1, 2, 4, 8])
def test_replicated_qkv_gives_each_query_head_its_own_key_head(num_shards: int) -> None:
    query, key, value = (part.reshape(-1, HEAD_DIM) for part in QKV)
    for index in range(num_shards):
        heads = range(index * HEADS // num_shards, (index + 1) * HEADS // num_shards)
        groups = sorted({head // (HEADS // GROUPS) for head in heads})
        expected = np.concatenate([query[list(heads)], key[groups], value[groups]]).reshape(-1)
        np.testing.assert_array_equal(laid_out(replicated_qkv, QKV, num_shards, index), expected)


@pytest.mark.parametrize("layout", [grouped_qkv, replicated_qkv])
@pytest.mark.parametrize("num_shards", [1, 2, 4])
def test_a_fused_tensor_is_cut_like_its_parts(layout: ShardLayout, num_shards: int) -> None:
    fused = Sections(layout, ("query", "key", "key"))
    for index in range(num_shards):
        expected = laid_out(layout, QKV, num_shards, index)
        np.testing.assert_array_equal(laid_out(fused, [np.concatenate(QKV)], num_shards, index), expected)
        # The first tensor by itself, the others as one.
        partly = laid_out(fused, [QKV[0], np.concatenate(QKV[1:])], num_shards, index)
        np.testing.assert_array_equal(partly, expected)
    for sizes in ([31], [16, 15], [17, 15], [16, 16, 1], [33]):
        with pytest.raises(AssertionError, match=r"one after another|no sections"):
            fused(MODEL, sizes, num_shards, 0)


def test_split_takes_the_same_part_of_gate_and_up() -> None:
    gate, up = numbered(8, 8)
    for index in range(4):
        mine = slice(2 * index, 2 * index + 2)
        expected = np.concatenate([gate[mine], up[mine]])
        np.testing.assert_array_equal(laid_out(split, [gate, up], 4, index), expected)


def test_whole_is_all_of_everything_on_every_shard() -> None:
    first, second = numbered(3, 5)
    for index in range(2):
        np.testing.assert_array_equal(laid_out(whole, [first, second], 2, index), np.concatenate([first, second]))


@pytest.mark.parametrize(("multiple", "num_shards", "size"), [(1, 1, 10), (1, 4, 3), (64, 1, 64), (64, 4, 16)])
def test_vocabulary_is_padded_at_its_end(multiple: int, num_shards: int, size: int) -> None:
    (rows,) = numbered(10)
    held = [laid_out(padded_vocab(multiple), [rows], num_shards, index) for index in range(num_shards)]
    assert {len(part) for part in held} == {size}
    everything = np.concatenate(held)
    np.testing.assert_array_equal(everything[:10], rows)
    assert (everything[10:] == -1).all()


@pytest.mark.parametrize(
    ("layout", "tensors"),
    [
        (grouped_qkv, QKV),
        (replicated_qkv, QKV),
        (split, numbered(8, 4)),
        (whole, numbered(3)),
        (padded_vocab(8), numbered(10)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.parametrize("num_shards", [1, 2, 4])
def test_every_element_is_held_and_none_twice_by_one_shard(
    layout: ShardLayout, tensors: list[np.ndarray], num_shards: int
) -> None:
    held = [laid_out(layout, tensors, num_shards, index) for index in range(num_shards)]
    for part in held:
        elements = part[part >= 0]
        assert len(set(elements.tolist())) == len(elements)
    assert set(np.concatenate(held).tolist()) - {-1} == set(np.concatenate(tensors).tolist())


def test_what_does_not_divide_is_ours_to_refuse_earlier() -> None:
    with pytest.raises(AssertionError, match="over 3 shards"):
        split(MODEL, [8], 3, 0)
    with pytest.raises(AssertionError, match="32 rows of queries, keys and values over 5 shards"):
        grouped_qkv(MODEL, [16, 8, 8], 5, 0)


def test_empty_ranges_are_left_out_and_size_stays() -> None:
    assert ShardRanges.of([Range(0, 3, 3), Range(1, 0, 2)]) == ShardRanges((Range(1, 0, 2),), 2)
    assert ShardRanges.of([Range(0, 3, 3)], size=4) == ShardRanges((), 4)


def test_sizes_by_hand() -> None:
    others = ("delta", "vision", "colours")
    by_hand = {
        "one": 1, "vocab": 10, "hidden": 6, "head": 2, "query": 16, "key": 8, "ffn": 8, "experts": 4, "expert_ffn": 4,
        "shared_ffn": 12, "query_latent": 3, "latent": 5, "latent_and_rope": 7, "key_and_value": 8 * 7, "value": 24,
        "query_key_value": 32, "gate_and_up": 16, "query_and_gate": 32, "query_heads": 8,
    }  # fmt: skip
    assert {name: size(MODEL) for name, size in SIZES.items() if not name.startswith(others)} == by_hand
    delta = {
        "delta_key": 6, "delta_value": 20, "delta_qkv": 32, "delta_qkvz": 52, "delta_ba": 8, "delta_heads": 4,
        "delta_value_head": 5, "delta_conv": 4,
    }  # fmt: skip
    assert {name: size(LINEAR) for name, size in SIZES.items() if name.startswith("delta")} == delta
    tower = {
        "colours": 3, "vision_frames": 2, "vision_patch": 7, "vision_hidden": 8, "vision_qkv": 24, "vision_ffn": 10,
        "vision_merged": 72, "vision_positions": 16,
    }  # fmt: skip
    assert {name: size(SEEING) for name, size in SIZES.items() if name.startswith(("vision", "colours"))} == tower


def _rows(shard: ShardRanges) -> list[tuple[int, int]]:
    return [(held.source, row) for held in shard.ranges for row in range(held.begin, held.end)]


def test_stored_parts_are_the_rows_of_a_shard_one_after_another() -> None:
    """By numpy: of each shard the first rows are its queries' part, and so on, whatever the layout did to them."""
    projections = tuple(
        hf(f"{{l}}.{name}", size, "hidden") for name, size in (("qkvz", "delta_qkvz"), ("ba", "delta_ba"))
    )
    sizes = ("delta_key", "delta_key", "delta_value", "delta_value", "delta_heads", "delta_heads")
    parts = tuple(zip(("query", "key", "value", "z", "beta", "alpha"), sizes, strict=True))
    rule = Rule("{l}.in_proj", projections, delta_projections, axis=Axis.tensor, stored_parts=parts)
    assert [part.name for part in rule.stored] == [f"{{l}}.in_proj.{name}" for name, _ in parts]
    for tp in (1, 2):
        widths = [width // tp for width in (6, 6, 20, 20, 4, 4)]
        for index in range(tp):
            rows = _rows(rule.shard(LINEAR, tp, index))
            expected = [rows[end - width : end] for end, width in zip(np.cumsum(widths), widths, strict=True)]
            stored = [_rows(part.shard(LINEAR, tp, index)) for part in rule.stored]
            assert stored == expected
    whole_rule = Rule("{l}.A_log", (hf("{l}.A_log", "delta_heads"),), split, axis=Axis.tensor)
    assert whole_rule.stored == (whole_rule,)


def test_a_rule_knows_its_layers_and_shapes() -> None:
    rule = Rule("{l}.w{e}", (hf("{l}.{e}.w", "hidden", "expert_ffn"),), split, dim=1, axis=Axis.expert_tensor,
                layers=Layers.experts)  # fmt: skip
    assert rule.per_expert
    assert [rule.applies_to(MODEL, layer) for layer in range(3)] == [False, True, True]
    assert rule.local_shape(MODEL, 2) == (6, 2)
    dense = Rule("{l}.n", (hf("{l}.n", "hidden"),), layers=Layers.dense)
    assert [dense.applies_to(MODEL, layer) for layer in range(3)] == [True, False, False]
    never = Rule("head", (hf("head", "hidden"),), stage=Stage.last, only=lambda model: False)
    assert not never.applies_to(MODEL, None)


def test_a_table_cannot_name_an_unknown_size_or_lose_its_layer() -> None:
    with pytest.raises(AssertionError, match="unknown size"):
        hf("x", "hidden_size")
    with pytest.raises(AssertionError, match="lives in a layer and names none"):
        Rule("norm.weight", (hf("norm.weight", "hidden"),))
