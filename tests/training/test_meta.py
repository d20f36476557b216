"""Modules on the meta device: of any rank, with the shapes of real ones, in no memory and little time."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from mcore_rl.config.engine import Device, EngineConfig, LayerSpec, Precision
from mcore_rl.config.parallel import parse_layout
from mcore_rl.config.role import Head
from mcore_rl.families.registry import model_of
from mcore_rl.ground.errors import ConfigError
from mcore_rl.parallel.device import detect, device_of
from mcore_rl.parallel.groups import destroy_groups, init_groups
from mcore_rl.parallel.layout import Layout
from mcore_rl.training.meta import meta_chunks, meta_shapes
from mcore_rl.training.model import build_chunks, transformer_config
from tests.support import models, published

MODEL = models.moe()


@pytest.mark.parametrize("head", list(Head))
@pytest.mark.parametrize("model", [MODEL, models.gemma2(), models.deepseek_v3(), models.qwen2_moe()])
def test_shapes_are_those_of_real_modules(model: object, head: Head) -> None:
    """One process is a whole world, so the real thing is at hand."""
    parallel, platform = parse_layout(""), detect(Device.cpu)
    expected = meta_shapes(model, parallel, 1, 0, head=head)  # type: ignore[arg-type]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        groups = init_groups(Layout.of(parallel, 1), platform, device_of(platform, 0), seed=1)
        config = transformer_config(model, parallel, EngineConfig(precision=Precision.float32), LayerSpec.local)  # type: ignore[arg-type]
        chunks = build_chunks(model, config, parallel, LayerSpec.local, groups, head=head)  # type: ignore[arg-type]
        real = [{key: tuple(x.shape) for key, x in chunk.state_dict().items() if x is not None} for chunk in chunks]
    finally:
        destroy_groups()
        dist.destroy_process_group()
    assert real == expected


def test_every_rank_has_its_own_part() -> None:
    """Hand-counted: 4 layers in 2 stages of 2 chunks, 4 experts over 2 ranks, a vocabulary of 101 over 2."""
    parallel = parse_layout("tp=2,pp=2,vpp=2,ep=2")
    ranks = [meta_shapes(MODEL, parallel, 8, rank) for rank in range(8)]
    assert all(len(chunks) == 2 for chunks in ranks)
    for rank, (first, second) in enumerate(ranks):
        last_stage = rank >= 4
        assert ("embedding.word_embeddings.weight" in first) == (not last_stage)
        assert ("output_layer.weight" in second) == last_stage
        for chunk in (first, second):
            assert sum(key.endswith("linear_proj.weight") for key in chunk) == 1  # layers
            assert sum("local_experts" in key for key in chunk) == 2 * 2
            assert chunk["decoder.layers.0.self_attention.linear_qkv.weight"] == ((4 + 2 + 2) * 16 // 2, 48)
    assert ranks[0][0]["embedding.word_embeddings.weight"] == (51, 48)


def test_nothing_is_left_behind() -> None:
    with meta_chunks(MODEL, parse_layout("pp=2"), 2, 1) as (chunk,):
        assert {parameter.device for parameter in chunk.parameters()} == {torch.device("meta")}
        assert dist.get_world_size() == 2 and dist.get_rank() == 1
    assert not dist.is_initialized()
    assert torch.empty(1).device.type == "cpu"


def test_a_layout_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"parallel\.tp=3"):
        meta_shapes(MODEL, parse_layout("tp=3"), 3, 0)
    assert not dist.is_initialized()


def test_the_full_size_of_141_billion_parameters_takes_seconds() -> None:
    _, model = model_of(published.FACTS["mistralai/Mixtral-8x22B-Instruct-v0.1"])
    begin = time.perf_counter()
    (shapes,) = meta_shapes(model, parse_layout(""), 1, 0)
    total = sum(torch.Size(shape).numel() for shape in shapes.values())
    assert total == 140_630_071_296  # published: 141B
    assert time.perf_counter() - begin < 20
