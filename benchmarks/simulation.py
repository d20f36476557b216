"""How much faster asynchronous training would be, by simulation, from 16 to 512 H100.

    python benchmarks/simulation.py [--models qwen3_30b_a3b_grpo] [--devices 16,128] [--json results.json]
    python benchmarks/simulation.py --seqs 256 --mean 2560 --longest 8192
    python benchmarks/simulation.py --modes "async, 4" --prompts 32 --devices 32
    python benchmarks/simulation.py --published

Each recipe's model with a workload as DAPO's (arXiv:2503.14476): 512 prompts a step (--prompts), 16 responses each, at
most 2,048 tokens of prompt and 20,480 of response, lognormal with a mean of a quarter of that.  Engines run at most
1,024 sequences together, as vLLM 0.32 and verl have it on such devices; --seqs says otherwise.  Costs are the
planner's, for every mode the split and the layouts with which it is fastest.  Speeds are relative to sync on shared
devices, and to sync on separate devices with its own best split.

--published simulates the one asynchronous run of Qwen3-30B-A3B of which others publish the seconds of all parts, with
those seconds instead of the planner's: verl's page of its fully asynchronous trainer, 128 H20, responses of at most
8,192 tokens.  Its mean length is not published, and several are tried.  What decode steps take beside reading memory is
set so that the simulated sync run draws as long as the published one; the asynchronous run is then foretold.  Below
stands what the planner says of it by itself.

Target: with a bound of at most 4, at least 1.6 times sync on shared devices.  Exits with 1 where it is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from mcore_rl.config.launch import load_cluster, load_recipe
from mcore_rl.config.run import RunConfig
from mcore_rl.planning.lengths import Lognormal
from mcore_rl.planning.mode_tables import mode_values, why
from mcore_rl.planning.modes import ModeResult, ModesResult, compare_modes, engine_costs_of, workload
from mcore_rl.planning.recipes import recipe_model
from mcore_rl.planning.search import NONE, fastest_by_rollout
from mcore_rl.planning.simulation import (
    ONE_STEP_OFF,
    SYNC_COLOCATED,
    SYNC_SEPARATE,
    TrainerCosts,
    asynchronous,
    simulate,
)

TARGET = 1.6
MODELS = ("qwen3_30b_a3b_grpo", "mixtral_8x22b_rloo")
DEVICES = (16, 32, 64, 128, 256, 512)
H20 = ("memory_gb_s=4000", "gpu_memory_gib=95.0")  # otherwise as an H100: decode steps read memory
H20_TFLOPS = 148  # as verl counts (utils/flops_counter.py)
MEAN = 2_500  # of verl's run; its own is not published
PROMPTS = 512
RESPONSES = 16
SEQS = 1024
LONGEST = 20_480
SEPARATE_MODES = (
    SYNC_SEPARATE,
    ONE_STEP_OFF,
    asynchronous(4, in_flight=False),
    asynchronous(1),
    asynchronous(2),
    asynchronous(4),
)
NAMES = tuple(mode.name for mode in SEPARATE_MODES)
HEADS = ("model", "GPUs", "mode", "nodes", "step, s", "x shared", "x separate", "engines idle", "trainer idle", "stale")


def workload_of(prompts: int) -> list[str]:
    """Overrides that say what a step trains, in one update."""
    batch = [f"data.train_batch_size={prompts}", f"actor.ppo_mini_batch_size={prompts}"]
    return [*batch, f"rollout.n={RESPONSES}"]


def compare(model: str, devices: int, options: argparse.Namespace) -> ModesResult:
    """All modes of ``model`` on ``devices``."""
    cluster = load_cluster("nvidia_h100")
    sizes = [
        "data.max_prompt_length=2048",
        f"data.max_response_length={options.longest}",
        f"rollout.max_num_seqs={options.seqs}",
    ]
    nodes = f"trainer.nnodes={devices // cluster.gpus_per_node}"
    run = load_recipe(model, [nodes, *workload_of(options.prompts), *sizes])
    assert isinstance(run, RunConfig)
    lengths = Lognormal(options.mean or options.longest / 4, options.longest)
    modes = [mode for mode in SEPARATE_MODES if mode.name in (options.modes or NAMES)]
    return compare_modes(run, recipe_model(run), cluster, lengths, modes=modes, searches=True, steps=options.steps)


def published_run(*overrides: str) -> RunConfig:
    """verl's run, as it draws."""
    sizes = ["data.max_prompt_length=512", "data.max_response_length=8192", f"rollout.max_num_seqs={SEQS}"]
    layout = ["trainer.nnodes=16", "rollout.tp=4", "rollout.dp=32", "rollout.ep=1"]
    run = load_recipe("qwen3_30b_a3b_grpo", [*workload_of(PROMPTS), *sizes, *layout, *overrides])
    assert isinstance(run, RunConfig)
    return run


