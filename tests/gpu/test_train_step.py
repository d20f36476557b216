"""Training steps of models of about 1B parameters in bfloat16: the loss falls, memory is left when it should be.

Prints the time of a step, the MFU and the peak memory; asserts no time.  On the CPU the same steps run on tiny models.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mcore_rl.config.engine import Device, EngineConfig, LayerSpec, OptimizerConfig, Precision, Recompute
from mcore_rl.config.model import ModelConfig, MoeConfig
from mcore_rl.config.parallel import ParallelConfig
from mcore_rl.families.flops import matmul_parameters, train_flops
from mcore_rl.parallel.device import (
    Platform,
    detect,
    device_of,
    have_transformer_engine,
    memory,
    reset_peak_memory,
    synchronize,
)
from mcore_rl.parallel.groups import destroy_groups, init_groups
from mcore_rl.parallel.launch import Rank, run_ranks
from mcore_rl.parallel.layout import Layout
from mcore_rl.parallel.peak_flops import peak_tflops
from mcore_rl.training.engine import Engine
from mcore_rl.types import Denominators, LossInputs, LossSums, TrainBatch
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
    """What the steps and an offload in the middle of them did.  used_bytes: before, while away and after it."""

    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    step_s: float
    peak_bytes: int
    used_bytes: tuple[int, int, int]
    moved_bytes: int


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


def build(size: Size, platform: Platform, layer_spec: LayerSpec, recompute: Recompute) -> Engine:
    groups = init_groups(Layout.of(ParallelConfig(), 1), platform, device_of(platform, 0), seed=1)
    config = EngineConfig(
        device=platform.kind,
        precision=Precision.bfloat16,
        layer_spec=layer_spec,
        recompute=recompute,
        microbatch_tokens=size.microbatch_tokens,
        optim=OptimizerConfig(lr=size.lr),
    )
    return Engine("actor", size.model, ParallelConfig(), config, groups, platform)


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
    used, moved_bytes = (0, 0, 0), 0
    reset_peak_memory(platform)
    for step in range(WARM_UP + STEPS):
        if step == (WARM_UP + STEPS) // 2:
            before = memory(platform).allocated_bytes
            moved_bytes = sum(engine.memory.offload().num_bytes.values())
            away = memory(platform).allocated_bytes
            engine.memory.onload()
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
    step_s = statistics.median(times[WARM_UP:])
    return Trained(tuple(losses), tuple(norms), step_s, memory(platform).peak_bytes, used, moved_bytes)


@lru_cache
def trained(kind: Device, cases: tuple[Case, ...]) -> dict[Case, Trained]:
    return run_ranks(train_all, 1, (kind, cases), timeout_s=600)[0]


def together(platform: Platform, case: Case) -> tuple[Case, ...]:
    """A large case has a process, and a device, of its own; the tiny ones of the CPU share one."""
    if platform.is_accelerator:
        return (case,)
    return tuple((name, LayerSpec.local, recompute) for name in NAMES for recompute in LEAST_MEMORY)


def num_parameters(model: ModelConfig) -> int:
    """All matrices: those of every expert, and an embedding that is not tied to the output."""
    if model.moe is not None:
        model = replace(model, moe=replace(model.moe, top_k=model.moe.num_experts))
    embedding = 0 if model.tie_output else model.vocab_size * model.hidden_size
    return matmul_parameters(model) + embedding


def describe(platform: Platform, size: Size, result: Trained) -> str:
    peak = peak_tflops(platform.device_name, Precision.bfloat16)
    rate = train_flops(size.model, size.lengths) / 1e12 / result.step_s
    mfu = "no peak is known for it" if peak is None else f"MFU {rate / peak:.1%}"
    active = matmul_parameters(size.model) / 1e6
    return (
        f"{num_parameters(size.model) / 1e6:.1f}M parameters ({active:.1f}M a token), {sum(size.lengths)} tokens: "
        f"{result.step_s:.3f} s a step, {rate:.3f} TFLOP/s on {platform.device_name}, {mfu}, "
        f"peak {result.peak_bytes / GIB:.1f} GiB; loss {result.losses[0]:.3f} to {result.losses[-1]:.3f}"
    )


@pytest.mark.parametrize("recompute", LEAST_MEMORY, ids=lambda recompute: recompute.value)
@pytest.mark.parametrize("layer_spec", [LayerSpec.local, LayerSpec.transformer_engine], ids=lambda spec: spec.value)
@pytest.mark.parametrize("name", NAMES)
def test_training_lowers_the_loss_and_offload_frees_memory(
    platform: Platform, name: str, layer_spec: LayerSpec, recompute: Recompute, capsys: pytest.CaptureFixture[str]
) -> None:
    if layer_spec is LayerSpec.transformer_engine and not (platform.is_accelerator and have_transformer_engine()):
        pytest.skip("needs an accelerator and Transformer Engine")
    if platform.is_accelerator and memory(platform).total_bytes < LEAST_MEMORY[recompute]:
        pytest.skip(f"recompute={recompute.value} needs {LEAST_MEMORY[recompute] / GIB:.0f} GiB of device memory")
    case = (name, layer_spec, recompute)
    result = trained(platform.kind, together(platform, case))[case]
    size = SIZES[platform.is_accelerator][name]
    with capsys.disabled() if platform.is_accelerator else nullcontext():
        print(f"\n{name}, {layer_spec.value}, recompute {recompute.value}: {describe(platform, size, result)}")

    expected = torch.tensor(float(size.model.vocab_size)).log()  # of a model that knows nothing
    assert result.losses[0] == pytest.approx(float(expected), rel=0.1)
    assert all(norm > 0 for norm in result.grad_norms)
    assert max(result.losses[1:]) < result.losses[0], f"the loss rose on the batch that is trained: {result.losses}"
    assert result.losses[-1] < 0.98 * result.losses[0], (
        f"the loss hardly fell on the batch that is trained: {result.losses}"
    )

    num_bytes = 2 + 4 + 12  # a parameter: bfloat16 weight, float32 gradient, main weight and two moments
    assert result.moved_bytes == pytest.approx(num_bytes * num_parameters(size.model), rel=0.05)
    before, away, after = result.used_bytes
    if platform.is_accelerator:
        assert before - away > 0.95 * result.moved_bytes
        assert away < 0.1 * before, "what is left on the device is more than a few buffers"
        assert after == pytest.approx(before, rel=0.01)


def counted_matmul_flops(rank: Rank) -> dict[str, int]:
    """What torch counts in the forward and backward passes of a step, without attention."""
    platform = detect(Device.cpu)
    rank.init_process_group(platform)
    flops_of = {}
    for name in NAMES:
        size = SIZES[False][name]
        engine = build(size, platform, LayerSpec.local, Recompute.none)
        batch, counts = batch_of(size)
        with FlopCounterMode(display=False) as counter:
            engine.train_step(batch, negative_log_likelihood, counts)
        by_operation = counter.get_flop_counts()["Global"]
        flops_of[name] = sum(flops for operation, flops in by_operation.items() if "attention" not in str(operation))
        destroy_groups()
    return flops_of


def test_flops_of_matrices_are_those_that_torch_counts(processes: None) -> None:
    for name, counted in run_ranks(counted_matmul_flops, 1, timeout_s=120)[0].items():
        model, lengths = SIZES[False][name].model, SIZES[False][name].lengths
        assert counted == 6 * matmul_parameters(model) * sum(lengths), name
