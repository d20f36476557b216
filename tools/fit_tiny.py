"""Fit a tiny mixture of experts to two-digit sums, through the whole training engine, on this machine.

A check that everything works, and a first look at what a layout is.  The weights are drawn anew under each layout, so
the curves differ a little; from the same weights they would not (tests/invariance).

    python tools/fit_tiny.py                          # two processes, experts split over them
    python tools/fit_tiny.py --layout tp=2,ep=1       # tensor parallel instead
    python tools/fit_tiny.py --layout pp=2,ep=2 --processes 4 --steps 40
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from mcore_rl.config.bounds import OutputDirectory, PositiveInt, Ranks, Seed, Share
from mcore_rl.config.engine import (
    AuxLoss,
    Device,
    EngineConfig,
    MoeTrainConfig,
    OptimizerConfig,
    Precision,
    Recompute,
    Schedule,
)
from mcore_rl.config.model import ModelConfig, MoeConfig
from mcore_rl.config.options import check_options, typed
from mcore_rl.config.parallel import ParallelConfig, parse_layers, parse_layout
from mcore_rl.ground.errors import McoreRLError, refuse_if_any
from mcore_rl.parallel.layout import Layout, describe_placement, layout_violations

if TYPE_CHECKING:  # torch and Megatron come when all is checked
    from mcore_rl.ground.types import LossInputs, LossSums, TrainBatch
    from mcore_rl.parallel.launch import Rank
    from mcore_rl.training.engine import Engine

ALPHABET = "0123456789+=;"
MODEL = ModelConfig(
    num_layers=4,
    hidden_size=128,
    ffn_hidden_size=256,
    num_attention_heads=4,
    num_query_groups=2,
    head_dim=32,
    vocab_size=len(ALPHABET),
    max_position_embeddings=32,
    moe=MoeConfig(num_experts=4, top_k=2, ffn_hidden_size=192),
)


@dataclass(frozen=True)
class Settings:
    """What the command line chose."""

    processes: int
    parallel: ParallelConfig
    device: Device
    steps: int
    batch_size: int
    lr: float
    recompute: Recompute
    seed: int
    out: Path


def engine_config(settings: Settings) -> EngineConfig:
    """Engine settings of the fit."""
    return EngineConfig(
        device=settings.device,
        precision=Precision.float32,
        recompute=settings.recompute,
        microbatch_tokens=1024,
        seed=settings.seed,
        moe=MoeTrainConfig(aux_loss=AuxLoss.sequence, aux_loss_coeff=1e-2),
        optim=OptimizerConfig(
            lr=settings.lr,
            betas=(0.9, 0.95),
            lr_schedule=Schedule.cosine,
            lr_warmup_steps=min(10, settings.steps - 1),
            total_steps=settings.steps,
            min_lr_ratio=0.1,
        ),
    )


def sums(count: int, seed: int) -> TrainBatch:
    """``count`` problems such as ``37+85=122;``; only the answer is trained."""
    import torch

    from mcore_rl.ground.types import TrainBatch

    draw = random.Random(seed)
    tokens: list[int] = []
    mask: list[bool] = []
    lengths: list[int] = []
    for _ in range(count):
        left = draw.randrange(100)
        right = draw.randrange(100)
        question = f"{left}+{right}="
        answer = f"{left + right};"
        tokens += [ALPHABET.index(letter) for letter in question + answer]
        mask += [False] * len(question) + [True] * len(answer)
        lengths.append(len(question) + len(answer))
    return TrainBatch(lengths_S=tuple(lengths), tokens_T=torch.tensor(tokens), mask_T=torch.tensor(mask))


def cross_entropy(inputs: LossInputs) -> LossSums:
    """Minus the log-probability of the trained tokens."""
    from mcore_rl.ground.types import LossSums

    assert inputs.logprobs_N is not None
    return LossSums(total=-(inputs.logprobs_N * inputs.mask_N).sum(), metrics={})


def share(batch: TrainBatch, rank: int, count: int) -> TrainBatch:
    """Every ``count``-th sequence: one data-parallel rank's share of a global batch."""
    return batch.select(range(rank, len(batch.lengths_S), count))


def held_out_loss(engine: Engine, batch: TrainBatch) -> tuple[float, float]:
    """(loss per answer token, mean probability of the whole right answer) on problems that were never trained."""
    import torch

    logprobs_T = engine.score(batch, with_entropy=False).logprobs_T
    assert logprobs_T is not None
    trained_T = logprobs_T * batch.mask_T
    per_problem = torch.stack([part.sum() for part in trained_T.split(batch.lengths_S)])
    return float(-trained_T.sum() / batch.mask_T.sum()), float(per_problem.exp().mean())


