"""What a layer keeps for backward: beside what autograd saves in a real step, and by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from mcore_rl.config.engine import EngineConfig, LayerSpec, OptimizerConfig, OptimizerKind, Precision, Recompute
from mcore_rl.config.model import LayerKind, LinearAttentionConfig, ModelConfig, MoeConfig, VisionConfig
from mcore_rl.config.parallel import ParallelConfig, parse_layout
from mcore_rl.config.role import Head
from mcore_rl.families.flops import patch_width
from mcore_rl.families.registry import model_of
from mcore_rl.ground.types import Denominators, Picture, TrainBatch
from mcore_rl.parallel.launch import Rank
from mcore_rl.planning.activations import Kernels, head_bytes, kernels_of, layer_bytes, tower_bytes
from mcore_rl.planning.training import RolePlan, Work
from mcore_rl.training.vision import build_tower, features_of, set_trained
from tests.support import batches, engines, models, picture_models
from tests.support.forked import run_ranks

LENGTH, SEQUENCES = 96, 4
ROWS = LENGTH * SEQUENCES
WIDE = models.dense(
    num_layers=2, hidden_size=128, ffn_hidden_size=320, num_attention_heads=4, num_query_groups=2, head_dim=32,
    vocab_size=640,
)  # fmt: skip
DENSE, SPARSE = LayerKind(has_experts=False, is_linear=False), LayerKind(has_experts=True, is_linear=False)
EXPERTS = replace(WIDE, moe=MoeConfig(num_experts=4, top_k=2, ffn_hidden_size=160))
# One layer with a gated delta net, of more heads than the other, which attends with a gate.
LINEAR = replace(
    EXPERTS, attention_output_gate=True, qk_norm=True, zero_centered_norm=True,
    linear_attention=LinearAttentionConfig(
        layers=[0], num_key_heads=4, num_value_heads=8, key_head_dim=32, value_head_dim=16, conv_kernel_dim=4
    ),
)  # fmt: skip
CASES = [
    (model, layout, precision, recompute)
    for model in (WIDE, replace(WIDE, qk_norm=True), EXPERTS)
    for layout, precision, recompute in (
        ("", Precision.bfloat16, Recompute.none),
        ("", Precision.float32, Recompute.none),
        ("", Precision.bfloat16, Recompute.selective),
        ("tp=2", Precision.bfloat16, Recompute.none),
    )
]
CASES += [(LINEAR, "", Precision.bfloat16, recompute) for recompute in (Recompute.none, Recompute.selective)]
CASES.append((LINEAR, "cp=2", Precision.bfloat16, Recompute.none))
CASES.append((replace(WIDE, num_query_groups=1), "tp=2", Precision.bfloat16, Recompute.none))


def saved_bytes(rank: Rank, cases: list[tuple[ModelConfig, str, Precision, Recompute]]) -> list[int]:
    """Bytes that autograd saves of a step of each case, weights aside, each storage once; the logits among them."""
    sizes = []
    with engines.world(rank):
        for model, layout, precision, recompute in cases:
            with engines.groups_of(layout) as groups:
                settings = engines.config(precision=precision, recompute=recompute, microbatch_tokens=ROWS)
                engine = engines.build(groups, model, settings, layout=layout)
                buffers = [each for chunk in engine.chunks for each in (*chunk.buffers, *chunk.expert_parallel_buffers)]
                weights = {buffer.param_data.untyped_storage().data_ptr() for buffer in buffers}
                seen: dict[int, torch.UntypedStorage] = {}

                def keep(
                    tensor: torch.Tensor,
                    seen: dict[int, torch.UntypedStorage] = seen,
                    weights: set[int] = weights,
                ) -> torch.Tensor:
                    storage = tensor.untyped_storage()
                    if storage.data_ptr() not in weights:
                        seen[storage.data_ptr()] = storage  # held, so that no other takes its place
                    return tensor

                batch = TrainBatch(
                    lengths_S=(LENGTH,) * SEQUENCES,
                    tokens_T=torch.arange(ROWS) % model.vocab_size,
                    mask_T=torch.arange(ROWS) % LENGTH != 0,
                    old_logprobs_T=torch.zeros(ROWS),
                    advantages_T=torch.ones(ROWS),
                )
                counts = Denominators(loss=float(ROWS), tokens=ROWS, sequences=SEQUENCES)
                with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                    engine.train_step(batch, batches.policy_loss, counts, with_entropy=True)
                sizes.append(sum(storage.nbytes() for storage in seen.values()))
                del engine, seen
    return sizes


def test_what_is_kept_is_what_autograd_saves(processes: None) -> None:
    """Within 4 %: labels, offsets and the loss's own vectors are a round number of ours.

    Selective recompute saves its inputs outside of autograd's eyes, and forward comes twice, so that what is seen is
    what is kept without recompute less the copy that joins sequences: it is held to the same number.
    """
    alone, both = ([case for case in CASES if bool(case[1]) is split] for split in (False, True))
    measured = (
        run_ranks(saved_bytes, 1, (alone,), timeout_s=240)[0],
        run_ranks(saved_bytes, 2, (both,), timeout_s=240)[0],
    )
    for cases, sizes in zip((alone, both), measured, strict=True):
        for (model, layout, precision, recompute), num_bytes in zip(cases, sizes, strict=True):
            engine = EngineConfig(precision=precision, microbatch_tokens=ROWS)
            parallel = parse_layout(layout)
            work = Work(sequences=SEQUENCES, longest=LENGTH, mean=LENGTH)
            devices = parallel.tp * parallel.cp
            role = RolePlan("actor", model, engine, parallel, devices, work, accelerator=False)
            step = role.training(0)
            assert step.activations + step.logits == pytest.approx(num_bytes, rel=0.04), (layout, precision, recompute)


def test_a_layer_by_hand() -> None:
    """Transformer Engine's, in bfloat16: h = 128, q = 128, k = 64, f = 320 of 4 heads, over 2 tensor ranks."""
    parallel = parse_layout("tp=2")
    per_row = layer_bytes(WIDE, parallel, Kernels(fused=True, one_by_one=False, size=2), kind=DENSE, longest=96)
    norms = 2 * (2 * 2 * 128) / 2
    attention = 2 * (64 + 2 * 32) + 2 * (64 + 32) + 4 * 2 + 2 * 64
    assert per_row.kept == norms + attention + 3 * 2 * 160
    assert per_row.passed == 2 * 128 / 2
    assert per_row.held(Recompute.none) == per_row.kept
    assert per_row.held(Recompute.selective) == per_row.kept - 4 * 2
    assert per_row.held(Recompute.full) == per_row.passed
    assert per_row.working(Recompute.full) == per_row.working(Recompute.none) + per_row.kept


