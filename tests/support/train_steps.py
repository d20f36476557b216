"""Training steps of models of about 1B parameters in bfloat16, with an offload in the middle of them; tiny on the CPU.

Under tests/gpu, which holds that the loss falls and memory is left, and under benchmarks/gpu.py, which writes down the
times.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from mcore_rl.config.engine import Device, EngineConfig, LayerSpec, OptimizerConfig, Precision, Recompute
from mcore_rl.config.model import ModelConfig, MoeConfig
from mcore_rl.config.parallel import ParallelConfig
from mcore_rl.families.flops import matmul_parameters
from mcore_rl.ground.types import Denominators, LossInputs, LossSums, TrainBatch
from mcore_rl.parallel.device import Platform, detect, device_of, memory, reset_peak_memory, synchronize
from mcore_rl.parallel.groups import destroy_groups, init_groups
from mcore_rl.parallel.launch import Rank
from mcore_rl.parallel.layout import Layout
from mcore_rl.training.engine import Engine
from tests.support import models

WARM_UP, STEPS = 2, 6
GIB = 2**30
NAMES = ("dense", "moe")
Case = tuple[str, LayerSpec, Recompute]


@dataclass(frozen=True)
class Size:
    """What is trained.  lengths: of all sequences, tokens.  lr: at which a few steps on one batch show."""

    model: ModelConfig
    lengths: tuple[int, ...]
    microbatch_tokens: int
    lr: float


def between(low: int, high: int, count: int) -> tuple[int, ...]:
    draw = random.Random(0)
    return tuple(draw.randint(low, high) for _ in range(count))


def large(**changes: object) -> ModelConfig:
    """The shape of Llama 3.2 1B, unless changed."""
    settings = dict(
        num_layers=16,
        hidden_size=2_048,
        ffn_hidden_size=8_192,
        num_attention_heads=32,
        num_query_groups=8,
        head_dim=64,
        vocab_size=128_256,
        max_position_embeddings=4_096,
        rotary_base=500_000.0,
        tie_output=True,
    )
    return ModelConfig(**(settings | changes))  # type: ignore[arg-type]


ONE_BILLION_MOE = large(
    hidden_size=1_024,
    num_attention_heads=16,
    num_query_groups=4,
    vocab_size=64_000,
    tie_output=False,
    moe=MoeConfig(num_experts=8, top_k=2, ffn_hidden_size=2_048),
)
SIZES = {
    True: {
        "dense": Size(large(), between(512, 2_048, 24), microbatch_tokens=8_192, lr=1e-4),
        "moe": Size(ONE_BILLION_MOE, between(512, 2_048, 24), microbatch_tokens=8_192, lr=1e-4),
    },
    False: {
        "dense": Size(models.dense(), between(8, 40, 8), microbatch_tokens=64, lr=1e-2),
        "moe": Size(models.moe(), between(8, 40, 8), microbatch_tokens=64, lr=1e-2),
    },
}
# Weights, gradients, main weights and moments take 18 bytes a parameter, 22 GB; what else a step needs is activations.
LEAST_MEMORY = {Recompute.full: 40 * GIB, Recompute.none: 75 * GIB}


@dataclass(frozen=True)
class Trained:
    """What the steps and an offload in the middle of them did.

    first_s, step_s: the first step, which compiles, and the median of those after ``WARM_UP``.  peak_bytes,
    reserved_bytes: the highest in use, and what the allocator held in the end.  used_bytes: before, while away and
    after the offload.  out_s, back_s: its seconds each way; host memory was new.
    """

    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    first_s: float
    step_s: float
    peak_bytes: int
    reserved_bytes: int
    used_bytes: tuple[int, int, int]
    moved_bytes: int
    out_s: float
    back_s: float


def negative_log_likelihood(inputs: LossInputs) -> LossSums:
    assert inputs.logprobs_N is not None
    return LossSums(total=-(inputs.logprobs_N * inputs.mask_N).sum(), metrics={})


def batch_of(size: Size) -> tuple[TrainBatch, Denominators]:
    """Random tokens; every one but the first of each sequence is trained."""
    num_tokens = sum(size.lengths)
    tokens_T = torch.randint(size.model.vocab_size, (num_tokens,), generator=torch.Generator().manual_seed(0))
    mask_T = torch.cat([torch.arange(length) > 0 for length in size.lengths])
    counts = Denominators(loss=float(mask_T.sum()), tokens=num_tokens, sequences=len(size.lengths))
    return TrainBatch(lengths_S=size.lengths, tokens_T=tokens_T, mask_T=mask_T), counts


def config_of(size: Size, platform: Platform, layer_spec: LayerSpec, recompute: Recompute) -> EngineConfig:
    return EngineConfig(
        device=platform.kind,
        precision=Precision.bfloat16,
        layer_spec=layer_spec,
        recompute=recompute,
        microbatch_tokens=size.microbatch_tokens,
        optim=OptimizerConfig(lr=size.lr),
    )


def build(size: Size, platform: Platform, layer_spec: LayerSpec, recompute: Recompute) -> Engine:
    groups = init_groups(Layout.of(ParallelConfig(), 1), platform, device_of(platform, 0), seed=1)
    return Engine(
        "actor", size.model, ParallelConfig(), config_of(size, platform, layer_spec, recompute), groups, platform
    )


def train_all(rank: Rank, kind: Device, cases: Sequence[Case]) -> dict[Case, Trained]:
    """One process: every case, one after another."""
    platform = detect(kind)
    rank.init_process_group(platform)
    return {case: train(platform, *case) for case in cases}


def train(platform: Platform, name: str, layer_spec: LayerSpec, recompute: Recompute) -> Trained:
    """Steps on one batch; after the first half of them, everything goes to host memory and comes back."""
    size = SIZES[platform.is_accelerator][name]
    engine = build(size, platform, layer_spec, recompute)
    batch, counts = batch_of(size)
    losses, norms, times = [], [], []
    reset_peak_memory(platform)
    for step in range(WARM_UP + STEPS):
        if step == (WARM_UP + STEPS) // 2:
            before = memory(platform).allocated_bytes
            out = engine.memory.offload()
            away = memory(platform).allocated_bytes
            back = engine.memory.onload()
            used = (before, away, memory(platform).allocated_bytes)
        synchronize(platform)
        start = time.perf_counter()
        result = engine.train_step(batch, negative_log_likelihood, counts)
        synchronize(platform)
        times.append(time.perf_counter() - start)
        losses.append(result.loss)
        norms.append(result.grad_norm)
        assert result.skipped is None
    destroy_groups()
    in_the_end = memory(platform)
    return Trained(
        losses=tuple(losses),
        grad_norms=tuple(norms),
        first_s=times[0],
        step_s=statistics.median(times[WARM_UP:]),
        peak_bytes=in_the_end.peak_bytes,
        reserved_bytes=in_the_end.reserved_bytes,
        used_bytes=used,
        moved_bytes=sum(out.num_bytes.values()),
        out_s=out.seconds,
        back_s=back.seconds,
    )


def num_parameters(model: ModelConfig) -> int:
    """All matrices: those of every expert, and an embedding that is not tied to the output."""
    if model.moe is not None:
        model = replace(model, moe=replace(model.moe, top_k=model.moe.num_experts))
    embedding = 0 if model.tie_output else model.vocab_size * model.hidden_size
    return matmul_parameters(model) + embedding
