"""Rehearsals of small models: memory beside what torch's allocator gave in a real step, operations and bytes by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from mcore_rl.config.engine import EngineConfig, LayerSpec, Precision, Recompute
from mcore_rl.config.model import ModelConfig, MoeConfig
from mcore_rl.config.parallel import ParallelConfig, parse_layout
from mcore_rl.config.role import Head
from mcore_rl.errors import ConfigError
from mcore_rl.families.flops import visible_pairs
from mcore_rl.parallel.launch import Rank
from mcore_rl.parallel.layout import Layout
from mcore_rl.rehearsal.host_reads import refused
from mcore_rl.rehearsal.ledger import Ledger, MemoryKind
from mcore_rl.rehearsal.rank import (
    TRAIN,
    TRAIN_AGAIN,
    RehearsedRank,
    microbatch_lengths,
    rehearse,
    rehearsed_microbatches,
)
from mcore_rl.rehearsal.stages import ranks_of_stages
from mcore_rl.types import Denominators, TrainBatch
from tests.support import batches, engines, models
from tests.support.forked import run_ranks

WIDE = models.dense(
    num_layers=4, hidden_size=256, ffn_hidden_size=640, num_attention_heads=8, num_query_groups=4, head_dim=32,
    vocab_size=2048, max_position_embeddings=512,
)  # fmt: skip
EXPERTS = replace(WIDE, moe=MoeConfig(num_experts=4, top_k=2, ffn_hidden_size=320))
LONGEST, TOKENS = 256, 512


def part(model: ModelConfig, layout: str = "", world_size: int = 1, rank: int = 0, **changes: Any) -> RehearsedRank:
    settings = dict(
        role="actor",
        model=model,
        engine=EngineConfig(precision=Precision.bfloat16, microbatch_tokens=TOKENS, layer_spec=LayerSpec.local),
        parallel=parse_layout(layout),
        world_size=world_size,
        rank=rank,
        head=Head.lm,
        accelerator=True,
        device_bytes=80 << 30,
        tokens=TOKENS,
        longest=LONGEST,
        num_microbatches=8,
        imbalance=1.0,
        loss=batches.policy_loss,
        with_entropy=True,
    )
    return RehearsedRank(**(settings | changes))


def rehearsals(rank: Rank, parts: list[RehearsedRank]) -> list[Ledger]:
    return [rehearse(each).ledger for each in parts]


def ledger_of(each: RehearsedRank) -> Ledger:
    return run_ranks(rehearsals, 1, ([each],), timeout_s=240)[0][0]


# ---- memory ----


def allocated(rank: Rank, cases: list[tuple[ModelConfig, EngineConfig]]) -> list[list[int]]:
    """The peak of two training steps of each case by torch's own allocator, as its profiler hears it."""
    peaks = []
    with engines.world(rank):
        for model, settings in cases:
            with engines.groups_of() as groups:
                lengths = microbatch_lengths(TOKENS, LONGEST, 1)
                size = sum(lengths)
                mask = torch.ones(size, dtype=torch.bool)
                mask[::LONGEST] = False
                zeros = torch.zeros(size)
                batch = TrainBatch(
                    lengths_S=tuple(lengths), tokens_T=torch.zeros(size, dtype=torch.int64), mask_T=mask,
                    old_logprobs_T=zeros, advantages_T=zeros + 1,
                )  # fmt: skip
                counts = Denominators(loss=float(size), tokens=size, sequences=len(lengths))
                engine = engines.build(groups, model, settings)
                step = partial(engine.train_step, batch, batches.policy_loss, counts, with_entropy=True)
                peaks.append([highest(memory_events(step)) for _ in range(2)])
                del engine, step
    return peaks


def memory_events(work: Callable[[], object]) -> list[int]:
    """Bytes that the allocator gave (positive) or took back, in order."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events = [each for each in profiler.profiler.kineto_results.events() if each.name() == "[memory]"]
    return [each.nbytes() for each in sorted(events, key=lambda each: each.start_ns())]


def highest(changes: list[int]) -> int:
    level = most = 0
    for change in changes:
        level += change
        most = max(most, level)
    return most


CASES = [
    (model, EngineConfig(precision=Precision.float32, microbatch_tokens=TOKENS, recompute=recompute))
    for model in (WIDE, EXPERTS)
    for recompute in (Recompute.none, Recompute.full)
]


def test_memory_is_what_torchs_allocator_gives_in_a_real_step(processes: None) -> None:
    """Beyond the state: what a step takes at its highest, in the first and in a later one (moments are there)."""
    measured = run_ranks(allocated, 1, (CASES,), timeout_s=240)[0]
    parts = [part(model, engine=settings, accelerator=False, num_microbatches=1) for model, settings in CASES]
    ledgers = run_ranks(rehearsals, 1, (parts,), timeout_s=240)[0]
    for case, steps, ledger in zip(CASES, measured, ledgers, strict=True):
        for phase, taken in zip(ledger.phases[-2:], steps, strict=True):
            begin = sum(ledger.by_kind(phase.begin).values())
            counted = ledger.peak(phase).num_bytes - begin
            assert counted == pytest.approx(taken, rel=0.03), (case, phase.name)
