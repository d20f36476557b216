"""What the engine costs beside Megatron: its share of a training step, and the step against a plain Megatron loop.

    python benchmarks/engine_overhead.py [--steps 8] [--threads 1] [--cases dense,moe] [--json results.json]

A model of about 10M parameters, dense and mixture of experts, on one process and on two (data parallel), on the CPU in
float32, where Megatron's own kernels are fastest and overhead weighs most; 16 sequences of 100 to 300 tokens, like
GSM8K's with a sampled answer, in packed microbatches of at most 2,048.

Share: timers are hung on the calls of a step from outside.  A call's time is charged to it alone, without the timed
calls inside it, so that the accounts add up to the step.  Megatron's are the model chunks' forward, autograd's backward
(the few one-dimensional operations of the loss among it), the reduction of gradients and the optimizer; and the
log-prob kernel, which stands where Megatron computes its cross entropy.  Everything else is the engine's, the caller's
loss, the microbatches that it builds and Megatron's schedule included.  Target: at most 3 % of the step, from the
medians over the steps after a warm-up.

Beside it: a loop over the same microbatches, built beforehand, of Megatron's schedule, its fused vocabulary-parallel
cross entropy and ``optimizer.step()``, on the same modules.  Steps of both alternate, and the ratio is the median of
those of neighbours, so that a busy machine disturbs both.  It has no target: the two kernels differ.

Exits with 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
from megatron.core.utils import get_model_config
from rich.console import Console
from rich.table import Table
from torch import Tensor

from mcore_rl.config.engine import Device, EngineConfig, LayerSpec, OptimizerConfig, Precision
from mcore_rl.config.model import ModelConfig, MoeConfig
from mcore_rl.config.parallel import ParallelConfig
from mcore_rl.ground.types import Denominators, LossInputs, LossSums, TrainBatch
from mcore_rl.parallel.device import detect, device_of
from mcore_rl.parallel.groups import init_groups
from mcore_rl.parallel.launch import Rank, run_ranks
from mcore_rl.parallel.layout import Layout
from mcore_rl.training import engine as engine_module
from mcore_rl.training import optimizer as optimizer_module
from mcore_rl.training import router as router_module
from mcore_rl.training import schedule as schedule_module
from mcore_rl.training.engine import Engine
from mcore_rl.training.microbatch import Microbatch, build_microbatches
from mcore_rl.training.router import Purpose
from mcore_rl.training.schedule import run_schedule

TARGET = 0.03
NUM_SEQUENCES = 16
SHORTEST = 100
LONGEST = 300
BUDGET = 2_048
WARM_UP = 2

FORWARD = "forward"
BACKWARD = "backward"
KERNEL = "log-prob kernel"
REDUCTION = "gradient reduction"
OPTIMIZER = "optimizer"
MEGATRONS = (FORWARD, BACKWARD, KERNEL, REDUCTION, OPTIMIZER)
ENGINES = (
    "microbatches",
    "loss inputs",
    "the caller's loss",
    "sums and metrics",
    "finite watch",
    "routers",
    "Megatron's schedule",
    "the rest",
)


def model_config(name: str) -> ModelConfig:
    """About 10M parameters, of which the two embeddings are 4M."""
    moe = MoeConfig(num_experts=4, top_k=2, ffn_hidden_size=192) if name == "moe" else None
    return ModelConfig(
        num_layers=8,
        hidden_size=256,
        ffn_hidden_size=704,
        num_attention_heads=8,
        num_query_groups=4,
        head_dim=32,
        vocab_size=8_192,
        max_position_embeddings=512,
        moe=moe,
    )


@dataclass(frozen=True, kw_only=True)
class Result:
    """One case.  seconds: median over the steps, by account.  ratio: of the engine's step to the plain loop's."""

    model: str
    processes: int
    threads: int
    num_parameters: int
    num_microbatches: int
    seconds: dict[str, float]
    step_s: float
    ratio: float

    @property
    def share(self) -> float:
        """The engine's part of a step."""
        return 1 - sum(self.seconds[account] for account in MEGATRONS) / sum(self.seconds.values())

    @property
    def passed(self) -> bool:
        """Whether the target is met."""
        return self.share <= TARGET


