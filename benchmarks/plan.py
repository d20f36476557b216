"""Whether the planner's memory is right: the peak of real training processes on the CPU beside what it predicts.

    python benchmarks/plan.py [--cases dense,experts] [--json results.json]

Each case starts its processes anew: an engine of 60M to 130M parameters with its optimizer, one small step that makes
Adam's moments, then the peak of each process is reset, and one step of packed microbatches follows.  Measured is the
highest resident memory of that step (VmHWM), of the rank that has most in each pipeline stage; predicted is
``planning.memory.process_peak``.  Shared pages of libraries count in each process, as they do in VmHWM.

Target: within 10 % in every case.  Exits with 1 where one is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from mcore_rl.config.engine import Device, EngineConfig, LayerSpec, OptimizerConfig, Precision, Recompute
from mcore_rl.config.model import MlaConfig, ModelConfig, MoeConfig, RouterScore
from mcore_rl.config.parallel import parse_layout
from mcore_rl.config.role import Head
from mcore_rl.ground.types import Denominators, LossInputs, LossSums, TrainBatch
from mcore_rl.parallel.device import detect, device_of, memory, reset_peak_memory
from mcore_rl.parallel.groups import init_groups
from mcore_rl.parallel.launch import Rank, run_ranks
from mcore_rl.parallel.layout import Layout
from mcore_rl.planning.memory import process_peak
from mcore_rl.planning.overheads import GIB
from mcore_rl.planning.training import RolePlan, Work
from mcore_rl.training.engine import Engine

TARGET = 0.1
LENGTH = 512  # tokens of every sequence

DENSE = ModelConfig(
    num_layers=10,
    hidden_size=768,
    ffn_hidden_size=2_048,
    num_attention_heads=12,
    num_query_groups=4,
    head_dim=64,
    vocab_size=32_000,
    max_position_embeddings=2_048,
)
EXPERTS = replace(
    DENSE,
    num_layers=6,
    hidden_size=640,
    num_attention_heads=10,
    num_query_groups=2,
    qk_norm=True,
    moe=MoeConfig(num_experts=8, top_k=2, ffn_hidden_size=512),
)
LATENT = replace(
    EXPERTS,
    num_attention_heads=8,
    num_query_groups=8,
    head_dim=96,
    qk_norm=False,
    mla=MlaConfig(q_lora_rank=384, kv_lora_rank=128, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64),
    moe=MoeConfig(
        num_experts=8,
        top_k=2,
        ffn_hidden_size=512,
        dense_layers=[0],
        shared_ffn_hidden_size=512,
        score=RouterScore.sigmoid,
        expert_bias=True,
    ),
)
TIED = replace(DENSE, num_layers=12, tie_output=True, qkv_bias=True, vocab_size=64_000)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One engine and one step.  tokens: of a microbatch.  microbatches: of each data-parallel rank."""

    name: str
    model: ModelConfig
    world_size: int = 1
    layout: str = ""
    precision: Precision = Precision.bfloat16
    recompute: Recompute = Recompute.none
    tokens: int = 2_048
    microbatches: int = 1
    head: Head = Head.lm


CASES = (
    Case(name="dense", model=DENSE),
    Case(name="dense, 4,096 tokens", model=DENSE, tokens=4_096),
    Case(name="dense, selective", model=DENSE, recompute=Recompute.selective),
    Case(name="dense, full", model=DENSE, recompute=Recompute.full, tokens=4_096),
    Case(name="dense, float32", model=DENSE, precision=Precision.float32),
    Case(name="dense, float32, full", model=DENSE, precision=Precision.float32, recompute=Recompute.full),
    Case(name="dense, tp=2", model=DENSE, world_size=2, layout="tp=2"),
    Case(name="dense, pp=2", model=DENSE, world_size=2, layout="pp=2", microbatches=3),
    Case(
        name="dense, pp=2, float32, full",
        model=DENSE,
        world_size=2,
        layout="pp=2",
        microbatches=3,
        precision=Precision.float32,
        recompute=Recompute.full,
    ),
    Case(name="dense, cp=2", model=DENSE, world_size=2, layout="cp=2", tokens=4_096),
    Case(name="dense, dp=2", model=DENSE, world_size=2),
    Case(name="critic", model=DENSE, head=Head.value),
    Case(name="tied, large vocabulary", model=TIED),
    Case(name="experts", model=EXPERTS),
    Case(name="experts, ep=2", model=EXPERTS, world_size=2, layout="ep=2"),
    Case(name="experts, float32, full", model=EXPERTS, precision=Precision.float32, recompute=Recompute.full),
    Case(name="latent attention", model=LATENT),
)


@dataclass(frozen=True, kw_only=True)
class Found:
    """Of one pipeline stage of one case; bytes.  start: of the process before its engine was built."""

    case: str
    stage: int
    predicted: int
    measured: int
    start: int
    state: int

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted / self.measured


