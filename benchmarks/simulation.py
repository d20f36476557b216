"""How much faster asynchronous training would be, by simulation, from 16 to 512 H100.

    python benchmarks/simulation.py [--models qwen3_30b_a3b_grpo] [--devices 16,128] [--json results.json]

Each recipe's model with a workload as DAPO's (arXiv:2503.14476): 512 prompts a step, 16 responses each, at most 2,048
tokens of prompt and 20,480 of response, lognormal with a mean of a quarter of that.  Costs are the planner's, for
every mode the layouts with which it is fastest.  Speeds are relative to sync on shared devices.

Target: with the best split and a bound of at most 4, at least 1.6 times sync.  Exits with 1 where it is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from mcore_rl.config.launch import load_cluster, load_recipe
from mcore_rl.config.run import RunConfig
from mcore_rl.planning.lengths import Lognormal
from mcore_rl.planning.mode_tables import mode_values
from mcore_rl.planning.modes import ModesResult, compare_modes
from mcore_rl.planning.recipes import recipe_model
from mcore_rl.planning.simulation import SYNC_SEPARATE, asynchronous

TARGET = 1.6
MODELS = ("qwen3_30b_a3b_grpo", "mixtral_8x22b_rloo")
DEVICES = (16, 32, 64, 128, 256, 512)
PROMPTS, RESPONSES, LONGEST = 512, 16, 20_480
WORKLOAD = (
    f"data.train_batch_size={PROMPTS}",
    f"actor.ppo_mini_batch_size={PROMPTS}",
    f"rollout.n={RESPONSES}",
    "data.max_prompt_length=2048",
    f"data.max_response_length={LONGEST}",
)
SEPARATE_MODES = (SYNC_SEPARATE, asynchronous(1), asynchronous(2), asynchronous(4))


def compare(model: str, devices: int, steps: int) -> ModesResult:
    """All modes of ``model`` on ``devices``."""
    cluster = load_cluster("nvidia_h100")
    run = load_recipe(model, [f"trainer.nnodes={devices // cluster.gpus_per_node}", *WORKLOAD])
    assert isinstance(run, RunConfig)
    return compare_modes(
        run, recipe_model(run), cluster, Lognormal(LONGEST / 4, LONGEST), modes=SEPARATE_MODES, steps=steps
    )


def rows_of(model: str, devices: int, result: ModesResult) -> Iterator[list[str]]:
    """Of every mode its fastest split."""
    for name in dict.fromkeys(row.mode.name for row in result.rows):
        row = min((each for each in result.rows if each.mode.name == name), key=lambda each: each.simulation.step_s)
        each = row.simulation
        split = f"{row.engine_nodes}/{row.trainer_nodes}" if row.engine_nodes else "all"
        idle = [f"{each.engines_idle:.0%}", f"{each.trainer_idle:.0%}"]
        ratio, staleness = f"{result.ratio(row):.2f}", f"{each.staleness_mean:.1f} / {each.staleness_max}"
        yield [model, str(devices), name, split, f"{each.step_s:.0f}", ratio, *idle, staleness]


def main() -> int:
    """Exit status: 1 where a case misses the target."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--models", default=",".join(MODELS), help="recipes, comma-separated")
    parser.add_argument("--devices", default=",".join(map(str, DEVICES)), help="numbers of GPUs, comma-separated")
    parser.add_argument("--steps", type=int, default=4, help="that are measured of each simulation")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args()
    heads = ("model", "GPUs", "mode", "nodes", "step, s", "x sync", "engines idle", "trainer idle", "staleness")
    values, worst, console = list[dict[str, Any]](), float("inf"), Console(width=120)
    for model in options.models.split(","):
        for devices in map(int, options.devices.split(",")):
            result = compare(model, devices, options.steps)
            if not result.rows:
                console.print(f"{model}, {devices}: {'; '.join(result.refused)}")
                continue
            shown = Table(*heads, box=None, pad_edge=False)
            for row in rows_of(model, devices, result):
                shown.add_row(*row)
            console.print(shown)
            worst = min(worst, result.ratio(result.best))
            values.append({"model": model, "devices": devices} | mode_values(result))
            if options.json is not None:
                options.json.write_text(json.dumps(values, indent=2) + "\n")
    console.print(f"the least of the best: {worst:.2f} times sync (target: {TARGET})")
    return int(worst < TARGET)


if __name__ == "__main__":
    sys.exit(main())
