#!/usr/bin/env python3
"""Does a run fit, where does each byte go, and how long is a step?  Answers in a second, without a GPU.

    python tools/plan_run.py recipe=mixtral_8x22b_rloo [cluster=nvidia_h200] [trainer.nnodes=16 ...]
    python tools/plan_run.py recipe=mixtral_8x22b_rloo --search
    python tools/plan_run.py --config-dir my_recipes --config-name gsm8k cluster=cpu

recipe, cluster: of launch/recipes and launch/clusters, or paths of yaml files; a cluster that is left out is the
recipe's.  cluster.KEY=VALUE changes the cluster, any other key=value the run.  The model is that of model.path where
its config.json is there, else recipe.checkpoint of model_configs/: nothing is downloaded.
cluster.measured=doctor.json plans with the rates that mcore-rl doctor measured, and prints each.

Exit status: 0 it fits, 2 it does not, or something is wrong with what was written.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from mcore_rl.config.bounds import InputDirectory, OutputFile, PositiveInt
from mcore_rl.config.cluster import ClusterConfig
from mcore_rl.config.launch import load_words
from mcore_rl.config.options import check_options, typed
from mcore_rl.config.run import RunConfig
from mcore_rl.config.sft import SftConfig
from mcore_rl.errors import ConfigError, McoreRLError, Violation
from mcore_rl.planning.plan import Plan, plan
from mcore_rl.planning.recipes import run_model
from mcore_rl.planning.search import Found, refusal, search
from mcore_rl.planning.tables import measured_lines, plan_page, plan_tables, plan_values, search_tables, search_values


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("words", nargs="*", metavar="key=value", help="recipe=, cluster=, and overrides")
    top.add_argument("--config-dir", type=typed(InputDirectory), help="of yaml files of your own")
    top.add_argument("--config-name", help="the yaml file there to begin with")
    top.add_argument("--search", action="store_true", help="the fastest layouts that fit, and what was refused")
    top.add_argument("--limit", type=typed(PositiveInt), default=10, help="layouts that --search shows (default: 10)")
    top.add_argument("--html", type=typed(OutputFile), metavar="FILE", help="write a page")
    top.add_argument("--json", type=typed(OutputFile), metavar="FILE", help="write the numbers")
    return top


def composed(options: argparse.Namespace) -> tuple[RunConfig | SftConfig, ClusterConfig]:
    """The run and its cluster.  Raises ConfigError where either cannot be told."""
    recipe = ""
    if options.config_name:
        recipe = str((options.config_dir or Path()) / f"{options.config_name}.yaml")
    run, cluster, _ = load_words(options.words, recipe=recipe)
    return run, cluster


def write(options: argparse.Namespace, planned: Plan, result: Found | None) -> None:
    """The files that were asked for."""
    if options.html:
        options.html.write_text(plan_page(planned, result), encoding="utf-8")
    if options.json:
        values = plan_values(planned) | ({} if result is None else {"search": search_values(result)})
        options.json.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def searched(options: argparse.Namespace, run: RunConfig | SftConfig, cluster: ClusterConfig) -> int:
    """``--search``: the best is planned and written, whether or not the run as it stands fits."""
    if not cluster.gpus_per_node:
        problem = "searches layouts of accelerators"
        raise ConfigError([Violation("--search", "", problem, "Leave it out, or name a cluster with GPUs")])
    result = search(run, run_model(run), cluster, limit=options.limit)
    console = Console()
    console.print(search_tables(result))
    if not result.best:
        return 2
    write(options, result.best[0].plan, result)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status; see above."""
    options = parser().parse_intermixed_args(arguments)
    errors = Console(stderr=True, emoji=False)
    try:
        check_options(options, parser())
        run, cluster = composed(options)
        for line in measured_lines(cluster):
            Console().print(line, markup=False, highlight=False, soft_wrap=True)
        if options.search:
            return searched(options, run, cluster)
        model = run_model(run)
        planned = plan(run, model, cluster)
        Console().print(plan_tables(planned))
        write(options, planned, None)
        if planned.fits:
            return 0
        raise refusal(planned, run, model, cluster)
    except (McoreRLError, OSError) as error:
        errors.print(f"error: {error}", markup=False, highlight=False, soft_wrap=True)
        return 2


if __name__ == "__main__":
    sys.exit(main())
