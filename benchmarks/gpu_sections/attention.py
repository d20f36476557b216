"""Packed attention: the kernel that we choose against one SDPA call a sequence, forward and backward.

``attend_varlen`` runs where ``varlen_can_run`` says so; elsewhere, and always on the CPU, one by one is the choice.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from benchmarks.gpu_sections.section import GIB, Bench, Fact, Facts, guarded
from mcore_rl.families.flops import visible_pairs
from mcore_rl.parallel.device import memory, reset_peak_memory, synchronize
from mcore_rl.training.attention_kernels import (
    aligns_last_query,
    attend_one_by_one,
    attend_varlen,
    honours_window,
    takes_groups,
    varlen_can_run,
)
from mcore_rl.training.block_attention import attend_in_blocks
from mcore_rl.training.sequences import PackedSequences

SOFT_CAP = 50.0  # Gemma 2's
Kernel = Callable[[Tensor, Tensor, Tensor, PackedSequences], Tensor]


@dataclass(frozen=True)
class Case:
    """Heads of queries, heads of keys and values, their width, a window, and the lengths of the packed sequences."""

    name: str
    heads: int
    groups: int
    width: int
    window: int | None
    lengths: tuple[int, ...]


def between(low: int, high: int, count: int) -> tuple[int, ...]:
    """``count`` lengths, the same ones every time."""
    draw = random.Random(0)
    return tuple(draw.randint(low, high) for _ in range(count))


def cases(tiny: bool) -> Sequence[Case]:
    """A model of 1B, one of 70B under tp=8, short sequences, and a window that hides most keys."""
    if tiny:
        return (Case("tiny", 4, 2, 16, None, (33, 20)), Case("tiny, window 8", 4, 2, 16, 8, (33, 20)))
    mixed = between(512, 2_048, 24)
    return (
        Case("24 of 512 to 2,048", 32, 8, 64, None, mixed),
        Case("24 of 512 to 2,048", 8, 1, 128, None, mixed),
        Case("200 of 32 to 256", 32, 8, 64, None, between(32, 256, 200)),
        Case("2 of 16,384, window 1,024", 32, 8, 128, 1_024, (16_384, 16_384)),
    )


def facts(bench: Bench) -> Facts:
    """What the kernel of this device can do, then time and memory of each case."""
    dtype = torch.float32 if not bench.platform.is_accelerator else torch.bfloat16
    groups = str(takes_groups(varlen_attn))
    yield Fact(what="varlen_attn takes fewer heads of keys than of queries", value=groups, beside="else repeated")
    if bench.platform.is_accelerator:
        asked = aligns_last_query(bench.device, dtype), honours_window(bench.device, dtype)
        yield Fact(what="varlen_attn: last query sees last key, honours a window", value=f"{asked[0]}, {asked[1]}")
    for case in cases(bench.tiny):
        yield from guarded(case.name, of_case(bench, case, dtype))


def of_case(bench: Bench, case: Case, dtype: torch.dtype) -> Facts:
    """Both kernels of one case, and the one with capped scores where no window is in the way."""
    packed = PackedSequences.of(case.lengths, case.lengths, 1, 0, bench.device)
    random_numbers = torch.Generator(bench.device).manual_seed(0)
    query, key, value, upstream = (
        torch.randn(sum(case.lengths), heads, case.width, generator=random_numbers, device=bench.device).to(dtype)
        for heads in (case.heads, case.groups, case.groups, case.heads)
    )
    inputs = [x.requires_grad_() for x in (query, key, value)]
    scale = case.width**-0.5
    kernels: dict[str, Kernel] = {"one by one": lambda *x: attend_one_by_one(*x, scale, case.window)}
    if varlen_can_run(query, value, packed, case.window):
        kernels["varlen"] = lambda *x: attend_varlen(*x, scale, case.window)
    if case.window is None:
        kernels["capped scores"] = lambda *x: attend_in_blocks(*x, scale, SOFT_CAP, None)
    shape = f"{case.name}; {case.heads} heads on {case.groups} of {case.width}"
    pairs = sum(visible_pairs(length, case.window) for length in case.lengths)
    operations = 3 * 4 * case.heads * case.width * pairs  # forward, and twice that backward
    plain_s = 0.0
    for name, kernel in kernels.items():

        def run(kernel: Kernel = kernel) -> None:
            torch.autograd.grad(kernel(*inputs, packed), inputs, upstream)

        seconds, extra = bench.seconds(run), extra_memory(bench, run)
        plain_s = plain_s or seconds
        beside = f"{plain_s / seconds:.2f} times one by one; {operations / seconds / 1e12:.3g} TFLOP/s; {extra}"
        yield Fact(what=f"{name}: {shape}", value=1e3 * seconds, unit="ms", beside=beside)
    if "varlen" in kernels:
        yield agreement(kernels, inputs, packed, upstream, shape)


def extra_memory(bench: Bench, run: Callable[[], object]) -> str:
    """The peak of ``run`` beyond what was in use before it; of a CPU's process that says little."""
    if not bench.platform.is_accelerator:
        return "memory not measured on the CPU"
    synchronize(bench.platform)
    reset_peak_memory(bench.platform)
    before = memory(bench.platform).allocated_bytes
    run()
    synchronize(bench.platform)
    return f"{(memory(bench.platform).peak_bytes - before) / GIB:.2f} GiB more at the peak"


def agreement(
    kernels: dict[str, Kernel], inputs: list[Tensor], packed: PackedSequences, upstream: Tensor, shape: str
) -> Fact:
    """The largest relative error of varlen's output and gradients against those of one by one in float32."""
    exact = [x.detach().float().requires_grad_() for x in inputs]
    expected = kernels["one by one"](*exact, packed)
    theirs = (expected, *torch.autograd.grad(expected, exact, upstream.float()))
    out = kernels["varlen"](*inputs, packed)
    ours = (out, *torch.autograd.grad(out, inputs, upstream))
    errors = [((a.float() - b).norm() / b.norm()).item() for a, b in zip(ours, theirs, strict=True)]
    return Fact(
        what=f"varlen: error of output and gradients; {shape}",
        value=max(errors),
        unit="relative",
        beside="bfloat16 rounds to 2e-3 on average",
    )