def planned() -> str:
    """The planner's own seconds of that run, with the trainer's layout that it finds fastest."""
    cluster = load_cluster("nvidia_h100", H20)
    said = [
        "actor.ppo_mini_batch_size=128",
        "actor.allow_stale_updates=true",
        f"data.mean_response_length={MEAN}",
        f"trainer.device_peak_tflops={H20_TFLOPS}",
    ]
    seconds = {}
    for eager in ("true", "false"):
        run = published_run(*said, f"rollout.enforce_eager={eager}")
        fastest = min(fastest_by_rollout(run, recipe_model(run), cluster, NONE), key=lambda each: each.plan.step_s)
        seconds[eager] = dict(fastest.plan.seconds)
    parts = seconds["true"]
    training = sum(each for part, each in parts.items() if part not in ("generate", "sync"))
    return (
        f"the planner, responses of {MEAN:,} tokens: drawing {parts['generate']:.0f} s without graphs, as in that "
        f"run, {seconds['false']['generate']:.0f} s with them; training {training:.0f} s"
    )


def published() -> Iterator[list[str]]:
    """Rows: mean length, seconds added to a decode step, simulated and published seconds of the asynchronous step."""
    cluster = load_cluster("nvidia_h100", H20)
    drawing = 348.05
    training = 135.86
    rest = 13.98
    asynchronous_training = 256.68
    update = 4.01
    step = 282.75
    run = published_run()
    model = recipe_model(run)
    sync = TrainerCosts(fixed_s=training, token_s=0.0, publish_s=rest)
    other = TrainerCosts(fixed_s=asynchronous_training, token_s=0.0, publish_s=update)
    for mean in (1500.0, 2300.0, 3000.0):
        engine = engine_costs_of(run, model, cluster, mean)
        work = workload(run, Lognormal(mean, 8192))
        low = 0.0
        high = 0.1
        for _ in range(8):
            latency = (low + high) / 2
            costs = replace(engine, fixed_s=tuple(each + latency for each in engine.fixed_s))
            drawn = simulate(SYNC_COLOCATED, work, costs, 32, sync, steps=2).step_s - training - rest
            low, high = (latency, high) if drawn < drawing else (low, latency)
        simulated = simulate(asynchronous(1), work, costs, 24, other, steps=3).step_s
        times = f"{(drawing + training + rest) / simulated:.2f}"
        yield [f"{mean:.0f}", f"{latency * 1e3:.0f} ms", f"{simulated:.0f}", f"{step:.0f}", times]


def fastest(result: ModesResult, mode: str) -> ModeResult | None:
    """The fastest split of ``mode``; None if none fits."""
    rows = [row for row in result.rows if row.mode.name == mode]
    return min(rows, key=lambda each: each.simulation.step_s) if rows else None


def rows_of(model: str, devices: int, result: ModesResult) -> Iterator[list[str]]:
    """Of every mode its fastest split."""
    bases = [fastest(result, mode.name) for mode in (SYNC_COLOCATED, SYNC_SEPARATE)]
    for name in dict.fromkeys(row.mode.name for row in result.rows):
        row = fastest(result, name)
        assert row is not None, "each name is that of a row"
        each = row.simulation
        split = f"{row.engine_nodes}/{row.trainer_nodes}" if row.engine_nodes else "all"
        speeds = [f"{base.simulation.step_s / each.step_s:.2f}" if base else "-" for base in bases]
        idle = [f"{each.engines_idle:.0%}", f"{each.trainer_idle:.0%}"]
        staleness = f"{each.staleness_mean:.1f} / {each.staleness_max}"
        yield [model, str(devices), name, split, f"{each.step_s:.0f}", *speeds, *idle, staleness]


def main() -> int:
    """Exit status: 1 where a case misses the target."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--models", default=",".join(MODELS), help="recipes, comma-separated")
    parser.add_argument("--devices", default=",".join(map(str, DEVICES)), help="numbers of GPUs, comma-separated")
    parser.add_argument("--modes", nargs="+", choices=NAMES, metavar="MODE", help=f"of {NAMES} (default: all)")
    parser.add_argument("--prompts", type=int, default=PROMPTS, help="of a step")
    parser.add_argument("--longest", type=int, default=LONGEST, help="tokens of a response at most")
    parser.add_argument("--mean", type=float, help="tokens of a response on average (default: a quarter of them)")
    parser.add_argument("--seqs", type=int, default=SEQS, help="rollout.max_num_seqs")
    parser.add_argument("--steps", type=int, default=4, help="that are measured of each simulation")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--published", action="store_true", help="simulate verl's run instead")
    options = parser.parse_args()
    if options.published:
        shown = Table("mean length", "latency", "simulated step, s", "published", "times sync", box=None)
        for row in published():
            shown.add_row(*row)
        Console(width=140).print(shown, planned(), sep="\n")
        return 0
    values = list[dict[str, Any]]()
    worst = float("inf")
    console = Console(width=140)
    for model in options.models.split(","):
        for devices in map(int, options.devices.split(",")):
            result = compare(model, devices, options)
            if not result.rows:
                console.print(f"{model}, {devices}: {'; '.join(result.refused)}")
                continue
            shown = Table(*HEADS, box=None, pad_edge=False)
            for row in rows_of(model, devices, result):
                shown.add_row(*row)
            console.print(shown)
            console.print(*result.refused, why(result), sep="\n")
            worst = min(worst, result.ratio(result.best))
            values.append({"model": model, "devices": devices} | mode_values(result))
            if options.json is not None:
                options.json.write_text(json.dumps(values, indent=2) + "\n")
    console.print(f"the least of the best: {worst:.2f} times sync (target: {TARGET})")
    return int(worst < TARGET)


if __name__ == "__main__":
    sys.exit(main())