def test_temporaries_of_backward_by_hand() -> None:
    """Three widths of the MLP where silu and gate are one kernel, which is so on accelerators in either spec."""
    compiled = Kernels(fused=False, one_by_one=False, size=2)
    for kernels, widths in ((replace(compiled, fused=True), 3), (compiled, 3), (replace(compiled, one_by_one=True), 7)):
        per_row = layer_bytes(WIDE, ParallelConfig(), kernels, kind=DENSE, longest=96)
        assert per_row.backward == 2 * 128 + max(widths * 2 * 320, 2 * 2 * (128 + 2 * 64))


def test_norms_of_local_layers_keep_what_transformer_engines_do() -> None:
    """One kernel each, of either.  Where heads have norms, queries are copied; keys lie in the projection."""
    local = Kernels(fused=False, one_by_one=False, size=2)
    plain, normed = (
        layer_bytes(model, ParallelConfig(), local, kind=DENSE, longest=96)
        for model in (WIDE, replace(WIDE, qk_norm=True))
    )
    assert plain == layer_bytes(WIDE, ParallelConfig(), replace(local, fused=True), kind=DENSE, longest=96)
    assert normed.kept == plain.kept + 2 * 4 * 32


def test_experts_by_hand() -> None:
    """Two of four experts a row, over two ranks: at most twice, and here 1.5 times, what a rank's share is."""
    kernels = Kernels(fused=True, one_by_one=False, size=2)
    whole = layer_bytes(EXPERTS, ParallelConfig(), kernels, kind=SPARSE, longest=96)
    spread = layer_bytes(EXPERTS, parse_layout("ep=2"), kernels, kind=SPARSE, longest=96)
    sent = 2 * 2 * (128 + 3 * 160)  # rows, bytes, input and the three products
    assert spread.kept - whole.kept == pytest.approx(0.5 * sent)


def test_matrices_of_local_experts_are_stacked() -> None:
    """Gate and up of the rank's experts, 2 x 160 by 128, in bfloat16; one alone is multiplied where it lies."""
    local = Kernels(fused=False, one_by_one=False, size=2)
    for layout, experts, width in (("", 4, 160), ("ep=2", 2, 160), ("tp=2,etp=2", 4, 80), ("ep=4", 0, 160)):
        layer = layer_bytes(EXPERTS, parse_layout(layout), local, kind=SPARSE, longest=96)
        assert layer.stacked == 2 * experts * 2 * width * 128
    assert layer_bytes(EXPERTS, ParallelConfig(), local, kind=DENSE, longest=96).stacked == 0
    assert layer_bytes(EXPERTS, ParallelConfig(), replace(local, fused=True), kind=SPARSE, longest=96).stacked == 0