def fit(rank: Rank, settings: Settings) -> dict[str, object]:
    """One process of the fit."""
    from mcore_rl.ground.types import Denominators
    from mcore_rl.parallel.device import detect, device_of
    from mcore_rl.parallel.groups import init_groups
    from mcore_rl.training.engine import Engine

    platform = detect(settings.device)
    rank.init_process_group(platform)
    layout = Layout.of(settings.parallel, settings.processes)
    groups = init_groups(layout, platform, device_of(platform, rank.rank), settings.seed)
    engine = Engine("fit", MODEL, settings.parallel, engine_config(settings), groups, platform)
    coords = groups.coords
    held_out = sums(256, seed=10**6)
    before = held_out_loss(engine, held_out)

    console = Console(quiet=rank.rank != 0)
    now = TextColumn("{task.fields[now]}")
    columns = (TextColumn("fit"), BarColumn(), MofNCompleteColumn(), now, TimeRemainingColumn())
    records = []
    begin = time.perf_counter()
    num_tokens = 0
    with Progress(*columns, console=console, disable=rank.rank != 0 or not console.is_terminal) as progress:
        task = progress.add_task("fit", total=settings.steps, now="")
        for step in range(settings.steps):
            batch = sums(settings.batch_size, seed=settings.seed + step)
            counts = Denominators(
                loss=float(batch.mask_T.sum()), tokens=batch.tokens_T.numel(), sequences=len(batch.lengths_S)
            )
            result = engine.train_step(share(batch, coords.dp, layout.dp), cross_entropy, counts)
            num_tokens += counts.tokens
            records.append({"step": step + 1, **asdict(result)})
            progress.update(task, advance=1, now=f"loss {result.loss:.3f}  |g| {result.grad_norm:.2f}")
    seconds = time.perf_counter() - begin
    after = held_out_loss(engine, held_out)
    return {"before": before, "after": after, "records": records, "tokens_s": num_tokens / seconds}


def sparkline(values: list[float], width: int = 60) -> str:
    """The course of ``values`` in one line."""
    if len(values) > width:
        values = [values[round(i * (len(values) - 1) / (width - 1))] for i in range(width)]
    low = min(values)
    high = max(values)
    return "".join("▁▂▃▄▅▆▇█"[round(7 * (value - low) / (high - low or 1))] for value in values)


def report(console: Console, measured: dict, settings: Settings) -> bool:
    """Print what was learned, keep the metrics; whether anything was."""
    settings.out.mkdir(parents=True, exist_ok=True)
    metrics = settings.out / "metrics.jsonl"
    partial = metrics.with_suffix(".partial")
    partial.write_text("".join(json.dumps(record) + "\n" for record in measured["records"]))
    partial.replace(metrics)
    losses = [record["loss"] for record in measured["records"]]
    console.print(f"\nloss {losses[0]:.3f} {sparkline(losses)} {losses[-1]:.3f}")
    table = Table("256 problems that were never trained", "before", "after", box=None, pad_edge=False)
    table.add_row("loss per answer token", f"{measured['before'][0]:.3f}", f"{measured['after'][0]:.3f}")
    table.add_row("probability of the right answer", f"{measured['before'][1]:.1%}", f"{measured['after'][1]:.1%}")
    console.print(table)
    console.print(f"{measured['tokens_s']:.0f} tokens/s; metrics in {metrics}")
    learned = measured["after"][0] < 0.5 * measured["before"][0]
    console.print("[green]It learned.[/]" if learned else "[red]Too little: the held-out loss should have halved.[/]")
    return learned


def parser() -> argparse.ArgumentParser:
    """The command line."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument(
        "--layout",
        type=typed(parse_layout),
        default="ep=2",
        help="sizes of tp, pp, vpp, cp, ep, etp (default: %(default)s)",
    )
    options.add_argument(
        "--processes", type=typed(Ranks), default=2, help="how many, on this machine (default: %(default)s)"
    )
    options.add_argument(
        "--pipeline-layers", type=typed(parse_layers), help="layers of each chunk, if they differ: 3,1"
    )
    options.add_argument("--device", default="auto", choices=[device.value for device in Device])
    options.add_argument("--recompute", default="none", choices=[recompute.value for recompute in Recompute])
    options.add_argument("--steps", type=typed(PositiveInt), default=150)
    options.add_argument(
        "--batch-size", type=typed(PositiveInt), default=128, help="problems a step, over all processes"
    )
    options.add_argument("--lr", type=typed(Share), default=3e-3)
    options.add_argument("--seed", type=typed(Seed), default=1)
    options.add_argument("--out", type=typed(OutputDirectory), default=Path("runs/fit_tiny"))
    options.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return options


def main() -> int:
    """Run the fit; 0 when it learned, 1 when it did not, 2 on a user error."""
    arguments = parser().parse_args()
    console = Console()
    try:
        check_options(arguments, parser())
        parallel = replace(arguments.layout, pipeline_layers=arguments.pipeline_layers)
        settings = Settings(
            processes=arguments.processes,
            parallel=parallel,
            device=Device(arguments.device),
            steps=arguments.steps,
            batch_size=arguments.batch_size,
            lr=arguments.lr,
            recompute=Recompute(arguments.recompute),
            seed=arguments.seed,
            out=arguments.out,
        )
        refuse_if_any(layout_violations(MODEL, settings.parallel, settings.processes))
        layout = Layout.of(settings.parallel, settings.processes)
        from mcore_rl.parallel.device import banner, detect
        from mcore_rl.parallel.launch import run_ranks

        console.print(banner(detect(settings.device)), soft_wrap=True)
        console.print(f"{settings.processes} processes: dp={layout.dp},{settings.parallel}")
        if settings.parallel.pp > 1:
            console.print(describe_placement(MODEL.num_layers, settings.parallel))
        return 0 if report(console, run_ranks(fit, layout.world_size, (settings,), layout=layout)[0], settings) else 1
    except McoreRLError as error:
        if arguments.debug:
            raise
        # As plain text: a remedy such as pipeline_layers=[3,1] must not be read as markup.
        Console(stderr=True, emoji=False).print(f"error: {error}", markup=False, highlight=False, soft_wrap=True)
        return 2


if __name__ == "__main__":
    sys.exit(main())