def loss(inputs: LossInputs) -> LossSums:
    """What an actor's loss looks at, or a critic's."""
    if inputs.values_N is not None:
        return LossSums(total=(inputs.values_N * inputs.mask_N).square().sum(), metrics={})
    assert inputs.logprobs_N is not None
    return LossSums(total=-(inputs.logprobs_N * inputs.mask_N).sum(), metrics={})


def engine_config(case: Case) -> EngineConfig:
    return EngineConfig(
        device=Device.cpu,
        precision=case.precision,
        layer_spec=LayerSpec.local,
        recompute=case.recompute,
        microbatch_tokens=case.tokens,
        optim=OptimizerConfig(lr=1e-5),
    )


def batch_of(model: ModelConfig, num_sequences: int, length: int = LENGTH) -> tuple[TrainBatch, Denominators]:
    total = num_sequences * length
    batch = TrainBatch(
        lengths_S=(length,) * num_sequences,
        tokens_T=torch.randint(model.vocab_size, (total,)),
        mask_T=torch.arange(total) % length != 0,
    )
    return batch, Denominators(loss=float(total), tokens=total, sequences=num_sequences)


def measure(rank: Rank, case: Case) -> tuple[int, int]:
    """(bytes before the engine, peak of a step) of one process."""
    torch.set_num_threads(1)
    platform = detect(Device.cpu)
    rank.init_process_group(platform)
    parallel = parse_layout(case.layout)
    groups = init_groups(Layout.of(parallel, case.world_size), platform, device_of(platform, rank.rank), seed=1)
    start = memory(platform).allocated_bytes
    role = "critic" if case.head is Head.value else "actor"
    engine = Engine(role, case.model, parallel, engine_config(case), groups, platform, head=case.head)
    engine.load_weights(lambda models: None)
    torch.manual_seed(groups.coords.dp)
    small, counts = batch_of(case.model, 1)
    engine.train_step(small, loss, counts)
    batch, counts = batch_of(case.model, case.tokens // LENGTH * case.microbatches)
    dist.barrier()
    reset_peak_memory(platform)
    engine.train_step(batch, loss, counts)
    return start, memory(platform).peak_bytes


def run(case: Case) -> list[Found]:
    """Of every stage."""
    measured = run_ranks(measure, case.world_size, (case,), threads_per_rank=1)
    name = "critic" if case.head is Head.value else "actor"
    parallel = parse_layout(case.layout)
    dp = Layout.of(parallel, case.world_size).dp
    work = Work(sequences=case.tokens // LENGTH * case.microbatches * dp, longest=LENGTH, mean=LENGTH)
    role = RolePlan(
        name, case.model, engine_config(case), parallel, case.world_size, work, accelerator=False, head=case.head
    )
    per_stage = case.world_size // role.layout.pp
    results = []
    for stage in range(role.layout.pp):
        ranks = measured[stage * per_stage : (stage + 1) * per_stage]
        start, peak = max(ranks, key=lambda each: each[1])
        results.append(
            Found(
                case=case.name,
                stage=stage,
                predicted=process_peak(role, stage),
                measured=peak,
                start=start,
                state=role.state(stage).total,
            )
        )
    return results


def report_table(rows: Sequence[Found]) -> Table:
    """One row a stage."""
    table = Table(title="peak memory of a training process on the CPU, GiB")
    table.add_column("case")
    for heading in ("stage", "start", "state", "predicted", "measured", "ratio"):
        table.add_column(heading, justify="right")
    for row in rows:
        sizes = [f"{value / GIB:.3f}" for value in (row.start, row.state, row.predicted, row.measured)]
        table.add_row(row.case, str(row.stage), *sizes, f"{row.ratio:.3f}")
    return table


def main() -> int:
    """Exit status: 1 where a case misses the target."""
    parser = argparse.ArgumentParser(description="predicted and measured peak memory of training on the CPU")
    parser.add_argument("--cases", default="", help="only those whose names begin with one of these, comma-separated")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args()
    wanted = tuple(options.cases.split(",")) if options.cases else ("",)
    rows: list[Found] = []
    console = Console(width=max(Console().width, 100))
    for case in CASES:
        if case.name.startswith(wanted):
            rows += run(case)
            console.print(f"{rows[-1].case}: {rows[-1].ratio:.3f}", highlight=False)
    console.print(report_table(rows))
    worst = max(abs(row.ratio - 1) for row in rows)
    console.print(f"largest error: {worst:.1%} (target: {TARGET:.0%})")
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) | {"ratio": row.ratio} for row in rows], indent=2) + "\n")
    return int(worst > TARGET)


if __name__ == "__main__":
    sys.exit(main())
