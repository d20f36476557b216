"""Operations against what torch counts while transformers' models of every family really run forward and backward."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from mcore_rl.config.model import ModelConfig
from mcore_rl.config.role import Head
from mcore_rl.families.flops import (
    forward_flops,
    matmul_parameters,
    patch_cost,
    tower_flops,
    train_flops,
    visible_pairs,
)
from mcore_rl.families.registry import model_of
from mcore_rl.ground.types import Picture
from mcore_rl.training.vision import build_tower, features_of
from tests.support import models, picture_models
from tests.support.published import TINY, class_config

LENGTH, BATCH = 40, 2
MODELS = TINY | {"deepseek_v3 without a latent of queries": TINY["deepseek_v3"] | {"q_lora_rank": None}}
HYBRID = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
# Eager attention multiplies queries and keys in batches; all weights are plain matrices, experts one at a time.
BATCHED = {"bmm", "baddbmm"}
# Counted beside attention: the angles of the rotation, a batched product of one frequency with one position, once.
ROTATION = 0.002


def counted(name: str) -> dict[str, dict[str, int]]:
    """Of forward and of forward with backward: {"matrices", "attention"} by transformers and torch."""
    torch.manual_seed(0)
    config = class_config(MODELS[name])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")
    tokens = torch.randint(3, config.vocab_size, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    by_pass = {}
    for passes in ("forward", "train"):
        with FlopCounterMode(display=False) as counter:
            loss = model(tokens, labels=tokens, use_cache=False).loss
            if passes == "train":
                loss.backward()
        operations = {str(key).split(".")[-1]: flops for key, flops in counter.get_flop_counts()["Global"].items()}
        attention = sum(flops for key, flops in operations.items() if key in BATCHED)
        by_pass[passes] = {"matrices": sum(operations.values()) - attention, "attention": attention}
    return by_pass


def seen(model: ModelConfig, layer: int) -> int:
    """Pairs by counting them."""
    window = (model.sliding_window or LENGTH) if layer in model.sliding_layers else LENGTH
    return sum(key <= query and query - key < window for query in range(LENGTH) for key in range(LENGTH))


@pytest.mark.parametrize("name", HYBRID)
def test_linear_attention_by_its_weights_and_its_rule(name: str) -> None:
    """torch counts the chunks of transformers' rule, and a convolution's padding; the definition has neither."""
    _, model = model_of(TINY[name])
    linear, moe = model.linear_attention, model.moe
    assert linear is not None
    theirs = AutoModelForCausalLM.from_config(class_config(TINY[name]))
    shares = {"embed_tokens": float(model.tie_output)}
    if moe is not None:
        shares[".mlp.experts."] = moe.top_k / moe.num_experts
    multiplying = sum(
        parameter.numel() * next((share for part, share in shares.items() if part in name), 1.0)
        for name, parameter in theirs.named_parameters()
        if parameter.dim() > 1
    )
    assert matmul_parameters(model) == multiplying
    # S k, k (v - S k)^T and S q: a key's width times a value's, for each of the heads of each layer that has a state.
    rule = 3 * 2 * linear.key_head_dim * linear.value_head_dim * linear.num_value_heads * len(linear.layers)
    pairs = sum(seen(model, layer) for layer in range(model.num_layers) if not model.is_linear(layer))
    attention = 2 * model.num_attention_heads * 2 * model.head_dim * pairs
    assert forward_flops(model, [LENGTH]) == LENGTH * (2 * multiplying + rule) + attention


@pytest.mark.parametrize("name", [name for name in MODELS if name not in HYBRID])
def test_every_family_as_torch_counts_it(name: str) -> None:
    _, model = model_of(MODELS[name])
    lengths, operations = [LENGTH] * BATCH, counted(name)
    for ours, theirs, passes in (
        (forward_flops(model, lengths), operations["forward"], 1),
        (train_flops(model, lengths), operations["train"], 3),
    ):
        assert theirs["matrices"] == passes * 2 * matmul_parameters(model) * LENGTH * BATCH
        # Eager attention computes all pairs, and every layer alike; ours are those that are seen.
        part = sum(seen(model, layer) for layer in range(model.num_layers)) / (model.num_layers * LENGTH**2)
        assert ours - theirs["matrices"] == pytest.approx(part * theirs["attention"], rel=ROTATION)


def test_the_families_differ_in_what_is_counted() -> None:
    """The test above would say nothing of windows, experts and latents if no tiny model had them."""
    by_family = {name: model_of(facts)[1] for name, facts in TINY.items()}
    assert any(0 < len(model.sliding_layers) < model.num_layers for model in by_family.values())
    assert all((model.sliding_window or 0) < LENGTH for model in by_family.values())
    assert any(model.moe and model.moe.dense_layers for model in by_family.values())
    assert any(model.moe and model.moe.shared_gate for model in by_family.values())
    assert any(model.mla for model in by_family.values())
    assert any(model.num_query_groups < model.num_attention_heads for model in by_family.values())


@pytest.mark.parametrize("window", [None, 1, 2, 5, 9, 10, 11])
def test_pairs_are_those_that_the_mask_leaves(window: int | None) -> None:
    for length in (1, 2, 10):
        widest = length if window is None else window
        expected = sum(1 for query in range(length) for key in range(query + 1) if query - key < widest)
        assert visible_pairs(length, window) == expected


def test_sequences_count_each_by_its_own_length() -> None:
    model = models.dense(num_layers=2)
    apart = forward_flops(model, [10]) + forward_flops(model, [30])
    assert forward_flops(model, iter([10, 30])) == apart < forward_flops(model, [40])
    pairs = 10 * 11 // 2 + 30 * 31 // 2
    by_hand = 2 * 4 * 2 * (16 + 16) * pairs  # layers, heads, operations of a product, a key's and a value's width
    assert apart - 2 * 40 * matmul_parameters(model) == by_hand


def test_a_critic_has_one_column() -> None:
    model = models.moe()
    fewer = (model.vocab_size - 1) * model.hidden_size
    assert matmul_parameters(model) - matmul_parameters(model, head=Head.value) == fewer
    assert forward_flops(model, [7]) - forward_flops(model, [7], head=Head.value) == 2 * fewer * 7


def test_llama_2_7b_by_hand() -> None:
    """6.6e9 parameters are multiplied by; 4,096 tokens: 54 TFLOP of matrices and 4.4 of attention, forward."""
    model = ModelConfig(
        num_layers=32, hidden_size=4096, ffn_hidden_size=11008, num_attention_heads=32, num_query_groups=32,
        head_dim=128, vocab_size=32000, max_position_embeddings=4096,
    )  # fmt: skip
    assert matmul_parameters(model) == 6_607_077_376  # the published 6,738,415,616 less embedding and norms
    assert forward_flops(model, [4096]) == pytest.approx(54.13e12 + 4.40e12, rel=1e-3)
    wide = replace(model, sliding_window=1024, sliding_layers=list(range(32)))
    assert forward_flops(wide, [4096]) < forward_flops(model, [4096])


@pytest.mark.parametrize("family", picture_models.ARCHITECTURES)
def test_a_patch_costs_what_the_tower_multiplies_it_by(family: str) -> None:
    """Oracle: the matrices of transformers' tower; what joins patches to a token counts for each of them in part."""
    _, model = model_of(picture_models.config(family), pictures=True)
    assert model.vision is not None
    tower = build_tower(model.vision, model.hidden_size, torch.device("meta"), torch.float32)
    kinds = (torch.nn.Linear, torch.nn.Conv3d)
    matrices = {name: each.weight for name, each in tower.named_modules() if isinstance(each, kinds)}
    of_mergers = sum(each.numel() for name, each in matrices.items() if "merger" in name)
    of_blocks = sum(each.numel() for name, each in matrices.items() if "merger" not in name)
    expected = (of_blocks + of_mergers / model.vision.merge_size**2) / matmul_parameters(model)
    assert patch_cost(model, trained=True) == pytest.approx(expected)
    assert patch_cost(model, trained=False) == pytest.approx(expected / 3)
    assert patch_cost(replace(model, vision=None), trained=True) == 0