class Stopwatch:
    """Exclusive seconds by account: the time of a call is charged to it alone, without the timed calls inside it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._stack: list[str] = []
        self._mark = 0.0

    def _charge(self) -> None:
        now = time.perf_counter()
        if self._stack:
            self.seconds[self._stack[-1]] += now - self._mark
        self._mark = now

    def timed(self, call: Callable[..., Any], account: str) -> Callable[..., Any]:
        """``call``, charged to ``account``."""

        @functools.wraps(call)
        def run(*args: Any, **kwargs: Any) -> Any:
            self._charge()
            self._stack.append(account)
            try:
                return call(*args, **kwargs)
            finally:
                self._charge()
                self._stack.pop()

        return run

    def hang_on(self, owner: Any, account: str, *names: str) -> None:
        """Time the calls of these functions of ``owner`` from now on."""
        for name in names:
            setattr(owner, name, self.timed(getattr(owner, name), account))


def hang_on_engine(watch: Stopwatch, engine: Engine) -> None:
    """Timers on every part of a step."""
    assert engine.optimizer is not None
    for chunk in engine.chunks:
        watch.hang_on(chunk, FORWARD, "forward")
        watch.hang_on(chunk, OPTIMIZER, "zero_grad_buffer")
        watch.hang_on(get_model_config(chunk), REDUCTION, "finalize_model_grads_func")
    watch.hang_on(torch.autograd, BACKWARD, "backward")
    watch.hang_on(engine_module, KERNEL, "token_logprobs")
    megatron_calls = ("zero_grad", "prepare_grads", "get_grad_norm", "step_with_ready_grads")
    watch.hang_on(engine.optimizer.megatron, OPTIMIZER, *megatron_calls)
    watch.hang_on(optimizer_module.clip_grads, OPTIMIZER, "clip_grad_by_total_norm_fp32")
    watch.hang_on(router_module, FORWARD, "topk_routing_with_score_function")  # Megatron's, called by our router

    schedule = schedule_module.get_forward_backward_func()
    schedule_module.get_forward_backward_func = lambda: watch.timed(schedule, "Megatron's schedule")
    watch.hang_on(engine_module, "microbatches", "build_microbatches")
    watch.hang_on(engine, "loss inputs", "_loss_inputs")
    watch.hang_on(engine_module._RunningSums, "sums and metrics", "add", "over_ranks")
    watch.hang_on(engine._watch, "finite watch", "begin", "end", "loss", "_note")
    if engine.routing is not None:
        watch.hang_on(engine.routing, "routers", "begin", "announce", "metrics")
        watch.hang_on(router_module.Router, "routers", "routing")


def make_batch(vocab_size: int) -> TrainBatch:
    """The global batch: random tokens, the second half of each sequence trained."""
    draw = random.Random(0)
    seeded = torch.Generator().manual_seed(0)
    lengths = tuple(draw.randint(SHORTEST, LONGEST) for _ in range(NUM_SEQUENCES))
    return TrainBatch(
        lengths_S=lengths,
        tokens_T=torch.randint(vocab_size, (sum(lengths),), generator=seeded),
        mask_T=torch.cat([torch.arange(length) >= length // 2 for length in lengths]),
        old_logprobs_T=torch.full((sum(lengths),), -9.0),
        advantages_T=torch.randn(sum(lengths), generator=seeded),
    )


def clipped_loss(inputs: LossInputs) -> LossSums:
    """The clipped surrogate of PPO (arXiv:1707.06347, eq. 7) with two metrics, as an algorithm would write it."""
    assert inputs.logprobs_N is not None and inputs.old_logprobs_N is not None and inputs.advantages_N is not None
    ratio_N = torch.exp((inputs.logprobs_N - inputs.old_logprobs_N) * inputs.mask_N)
    gain_N = torch.minimum(inputs.advantages_N * ratio_N, inputs.advantages_N * ratio_N.clamp(0.8, 1.2))
    was_clipped_N = (ratio_N.detach() - 1).abs() > 0.2
    metrics = {"ratio": (ratio_N.detach() * inputs.mask_N).sum(), "clipped": (was_clipped_N & inputs.mask_N).sum()}
    return LossSums(total=-(gain_N * inputs.mask_N).sum(), metrics=metrics)


def plain_step(engine: Engine, batch: TrainBatch, microbatches: Sequence[Microbatch], counts: Denominators) -> None:
    """What one would write over Megatron alone.  Our router must still be told which microbatch it sees."""
    assert engine.optimizer is not None

    def announce(microbatch: Microbatch) -> None:
        if engine.routing is not None:
            engine.routing.announce(microbatch)

    def cross_entropy(microbatch: Microbatch, output: Tensor) -> Tensor:
        labels_N1 = microbatch.labels_N.unsqueeze(1)
        losses_N = fused_vocab_parallel_cross_entropy(output.transpose(0, 1), labels_N1, engine.groups.tp).squeeze(1)
        return (losses_N * masks[microbatch.index]).sum() / counts.loss

    masks = [microbatch.at_targets(batch.mask_T) for microbatch in microbatches]
    for chunk in engine.chunks:
        chunk.zero_grad_buffer()
    engine.optimizer.megatron.zero_grad()
    if engine.routing is not None:
        engine.routing.begin(Purpose.train, batch, denominators=counts)
    run_schedule(engine.chunks, microbatches, announce, cross_entropy, forward_only=False)
    engine.optimizer.megatron.step()


def measure(rank: Rank, name: str, steps: int) -> Result:
    """One process of one case; rank 0's result counts."""
    platform = detect(Device.cpu)
    rank.init_process_group(platform)
    parallel = ParallelConfig()
    groups = init_groups(Layout.of(parallel, rank.world_size), platform, device_of(platform, rank.rank), seed=1)
    config = EngineConfig(
        device=Device.cpu,
        precision=Precision.float32,
        layer_spec=LayerSpec.local,
        microbatch_tokens=BUDGET,
        optim=OptimizerConfig(lr=1e-5),
    )
    engine = Engine("actor", model_config(name), parallel, config, groups, platform)
    batch = make_batch(engine.model.vocab_size)
    counts = Denominators(loss=float(batch.mask_T.sum()), tokens=batch.tokens_T.numel(), sequences=len(batch.lengths_S))
    mine = batch.select(range(groups.coords.dp, NUM_SEQUENCES, groups.layout.dp))
    built = build_microbatches(mine, groups, tokens=BUDGET, sequences=None, equal_over_experts=False)

    watch = Stopwatch()
    loss = watch.timed(clipped_loss, "the caller's loss")
    hang_on_engine(watch, engine)
    step = watch.timed(lambda: engine.train_step(mine, loss, counts), "the rest")
    accounts: list[dict[str, float]] = []
    plain_s: list[float] = []
    for _ in range(WARM_UP + steps):
        dist.barrier()  # so that no step waits for what a peer did before it
        watch.seconds = defaultdict(float)
        step()
        accounts.append(dict(watch.seconds))
        dist.barrier()
        start = time.perf_counter()
        plain_step(engine, mine, built, counts)
        plain_s.append(time.perf_counter() - start)
    accounts = accounts[WARM_UP:]
    plain_s = plain_s[WARM_UP:]
    step_s = [sum(step.values()) for step in accounts]
    return Result(
        model=name,
        processes=rank.world_size,
        threads=torch.get_num_threads(),
        num_parameters=sum(parameter.numel() for parameter in engine.models[0].parameters()),
        num_microbatches=len(built),
        seconds={key: statistics.median(step.get(key, 0.0) for step in accounts) for key in (*MEGATRONS, *ENGINES)},
        step_s=statistics.median(step_s),
        ratio=statistics.median(ours / theirs for ours, theirs in zip(step_s, plain_s, strict=True)),
    )


