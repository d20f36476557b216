"""An engine's state out of the device and back, and a snapshot taken and swapped, against plain copies."""

from __future__ import annotations

from dataclasses import replace

import torch

from benchmarks.gpu_sections.section import GB, Bench, Fact, Facts
from benchmarks.offload import (
    MODEL,
    NUM_SEQUENCES,
    everything,
    hidden_share,
    offload_rows,
    snapshot_rows,
    trained_engine,
)
from mcore_rl.parallel.device import memory

# 450M parameters: 6 GB that move, in blocks of gigabytes as those of a large model's rank.
LARGE = replace(MODEL, hidden_size=1_280, ffn_hidden_size=5_120, num_attention_heads=20, vocab_size=64_000)
TINY = replace(
    MODEL,
    num_layers=2,
    hidden_size=64,
    ffn_hidden_size=128,
    num_attention_heads=4,
    num_query_groups=2,
    head_dim=16,
    vocab_size=512,
)
REPETITIONS = 3


def facts(bench: Bench) -> Facts:
    """The rows of benchmarks/offload.py, and whether all came back as it was."""
    engine = trained_engine(bench.rank, bench.platform, TINY if bench.tiny else LARGE)
    before = [tensor.to("cpu", copy=True) for tensor in everything(engine)]
    if bench.platform.is_accelerator:
        in_use = memory(bench.platform).allocated_bytes
        engine.memory.offload()
        freed = 1 - memory(bench.platform).allocated_bytes / in_use
        engine.memory.onload()
        yield Fact(what="device memory that offload frees", value=100 * freed, unit="%")
    repetitions = 1 if bench.tiny else REPETITIONS
    for rows in (offload_rows, snapshot_rows):
        for row in rows(engine, bench.platform, repetitions):
            beside = f"{row.num_bytes / GB:.3g} GB in {1e3 * row.seconds:.4g} ms"
            if row.limit_s is not None:
                beside += f"; plain copies {row.num_bytes / row.limit_s / GB:.3g} GB/s"
            yield Fact(what=row.what, value=row.num_bytes / row.seconds / GB, unit="GB/s", beside=beside)
    same = all(torch.equal(ours, now.cpu()) for ours, now in zip(before, everything(engine), strict=True))
    yield Fact(what="every weight and moment came back bit for bit", value=str(same), ok=same)
    step_s, back_s, share = hidden_share(engine, bench.platform, repetitions, 2 if bench.tiny else NUM_SEQUENCES)
    beside = f"{1e3 * back_s:.4g} ms by itself; a step of {1e3 * step_s:.4g} ms"
    yield Fact(what="the optimizer's way back hidden behind a step", value=100 * share, unit="%", beside=beside)