GRIDS = [(4, 8), (12, 10), (2, 4), (16, 6)]  # patches: of windows that are whole, cut on one side and on both


def counted_tower(model: ModelConfig, grids: list[tuple[int, int]], *, train: bool) -> int:
    """What torch counts while transformers' tower runs; eager attention, without recompute."""
    assert model.vision is not None
    tower: Any = build_tower(model.vision, model.hidden_size, torch.device("cpu"), torch.float32)
    tower.config._attn_implementation = "eager"
    width = 3 * model.vision.temporal_patch_size * model.vision.patch_size**2
    patches = torch.zeros(sum(high * wide for high, wide in grids), width, dtype=torch.uint8)
    pictures = [Picture(str(index), *grid, grid[0] * grid[1] // 4) for index, grid in enumerate(grids)]
    with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(train):
        features = features_of(tower, model.vision, pictures, patches)
        if train:
            total: Any = features.sum()
            total.backward()
    return int(counter.get_total_flops())


@pytest.mark.parametrize("family", picture_models.ARCHITECTURES)
def test_a_tower_as_torch_counts_it(family: str) -> None:
    """Merged patches, windows and features for further layers are transformers' own; the rotation's angles are few."""
    _, model = model_of(picture_models.config(family), pictures=True)
    for train in (False, True):
        assert tower_flops(model, GRIDS, train=train) == pytest.approx(
            counted_tower(model, GRIDS, train=train), rel=ROTATION
        )
    alone = sum(tower_flops(model, [grid]) for grid in GRIDS)
    assert tower_flops(model, iter(GRIDS)) == alone, "no picture attends to another"
    assert tower_flops(replace(model, vision=None), GRIDS) == 0
