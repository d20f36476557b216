"""Training steps of about 1B parameters in bfloat16: seconds, MFU, and the planner's memory against torch's.

The same steps as in tests/gpu/test_train_step.py, with Transformer Engine's layers where it is installed.
"""

from __future__ import annotations

from benchmarks.gpu_sections.section import GB, GIB, Bench, Fact, Facts, Skipped
from mcore_rl.config.engine import LayerSpec, Precision, Recompute
from mcore_rl.config.parallel import ParallelConfig
from mcore_rl.families.flops import matmul_parameters, train_flops
from mcore_rl.parallel.device import have_transformer_engine, memory
from mcore_rl.parallel.peak_flops import peak_tflops
from mcore_rl.planning.overheads import FRAGMENTATION, MATMUL_EFFICIENCY
from mcore_rl.planning.timing import layers_share
from mcore_rl.planning.training import RolePlan, Work
from tests.support import train_steps


def dense(bench: Bench) -> Facts:
    """The shape of Llama 3.2 1B, everything kept for backward."""
    return of_model(bench, "dense", Recompute.none)


def dense_recomputed(bench: Bench) -> Facts:
    """The same with every layer computed again in backward."""
    return of_model(bench, "dense", Recompute.full)


def moe(bench: Bench) -> Facts:
    """A mixture of 8 experts of which a token takes 2, everything kept for backward."""
    return of_model(bench, "moe", Recompute.none)


def of_model(bench: Bench, name: str, recompute: Recompute) -> Facts:
    """One model's steps on the local layers, and on Transformer Engine's if there are any."""
    platform = bench.platform
    least = train_steps.LEAST_MEMORY[recompute]
    if platform.is_accelerator and memory(platform).free_bytes < least:
        free = memory(platform).free_bytes / GIB
        raise Skipped(f"needs {least / GIB:.0f} GiB of device memory, and {free:.0f} are free")
    bench.rank.init_process_group(platform)
    yield from of_layers(bench, name, recompute, LayerSpec.local)
    if platform.is_accelerator and have_transformer_engine():
        yield from of_layers(bench, name, recompute, LayerSpec.transformer_engine)
    else:
        yield Fact(what="Transformer Engine's layers", value="skipped", beside="not installed, or no accelerator")


def of_layers(bench: Bench, name: str, recompute: Recompute, layer_spec: LayerSpec) -> Facts:
    """Times, then memory, of one kind of layers."""
    size = train_steps.SIZES[bench.platform.is_accelerator][name]
    trained = train_steps.train(bench.platform, name, layer_spec, recompute)
    tokens = sum(size.lengths)
    case = layer_spec.value
    total, active = (count / 1e6 for count in (train_steps.num_parameters(size.model), matmul_parameters(size.model)))
    yield Fact(
        what=f"{case}: a step of {len(size.lengths)} sequences, {tokens:,} tokens",
        value=trained.step_s,
        unit="s",
        beside=f"{total:.4g}M parameters, {active:.4g}M a token; {tokens / trained.step_s:,.0f} tokens/s; "
        f"the first took {trained.first_s:.1f} s",
    )
    rate = train_flops(size.model, size.lengths) / 1e12 / trained.step_s
    peak = peak_tflops(bench.platform.device_name, Precision.bfloat16)
    yield Fact(what=f"{case}: model operations", value=rate, unit="TFLOP/s", beside="without repeated and useless work")
    if peak is not None:
        fused = layer_spec is LayerSpec.transformer_engine
        dense = MATMUL_EFFICIENCY * peak * 1e12
        assumed = MATMUL_EFFICIENCY * layers_share(size.model, dense, fused=fused)
        yield Fact(what=f"{case}: MFU", value=100 * rate / peak, unit="%", beside=f"planner: {100 * assumed:.0f}")
    losses = f"loss {trained.losses[0]:.3f} to {trained.losses[-1]:.3f} in {len(trained.losses)} steps"
    yield Fact(what=f"{case}: gradient norm of the first step", value=trained.grad_norms[0], beside=losses)
    yield from of_memory(bench, size, recompute, layer_spec, trained)
    for direction, seconds in (("to the host", trained.out_s), ("back", trained.back_s)):
        yield Fact(
            what=f"{case}: all state {direction}",
            value=seconds,
            unit="s",
            beside=f"{trained.moved_bytes / GB:.1f} GB, of which gradients are dropped; host memory was new",
        )


def of_memory(
    bench: Bench,
    size: train_steps.Size,
    recompute: Recompute,
    layer_spec: LayerSpec,
    trained: train_steps.Trained,
) -> Facts:
    """The planner's bytes of one process against those that torch saw."""
    config = train_steps.config_of(size, bench.platform, layer_spec, recompute)
    lengths = size.lengths
    work = Work(sequences=len(lengths), longest=max(lengths), mean=sum(lengths) / len(lengths))
    on = bench.platform.is_accelerator
    plan = RolePlan("actor", size.model, config, ParallelConfig(), 1, work, accelerator=on)
    planned = {"state": plan.state(0).total, "a step beside it": plan.training(0).total}
    before, away, _ = trained.used_bytes
    measured = {"state": before - away, "a step beside it": trained.peak_bytes - before}
    case = layer_spec.value
    if not on:
        note = "the process's, its libraries included: not to be compared"
        yield Fact(what=f"{case}: peak of memory", value=trained.peak_bytes / GIB, unit="GiB", beside=note)
        return
    for what, num_bytes in measured.items():
        yield against_plan(f"{case}: memory, {what}", num_bytes, planned[what])
    yield against_plan(f"{case}: memory, peak", trained.peak_bytes, sum(planned.values()))
    unused = 1 - trained.peak_bytes / trained.reserved_bytes
    yield Fact(
        what=f"{case}: reserved and not in use at the peak",
        value=100 * unused,
        unit="%",
        beside=f"planner: {100 * FRAGMENTATION:.0f}",
    )


def against_plan(what: str, measured: int, planned: int) -> Fact:
    """A measured figure beside the planner's."""
    ratio = f"{planned / measured:.3f} times that" if measured > 0 else "nothing was measured"
    return Fact(what=what, value=measured / GIB, unit="GiB", beside=f"planner: {planned / GIB:.2f}, {ratio}")