def account_table(results: Sequence[Result]) -> Table:
    """Milliseconds and shares of a step, one column a case."""
    lengths = f"{NUM_SEQUENCES} sequences of {SHORTEST} to {LONGEST} tokens"
    table = Table(title=f"a training step on the CPU, float32, {lengths}; milliseconds (share of the step)")
    table.add_column("")
    for result in results:
        size = f"{result.num_parameters / 1e6:.1f}M parameters\nmicrobatches: {result.num_microbatches} each"
        where = f"processes: {result.processes}, threads: {result.threads}"
        table.add_column(f"{result.model}\n{size}\n{where}", justify="right")
    for accounts, title in ((MEGATRONS, "Megatron's"), (ENGINES, "the engine's")):
        table.add_section()
        for account in accounts:
            cells = []
            for result in results:
                seconds = result.seconds[account]
                cells.append(f"{1e3 * seconds:.2f} ({seconds / sum(result.seconds.values()):6.2%})")
            table.add_row(account, *cells)
        totals = [sum(result.seconds[account] for account in accounts) for result in results]
        shares = [total / sum(result.seconds.values()) for total, result in zip(totals, results, strict=True)]
        cells = [f"{1e3 * total:.2f} ({share:6.2%})" for total, share in zip(totals, shares, strict=True)]
        table.add_row(f"[bold]{title}, together[/bold]", *cells)
    table.add_section()
    verdicts = ["[green]pass[/green]" if result.passed else "[red]MISSED[/red]" for result in results]
    table.add_row(f"the engine's share (<= {TARGET:.0%})", *verdicts)
    table.add_row("step / plain Megatron step", *(f"{result.ratio:.3f}" for result in results))
    return table


def main() -> int:
    """Exit status: 1 where the target is missed."""
    parser = argparse.ArgumentParser(description="the engine's own share of a training step")
    parser.add_argument("--steps", type=int, default=8, help="measured steps of each loop, after the warm-up")
    parser.add_argument("--threads", type=int, help="of each process; the cores are shared evenly if it is not given")
    parser.add_argument("--cases", default="dense,moe", help="which models, of dense and moe")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args()
    results = [
        run_ranks(measure, processes, (name, options.steps), threads_per_rank=options.threads)[0]
        for name in options.cases.split(",")
        for processes in (1, 2)
    ]
    Console(width=max(Console().width, 150)).print(account_table(results))
    if options.json is not None:
        rows = [asdict(result) | {"share": result.share, "passed": result.passed} for result in results]
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
    return 0 if all(result.passed for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
