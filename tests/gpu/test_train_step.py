"""Training steps of models of about 1B parameters in bfloat16: the loss falls, memory is left when it should be.

Prints the time of a step, the MFU and the peak memory; asserts no time.  On the CPU the same steps run on tiny models.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import lru_cache

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mcore_rl.config.engine import Device, LayerSpec, Precision, Recompute
from mcore_rl.families.flops import matmul_parameters, train_flops
from mcore_rl.parallel.device import Platform, detect, have_transformer_engine, memory
from mcore_rl.parallel.groups import destroy_groups
from mcore_rl.parallel.launch import Rank, run_ranks
from mcore_rl.parallel.peak_flops import peak_tflops
from tests.gpu.places import cases
from tests.support.skips import ACCELERATOR, NOT_INSTALLED
from tests.support.train_steps import (
    GIB,
    LEAST_MEMORY,
    NAMES,
    SIZES,
    Case,
    Size,
    Trained,
    batch_of,
    build,
    negative_log_likelihood,
    num_parameters,
    train_all,
)


@lru_cache
def trained(kind: Device, cases: tuple[Case, ...]) -> dict[Case, Trained]:
    return run_ranks(train_all, 1, (kind, cases), timeout_s=600)[0]


def together(platform: Platform, case: Case) -> tuple[Case, ...]:
    """A large case has a process, and a device, of its own; the tiny ones of the CPU share one."""
    if platform.is_accelerator:
        return (case,)
    return tuple((name, LayerSpec.local, recompute) for name in NAMES for recompute in LEAST_MEMORY)


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


def models_and_layers(is_accelerator: bool) -> list[Case]:
    layer_specs = [LayerSpec.local, *([LayerSpec.transformer_engine] if is_accelerator else [])]
    return [(name, spec, recompute) for name in NAMES for spec in layer_specs for recompute in LEAST_MEMORY]


@pytest.mark.tier("test")
@pytest.mark.parametrize(
    ("platform", "name", "layer_spec", "recompute"), cases(models_and_layers), indirect=["platform"]
)
def test_training_lowers_the_loss_and_offload_frees_memory(
    platform: Platform, name: str, layer_spec: LayerSpec, recompute: Recompute, capsys: pytest.CaptureFixture[str]
) -> None:
    if layer_spec is LayerSpec.transformer_engine and not have_transformer_engine():
        pytest.skip(f"{NOT_INSTALLED}Transformer Engine, which the extra `cuda` brings")
    if platform.is_accelerator and memory(platform).total_bytes < LEAST_MEMORY[recompute]:
        pytest.skip(
            f"{ACCELERATOR}recompute={recompute.value} needs {LEAST_MEMORY[recompute] / GIB:.0f} GiB of device memory"
        )
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


def _grouped_flops(left: torch.Size, right: torch.Size, *_: object, **__: object) -> int:
    """Multiplications and additions of rows in groups, each with one matrix, or of groups' outer products, summed."""
    return 2 * left.numel() * right[-1]


def counted_matmul_flops(rank: Rank) -> dict[str, int]:
    """What torch counts in the forward and backward passes of a step, without attention."""
    platform = detect(Device.cpu)
    rank.init_process_group(platform)
    flops_of = {}
    for name in NAMES:
        size = SIZES[False][name]
        engine = build(size, platform, LayerSpec.local, Recompute.none)
        batch, counts = batch_of(size)
        with FlopCounterMode(display=False, custom_mapping={torch.ops.aten._grouped_mm: _grouped_flops}) as counter:
            engine.train_step(batch, negative_log_likelihood, counts)
        by_operation = counter.get_flop_counts()["Global"]
        flops_of[name] = sum(flops for operation, flops in by_operation.items() if "attention" not in str(operation))
        destroy_groups()
    return flops_of


def test_flops_of_matrices_are_those_that_torch_counts(processes: None) -> None:
    for name, counted in run_ranks(counted_matmul_flops, 1, timeout_s=120)[0].items():
        model, lengths = SIZES[False][name].model, SIZES[False][name].lengths
        assert counted == 6 * matmul_parameters(model) * sum(lengths), name