def test_logits_are_cut_over_tensor_ranks_and_a_critic_has_none() -> None:
    kernels = Kernels(fused=True, one_by_one=False, size=2)
    one, two = (head_bytes(WIDE, parse_layout(text), kernels, head=Head.lm).kept for text in ("", "tp=2"))
    assert one - two == 2 * 320 + 2 * 2 * 128 / 2
    assert head_bytes(WIDE, ParallelConfig(), kernels, head=Head.value).kept < one - 2 * 640 + 4 * 129 + 1


@pytest.mark.parametrize(
    ("changes", "engine", "layout", "accelerator", "fused"),
    [
        ({}, {}, "", True, True),
        ({}, {}, "", False, False),
        ({}, {"layer_spec": LayerSpec.local}, "", True, False),
        ({}, {"precision": Precision.float32}, "", True, False),
        ({}, {"optim": OptimizerConfig(optimizer=OptimizerKind.muon)}, "", True, False),
        ({"attention_soft_cap": 50.0}, {}, "", True, False),
        ({"sandwich_norm": True}, {}, "", True, False),
        ({"attention_sinks": True}, {}, "", True, False),
        ({"sliding_window": 8, "sliding_layers": [0]}, {}, "cp=2", True, False),
        ({"sliding_window": 8, "sliding_layers": [0]}, {}, "", True, True),
    ],
)
def test_transformer_engine_is_expected_where_it_serves(
    changes: dict[str, object], engine: dict[str, object], layout: str, accelerator: bool, fused: bool
) -> None:
    settings = EngineConfig(**engine)  # type: ignore[arg-type]
    kernels = kernels_of(replace(WIDE, **changes), parse_layout(layout), settings, accelerator=accelerator)  # type: ignore[arg-type]
    assert kernels.fused is fused


GRIDS = [(16, 8), (12, 12)]
PATCHES = 16 * 8 + 12 * 12


def tower_of(family: str, dtype: torch.dtype) -> tuple[VisionConfig, Any]:
    """A tower of four blocks, wide enough that vectors count for little."""
    _, model = model_of(picture_models.config(family), pictures=True)
    assert model.vision is not None
    vision = replace(model.vision, depth=4, hidden_size=128, num_heads=4, ffn_hidden_size=344)
    tower = build_tower(vision, model.hidden_size, torch.device("cpu"), dtype)
    return vision, tower


def passed(vision: VisionConfig, tower: Any) -> torch.Tensor:
    """Features of pictures without pixels."""
    pictures = [Picture(str(index), *grid, grid[0] * grid[1] // 4) for index, grid in enumerate(GRIDS)]
    return features_of(tower, vision, pictures, torch.zeros(PATCHES, patch_width(vision), dtype=torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_a_tower_that_learns_keeps_what_the_plan_says(family: str, dtype: torch.dtype) -> None:
    """What autograd saves around the blocks, which are computed again, and the blocks' inputs."""
    vision, tower = tower_of(family, dtype)
    set_trained(tower, True, sums_over_tensor_ranks=False)
    weights = {parameter.untyped_storage().data_ptr() for parameter in tower.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    def keep_inputs(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], named: dict[str, Any]) -> None:
        for tensor in (inputs[0], *named["position_embeddings"]):
            keep(tensor)

    for block in tower.blocks:
        block.register_forward_pre_hook(keep_inputs, with_kwargs=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        passed(vision, tower)
    seen = sum(storage.nbytes() for storage in kept.values()) / PATCHES
    assert tower_bytes(vision, dtype.itemsize).kept == pytest.approx(seen, rel=0.04)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_a_block_of_a_tower_needs_what_the_plan_says(family: str, dtype: torch.dtype) -> None:
    """Half of the working memory of backward or more is what autograd saves of a block that is computed again."""
    vision, tower = tower_of(family, dtype)
    weights = {parameter.untyped_storage().data_ptr() for parameter in tower.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        passed(vision, tower)
    e, w, f = dtype.itemsize, vision.hidden_size, vision.ffn_hidden_size
    around = tower_bytes(vision, e).kept - e * w * (vision.depth + 1)
    block = (sum(storage.nbytes() for storage in saved.values()) / PATCHES - around) / vision.depth
    backward = max(3 * e * f, 4 * 4 * w)
    assert tower_bytes(vision, e).block - backward == pytest.approx(block, rel=0.06)
