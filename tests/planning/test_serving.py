"""The memory of a rollout rank: its weights beside the tables that updates are planned with, its cache by hand."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest

from mcore_rl.config.cluster import ClusterConfig
from mcore_rl.config.engine import Precision
from mcore_rl.config.model import ModelConfig
from mcore_rl.config.rollout import Quantization, RolloutConfig, parse_rollout_layout
from mcore_rl.families.registry import FAMILIES, model_of
from mcore_rl.families.towers import PICTURES
from mcore_rl.planning.overheads import COLLECTIVE_BYTES, CONTEXT_BYTES, GIB, GRAPH_BYTES, ProcessMemory
from mcore_rl.planning.serving import cache_bytes_per_token, rollout_weight_bytes, serving
from mcore_rl.weights.rollout_table import RolloutTable, itemsize_of
from tests.support import picture_models, published

ON_CPU = ProcessMemory.of(ClusterConfig())
ON_GPUS = ProcessMemory.of(ClusterConfig(gpus_per_node=8))
LAYOUTS = ("tp=1", "tp=2", "tp=2,dp=2", "tp=2,ep=2", "tp=2,dp=2,ep=4", "dp=4,ep=4")
CACHED = ModelConfig(
    num_layers=3, hidden_size=64, ffn_hidden_size=128, num_attention_heads=8, num_query_groups=4, head_dim=16,
    vocab_size=1_000, max_position_embeddings=256,
)  # fmt: skip


@pytest.mark.parametrize("name", sorted(published.TINY))
def test_weights_are_those_that_updates_write(name: str) -> None:
    """By each family's own table, of which real vLLM is asked in tests/e2e/test_reshard_into_vllm.py."""
    family, model = model_of(published.TINY[name])
    looked_at = 0
    for written in LAYOUTS:
        layout = parse_rollout_layout(written)
        if layout.ep > 1 and model.moe is None:
            continue
        table = RolloutTable(FAMILIES[family.name], model, layout)
        for rank in range(layout.world_size):
            stored = sum(prod(table.shape(each)) * itemsize_of(each.rule, 2) for each in table.tensors(rank))
            planned = rollout_weight_bytes(model, layout, 2)
            if name == "glm4_moe_lite":  # planned as the DeepSeek-V3 that it is by its features: see docs/models.md
                assert planned == pytest.approx(stored, rel=0.12), (written, rank)
            else:
                assert planned == stored, (written, rank)
            looked_at += 1
    assert looked_at >= 7


def config(**changes: object) -> RolloutConfig:
    return replace(
        RolloutConfig(),
        dtype=Precision.bfloat16,
        max_prompt_length=40,
        max_response_length=60,
        max_num_seqs=8,
        **changes,
    )  # type: ignore[arg-type]


@pytest.mark.parametrize(("tp", "heads"), [(1, 4), (2, 2), (4, 1), (8, 1)])
def test_the_cache_of_a_token_by_hand(tp: int, heads: int) -> None:
    """3 layers, keys and values, heads of 16, 2 bytes; a rank has one head at least, which several may hold."""
    assert cache_bytes_per_token(CACHED, config(tp=tp)) == 3 * 2 * heads * 16 * 2


def test_the_cache_of_latent_attention_by_hand() -> None:
    """DeepSeek-V3: 512 and 64 of each of 61 layers, whole on every rank; expanded, keys and values of 128 heads."""
    model = model_of(published.FACTS["deepseek-ai/DeepSeek-V3"])[1]
    assert cache_bytes_per_token(model, config(tp=8)) == 61 * (512 + 64) * 2
    assert cache_bytes_per_token(model, config(tp=8), latent_attention=False) == 61 * 2 * 192 * 16 * 2


