"""The tower: transformers' features of normalised pixels, from bytes; the same on every rank; frozen or learning."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from mcore_rl.families.registry import model_of
from mcore_rl.families.towers import PICTURES
from mcore_rl.ground.types import Picture
from mcore_rl.training.muon import CutMatrix
from mcore_rl.training.vision import block_numbers, build_tower, features_of, set_trained
from tests.support import picture_models

CPU = torch.device("cpu")
SHOWN = [Picture("a", 4, 8, 8), Picture("b", 12, 10, 30), Picture("c", 2, 4, 2)]


@pytest.mark.parametrize("family", PICTURES)
def test_features_are_those_of_the_whole_model(family: str) -> None:
    config = picture_models.config(family)
    _, model = model_of(config, pictures=True)
    vision = model.vision
    assert vision is not None
    values = {name: value for name, value in config.items() if name != "model_type"}
    whole = AutoModelForImageTextToText.from_config(CONFIG_MAPPING[family](**values), attn_implementation="sdpa").eval()
    tower = build_tower(vision, model.hidden_size, CPU, torch.float32).eval()
    tower.load_state_dict(whole.model.visual.state_dict())
    width = 3 * vision.temporal_patch_size * vision.patch_size**2
    draw = torch.Generator().manual_seed(1)
    rows = sum(each.height * each.width for each in SHOWN)
    patches = torch.randint(0, 256, (rows, width), generator=draw, dtype=torch.uint8)
    area = width // 3
    mean, std = (torch.tensor(x).repeat_interleave(area) for x in (vision.pixel_mean, vision.pixel_std))
    grid = torch.tensor([(1, each.height, each.width) for each in SHOWN])
    with torch.no_grad():
        out = whole.model.visual((patches.float() / 255 - mean) / std, grid_thw=grid)
        ours = features_of(tower, vision, SHOWN, patches)
    theirs = [out.pooler_output, *(getattr(out, "deepstack_features", None) or [])]
    assert len(theirs) == 1 + len(vision.deepstack)
    assert torch.equal(ours, torch.cat(theirs, dim=-1))


def test_ranks_start_alike_and_what_is_computed_stays_exact() -> None:
    _, model = model_of(picture_models.config("qwen3_vl"), pictures=True)
    assert model.vision is not None
    torch.manual_seed(1)
    one = build_tower(model.vision, model.hidden_size, CPU, torch.bfloat16)
    drawn = torch.rand(1)
    torch.manual_seed(2)
    other = build_tower(model.vision, model.hidden_size, CPU, torch.bfloat16)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    torch.manual_seed(1)
    assert torch.equal(drawn, torch.rand(1)), "nobody else's random numbers move on"
    assert {each.dtype for each in one.parameters()} == {torch.bfloat16}
    assert {each.dtype for each in one.buffers()} == {torch.float32}
    assert block_numbers(one) == {
        "blocks.0": 0, "blocks.1": 1, "deepstack_merger_list.0": 0, "deepstack_merger_list.1": 1,
    }  # fmt: skip


def test_learned_positions_are_no_matrix_of_muons() -> None:
    _, model = model_of(picture_models.config("qwen3_vl"), pictures=True)
    assert model.vision is not None
    tower: Any = build_tower(model.vision, model.hidden_size, CPU, torch.float32)
    assert CutMatrix.of("vision.pos_embed.weight", tower.pos_embed.weight) is None
    assert not hasattr(tower.merger.linear_fc1.weight, "is_embedding_or_output_parameter")


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_the_tower_waits_for_no_number_of_the_device(family: str) -> None:
    """A device that has no numbers refuses to be waited for."""
    _, model = model_of(picture_models.config(family), pictures=True)
    assert model.vision is not None
    device = torch.device("meta")
    tower = build_tower(model.vision, model.hidden_size, device, torch.float32).eval()
    rows = sum(each.height * each.width for each in SHOWN)
    width = 3 * model.vision.temporal_patch_size * model.vision.patch_size**2
    features = features_of(tower, model.vision, SHOWN, torch.empty(rows, width, dtype=torch.uint8, device=device))
    assert len(features) == sum(each.tokens for each in SHOWN)


def test_a_frozen_tower_has_no_gradients_and_one_that_learns_is_recomputed() -> None:
    _, model = model_of(picture_models.config("qwen2_5_vl"), pictures=True)
    assert model.vision is not None
    tower = build_tower(model.vision, model.hidden_size, CPU, torch.float32).train()
    patches = torch.zeros(8, 3 * 2 * 14 * 14, dtype=torch.uint8)
    saved: dict[bool, int] = {}
    for trained in (False, True):
        set_trained(tower, trained, sums_over_tensor_ranks=True)
        kept = 0

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal kept
            kept += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out = features_of(tower, model.vision, [Picture("a", 2, 4, 2)], patches)
        assert out.requires_grad == trained
        assert all(vars(parameter)["sequence_parallel"] for parameter in tower.parameters())
        saved[trained] = kept
    assert saved[False] == 0
    blocks: Any = tower.blocks
    assert all(block.gradient_checkpointing for block in blocks)