def test_quantised_weights_leave_their_room_to_the_cache() -> None:
    """By hand: 3 layers of 64 * 128 + 128 * 64 * 3 elements in one byte, and a scale for each block of 128 by 128."""
    plain, in_blocks = (
        serving(CACHED, config(quantization=each), device_bytes=GIB * 8, processes=ON_GPUS)
        for each in (Quantization.none, Quantization.fp8_block)
    )
    matrices = 3 * ((128 + 2 * 64) * 64 + 64 * 128 + 3 * 64 * 128)
    scales = 3 * (2 + 1 + 2 + 1)  # of [256, 64], [64, 128], [256, 64] and [64, 128]
    assert plain.weights - in_blocks.weights == matrices - 4 * scales
    assert in_blocks.cache - plain.cache == matrices - 4 * scales
    assert in_blocks.update_bytes == plain.update_bytes == plain.weights, "weights arrive in bfloat16"
    assert in_blocks.converting == 3 * 256 * 64 + 2 * 4 and plain.converting == 0
    assert in_blocks.awake == in_blocks.weights + in_blocks.converting + in_blocks.overhead
    in_rows = serving(CACHED, config(quantization=Quantization.fp8_channel), device_bytes=GIB * 8, processes=ON_GPUS)
    assert in_rows.weights - in_blocks.weights == 3 * 4 * (256 + 64 + 256 + 64) - 4 * scales


def test_vllm_s_share_of_a_device_is_divided() -> None:
    whole = serving(
        CACHED, config(gpu_memory_utilization=0.5, max_num_batched_tokens=512), device_bytes=80 * GIB, processes=ON_GPUS
    )
    assert whole.budget == whole.total == 40 * GIB
    assert whole.overhead == CONTEXT_BYTES + GRAPH_BYTES
    assert whole.cache == 40 * GIB - whole.weights - whole.working - whole.overhead
    # 512 tokens of 4 hidden states and 1.5 products of 2 * 128; logits of 8 sequences, three times in float32
    assert whole.working == 2 * 512 * (4 * 64 + 1.5 * 256) + 3 * 4 * 8 * 1_000
    assert whole.per_sequence == 112 * 3 * 2 * 4 * 16 * 2  # 100 tokens are seven blocks of 16
    assert whole.concurrency == whole.cache / whole.per_sequence
    several = serving(
        CACHED, config(gpu_memory_utilization=0.5, tp=2, enforce_eager=True), device_bytes=80 * GIB, processes=ON_GPUS
    )
    assert several.overhead == CONTEXT_BYTES + COLLECTIVE_BYTES


def test_what_does_not_fit_has_less_than_no_cache() -> None:
    room = serving(CACHED, config(gpu_memory_utilization=0.01), device_bytes=GIB, processes=ON_GPUS)
    assert room.cache < 0 and room.concurrency == 0 and room.total > room.budget


def test_a_cache_that_is_written_is_taken_as_it_is() -> None:
    room = serving(CACHED, config(kv_cache_memory_bytes=10**8), device_bytes=None, processes=ON_CPU)
    assert room.cache == 10**8 and room.overhead == room.budget == 0
    assert serving(CACHED, config(), device_bytes=None, processes=ON_CPU).cache == GIB  # vLLM's own on the CPU


@pytest.mark.parametrize("family", picture_models.ARCHITECTURES)
def test_weights_of_models_that_see_are_those_that_updates_write(family: str) -> None:
    _, model = model_of(picture_models.config(family), pictures=True)
    for written in ("tp=1", "tp=2"):
        table = RolloutTable(PICTURES[family], model, parse_rollout_layout(written))
        stored = sum(prod(table.shape(each)) * itemsize_of(each.rule, 2) for each in table.tensors(0))
        assert rollout_weight_bytes(model, parse_rollout_layout(written), 2) == stored


def test_a_tower_works_beside_vllm_s_share() -> None:
    """Features of 512 tokens, three of each; hidden states of 2,048 patches, and their MLP or attention over tp=2."""
    _, model = model_of(picture_models.config("qwen3_vl"), pictures=True)
    assert model.vision is not None and len(model.vision.deepstack) == 2
    settings = config(gpu_memory_utilization=0.5, max_num_batched_tokens=512, tp=2)
    room = serving(model, settings, device_bytes=8 * GIB, processes=ON_GPUS)
    width = max(3 * model.vision.hidden_size, 2 * model.vision.ffn_hidden_size) / 2
    by_hand = 2 * (512 * 3 * model.hidden_size + 2048 * (4 * model.vision.hidden_size + width))
    assert room.encoder == by_hand and room.total == room.budget + by_hand
    text = serving(replace(model, vision=None), settings, device_bytes=8 * GIB, processes=ON_GPUS)
    assert text.encoder == 0 and room.cache < text.cache
